"""Real processes that are killed, stopped, cut off and damaged: all that are left end alike.

`Team.finish` is part of every test: all workers end well, with equal digests, and no share of the
data was dealt twice.
"""

import http.server
import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from elastic_schedule import OPTIONS, inject_faults
from elastic_team import HEARTBEAT_S, TOKEN, Program, Team, Worker, free_port_pair
from thinwire.elastic.registry_server import ask_registry
from thinwire.security.token import Token
from thinwire.train.workers.elastic import default_identity
from thinwire.transport.address import split_address
from training import corpus  # noqa: F401

EVERY, STEP_S = 4, 0.03
ROUND_S = EVERY * STEP_S
# A machine of two cores may run two such tests at once, eight processes: they get the processor
# late, and heartbeats are sent every fifth of the heartbeat timeout. Less than a second timeout.
ALLOWANCE_S = 0.8


@pytest.fixture
def team(tmp_path):
    with Team(tmp_path, steps=120, every=EVERY, step_s=STEP_S) as team:
        yield team


def died(team: Team, victim: Worker) -> None:
    team.until(lambda: victim.gone)
    assert victim.wait(5) == -signal.SIGKILL


def longest_stall_s(workers: list[Worker]) -> float:
    return max(worker.longest_stall_s() for worker in workers)


# -- a worker is killed ---------------------------------------------------------------------------


@pytest.mark.slow_cases(but=("while",))
@pytest.mark.parametrize(
    "moment",
    [("step", 18), ("started", 5), ("landed", 5)],
    ids=["between rounds", "while payloads travel", "before its vote"],
)
def test_a_killed_worker_costs_the_others_one_heartbeat_timeout(team: Team, moment) -> None:
    first, second, victim = team.start("w0"), team.start("w1"), team.start("w2", die=moment)
    died(team, victim)
    again = team.start("w2")
    team.finish()
    assert longest_stall_s([first, second]) <= HEARTBEAT_S + ROUND_S + ALLOWANCE_S, team.report()
    assert again.events("healed")
    assert team.met(again, 3), team.report()
    for worker in (first, second):
        assert any("w2" in event["who"] for event in worker.events("left")), team.report()
        assert any("w2" in event["who"] for event in worker.events("arrived")), team.report()


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["fetching", "adopting", "connecting"])
def test_a_worker_killed_in_its_healing_or_before_it_connects_costs_the_others_little(
    team: Team, doing
) -> None:
    first, second = team.start_all("w0", "w1")
    # So far behind, it takes a state and not the last rounds.
    team.until(lambda: first.version > 8)
    victim = team.start("w2", die=("while", doing))
    died(team, victim)
    assert not victim.steps()
    again = team.start("w2")
    team.finish()
    bound_s = ROUND_S + ALLOWANCE_S + (HEARTBEAT_S if doing == "connecting" else 0.0)
    assert longest_stall_s([first, second]) <= bound_s, team.report()
    assert again.events("healed")


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_killed_at_the_end_does_not_keep_the_others(team: Team, comes_back: bool) -> None:
    team.options["steps"] = 42  # half a round is left over
    victim, *_ = team.start("w2", die=("flushing", 0)), team.start("w0"), team.start("w1")
    died(team, victim)
    if comes_back:  # to what the others have
        again = team.start("w2")
        team.finish()
        assert not again.steps()
        return
    # One timeout until it is missed, and two in which it is given to come back.
    for worker in team.finish(3 * HEARTBEAT_S + ROUND_S + ALLOWANCE_S):
        assert worker.last("last_step") == 42


# -- a worker, or the lighthouse, is silent -------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_worker_costs_the_others_one_heartbeat_timeout(team: Team) -> None:
    team.options["steps"] = 200
    first, second, victim = team.start_all("w0", "w1", "w2")
    victim.send(signal.SIGSTOP)
    began = first.version
    time.sleep(3 * HEARTBEAT_S)
    assert first.version > began + 3, team.report()
    victim.send(signal.SIGCONT)
    team.until(lambda: any(t["workers"] == 3 for t in first.steps()[-1:]))
    team.finish()
    assert longest_stall_s([first, second]) <= HEARTBEAT_S + ROUND_S + ALLOWANCE_S, team.report()
    assert victim.events("healed"), team.report()


@pytest.mark.slow
def test_a_worker_that_is_stopped_as_it_connects_costs_the_others_one_heartbeat_timeout(
    team: Team,
) -> None:
    """Its name is the first, and it has a store that accepts and does not answer."""
    team.options["steps"] = 280
    first, second = team.start_all("w1", "w2")
    victim = team.start("w0", stops=True)
    team.until(lambda: is_stopped(victim))
    time.sleep(5 * HEARTBEAT_S)
    victim.send(signal.SIGCONT)
    team.finish()
    assert longest_stall_s([first, second]) <= HEARTBEAT_S + ROUND_S + ALLOWANCE_S, team.report()


def is_stopped(worker: Worker) -> bool:
    status = Path(f"/proc/{worker.process.pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_a_worker_that_was_stopped_until_the_run_was_over_does_not_go_on_alone(team: Team) -> None:
    team.options["steps"] = 80
    first, second, victim = team.start_all("w0", "w1", "w2")
    victim.send(signal.SIGSTOP)
    assert [worker.wait(40) for worker in (first, second)] == [0, 0], team.report()
    victim.send(signal.SIGCONT)
    assert victim.wait(20) == 1, team.report()
    said = victim.last("error")
    assert f"the run is over: version {first.version}, digest" in said, said
    team.finish()  # no share was dealt twice


@pytest.mark.slow
def test_a_worker_that_was_stopped_until_the_others_wait_for_it_ends_with_their_model(
    team: Team,
) -> None:
    first, victim = team.start_all("w0", "w1")
    team.until(lambda: first.version >= 26)
    victim.send(signal.SIGSTOP)
    team.until(lambda: first.digest)
    victim.send(signal.SIGCONT)
    team.finish()
    assert victim.steps()[-1]["version"] < first.last("last_step") // EVERY, team.report()
    assert victim.last("last_step") == first.last("last_step")


@pytest.mark.slow
def test_a_worker_that_was_stopped_until_the_others_were_killed_waits_for_one_of_them(
    team: Team,
) -> None:
    team.options |= {"steps": 200, "terms": {"give_up_s": 1.5}}
    first, second, victim = team.start_all("w0", "w1", "w2")
    victim.send(signal.SIGSTOP)
    version = first.version
    team.until(lambda: first.version > version + 4)
    first.kill()
    second.kill()
    victim.send(signal.SIGCONT)
    assert victim.wait(20) == 1, team.report()
    assert "no worker that has that of the run is there" in victim.last("error")
    team.check_shares()


@pytest.mark.slow
def test_a_run_goes_on_after_all_of_it_was_killed_and_the_lighthouse_too(
    team: Team, tmp_path
) -> None:
    names = ("w0", "w1")
    saved = {name: {"checkpoint": str(tmp_path / f"{name}.pt")} for name in names}
    before = [team.start(name, **saved[name]) for name in names]
    team.until(lambda: all(worker.version > 8 for worker in before))
    team.kill_lighthouse()
    for worker in before:
        worker.kill()
    team.start_lighthouse()
    after = [team.start(name, **saved[name]) for name in names]
    team.finish()
    for worker in after:
        assert worker.steps()[0]["version"] >= 8, team.report()
        assert worker.version == 30
    # No step was taken twice by both processes of a worker.
    assert max(w.steps()[-1]["step"] for w in before) <= after[0].steps()[0]["step"] + EVERY


class BadGateway(http.server.BaseHTTPRequestHandler):
    """What a proxy answers whose server is gone."""

    def do_POST(self) -> None:
        self.send_error(502)

    def log_message(self, *_) -> None:
        pass


@pytest.mark.slow
def test_no_worker_ends_when_the_lighthouse_does_or_another_server_has_its_port(team: Team) -> None:
    team.options["steps"] = 200
    workers = team.start_all("w0", "w1", "w2")
    team.kill_lighthouse()
    time.sleep(1.5)
    team.start_lighthouse()
    versions = [worker.version for worker in workers]
    team.until(lambda: all(w.version > v for w, v in zip(workers, versions, strict=True)))
    # A heartbeat notices it in its own time, perhaps after the round that was begun again.
    team.until(lambda: all(len(worker.events("lighthouse")) > 1 for worker in workers))
    for worker in workers:
        lost, *_, found = worker.events("lighthouse")
        assert lost["why"].startswith("is lost")
        assert found["why"] == "is there again"
        # They found each other again at once, and none went on without the others.
        since = [line for line in worker.steps() if line["at_s"] > lost["at_s"]]
        assert all(line["workers"] == 3 for line in since), team.report()
    team.kill_lighthouse()
    workers[2].kill()
    other = http.server.ThreadingHTTPServer(split_address(team.address), BadGateway)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    time.sleep(3 * HEARTBEAT_S)
    other.shutdown()
    other.server_close()
    team.start_lighthouse()
    again = team.start("w2")
    team.finish()
    assert again.events("healed")


@pytest.mark.slow
def test_a_worker_that_is_cut_off_goes_on_with_the_others(tmp_path, real) -> None:
    with real.Link(nodes=3, rate_bps=100e6, delay_s=0.005) as link:
        options = {"steps": 330, "every": EVERY, "step_s": 0.05}
        host = link.addresses[0]
        with Team(tmp_path, host=host, namespaces=link.namespaces, **options) as team:
            workers = [team.start(f"w{n}", node=n, host=link.addresses[n]) for n in range(3)]
            team.until(lambda: all(team.met(worker, 3) for worker in workers))
            link.partition(2)
            time.sleep(12.0)
            # It does not go on by itself: its half has no lighthouse.
            lone = workers[2].version
            assert workers[0].version >= lone + 20, team.report()
            assert workers[2].digest is None
            link.heal(2)
            team.finish()
            bound_s = HEARTBEAT_S + EVERY * 0.05 + ALLOWANCE_S
            assert longest_stall_s(workers[:2]) <= bound_s, team.report()
            assert workers[2].events("healed")
            assert workers[2].steps()[-1]["workers"] == 3, team.report()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_lose_the_way_to_each_other_go_on_by_way_of_the_lighthouse(
    tmp_path, real, workers: int
) -> None:
    with real.Link(nodes=1 + workers, rate_bps=100e6, delay_s=0.002) as link:
        host, options = link.addresses[0], {"steps": 120, "every": EVERY, "step_s": STEP_S}
        with Team(tmp_path, host=host, namespaces=link.namespaces, **options) as team:
            nodes = range(1, 1 + workers)
            everyone = [team.start(f"w{n}", node=n, host=link.addresses[n]) for n in nodes]
            team.until(lambda: all(team.met(worker, workers) for worker in everyone))
            for here, there in ((1, 2), (2, 1)):
                route = ["route", "add", "blackhole", link.addresses[there]]
                subprocess.run(["ip", "-n", link.namespaces[here], *route], check=True)
            assert len(team.finish()) == workers
            for worker in everyone:
                assert worker.steps()[-1]["workers"] == workers, team.report()


# -- payloads are damaged -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_contribution_is_left_out_by_name_and_comes_in_the_next_round(team: Team) -> None:
    team.options |= {"steps": 80, "terms": {"min_workers": 3}}
    damages = [
        {"how": "cut", "rounds": [8], "from_rank": 2},
        {"how": "flip", "rounds": [4]},
        {"how": "fill", "rounds": [6]},
    ]
    for number, damage in enumerate(damages):
        team.start(f"w{number}", damage=damage)
    # Its sender has it as it was, and hears of the damage from the others.
    reasons = {
        4: ("w1", "checksum|found"),
        6: ("w2", "checksum|found"),
        8: ("w2", "bytes of|found"),
    }
    for worker in team.finish():
        assert worker.last("left_out") == {"1": 1, "2": 2}, team.report()
        assert worker.last("contributions") == {"w1": {"damaged": 1}, "w2": {"damaged": 2}}
        counted = {t["round"]: {n.split(":")[0] for n in t["counted"]} for t in worker.rounds()}
        left_out = {event["round"]: event for event in worker.events("left out")}
        assert sorted(left_out) == sorted(reasons)
        for round, (who, why) in reasons.items():
            assert left_out[round]["who"] == [who]
            assert "did not arrive as it was sent" in left_out[round]["why"]
            assert re.search(why, left_out[round]["why"])
            assert counted[round] == {"w0", "w1", "w2"} - {who}
            assert counted[round + 1] == {"w0", "w1", "w2"}
        # 20 rounds of all, and none was lost.
        assert len(counted) == 20
    # The registry counts what all of them told once, also after they have left.
    known = ask_registry(Token(TOKEN), team.address).contributions
    assert known == {"w1": {"damaged": 1}, "w2": {"damaged": 2}}


@pytest.mark.slow
def test_a_payload_of_another_size_discards_the_round(team: Team) -> None:
    team.options |= {"steps": 60, "terms": {"min_workers": 3}}
    team.start("w0")
    team.start("w1")
    team.start("w2", damage={"how": "cut", "rounds": [4], "once": True})
    for worker in team.finish():
        assert worker.events("discarded")
        # Its work came with that of the next one.
        assert worker.rounds()[-1]["round"] == 14


# -- a slow worker --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_worker_is_left_behind_and_its_work_comes_later(tmp_path) -> None:
    heartbeat_s, step_s, every, patience = 0.8, 0.15, 4, 0.5
    options = {"steps": 40, "every": every, "step_s": step_s, "terms": {"patience": patience}}
    with Team(tmp_path, heartbeat_s=heartbeat_s, **options) as team:
        first, second = team.start_all("w0", "w1")
        team.until(lambda: first.version > 2)  # they know how long a round takes
        slow = team.start("w2", step_s=5 * step_s)
        team.finish()
        # Patience is no shorter than the heartbeat timeout, after which the lighthouse gives up.
        bound_s = step_s + heartbeat_s + 0.7
        assert bound_s < step_s + every * 4 * step_s  # what waiting for it would take
        assert longest_stall_s([first, second]) <= bound_s, team.report()
        assert slow.events("late"), team.report()
        late_at = slow.events("late")[0]["at_s"]
        later = [t for w in (first, second) for t in w.rounds() if t["at_s"] > late_at]
        assert any(name.startswith("w2:") for line in later for name in line["counted"])


# -- methods --------------------------------------------------------------------------------------


METHODS = {
    "muloco of 2 bits": {"method": "muloco:bits=2"},
    "reduce-scatter of 2 bits": {"method": "muloco:bits=2", "exchange": "reduce_scatter"},
    "sparseloco": {"method": "sparseloco:density=1/8"},
    "streaming": {"method": "streaming_diloco:tau=2", "layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_survives_a_kill_and_a_restart(team: Team, name: str) -> None:
    """In streaming runs, fragments are in flight at any step."""
    team.options |= METHODS[name]
    first, second = team.start("w0"), team.start("w1")
    victim = team.start("w2", die=("step", 19))
    team.until(lambda: victim.gone)
    again = team.start("w2")
    team.finish()
    assert again.events("healed"), team.report()
    assert team.met(again, 3), team.report()
    assert longest_stall_s([first, second]) <= HEARTBEAT_S + ROUND_S + ALLOWANCE_S, team.report()


# -- what cannot take part ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_of_another_run_is_refused_with_the_reason_on_both_sides(team: Team) -> None:
    first, second = team.start_all("w0", "w1")
    strangers = {
        "token": team.start("t", token="another token, which is long, too"),
        "parameters": team.start("m", width=5),
        "sync_every": team.start("h", every=5),
        "method": team.start("o", method="sparseloco"),
        "identity": team.start("w0"),
    }
    for reason, stranger in strangers.items():
        team.until(lambda stranger=stranger: stranger.gone)
        assert stranger.wait(5) == 1, team.report()
        assert stranger.last("kind") in ("MismatchError", "RefusedError")
        assert reason in stranger.last("error").lower() or reason == "method", team.report()
        assert stranger.errors.read_text() == ""
    team.workers = [first, second]
    team.finish()
    refused = " ".join(e["why"] for w in (first, second) for e in w.events("refused"))
    whys = ["'m' at", "'h' at", "'o' at", "identity 'w0' is taken", "it has another token"]
    for side in (team.lighthouse_output(), refused):
        assert [why for why in whys if why not in side] == [], team.report()


@pytest.mark.slow
def test_a_worker_without_a_lighthouse_or_without_others_says_so_in_time(team: Team) -> None:
    lone = team.start("w0", terms={"min_workers": 2, "give_up_s": 1.5})
    assert lone.wait(20) == 1, team.report()
    assert lone.last("kind") == "ExchangeError"
    assert "min_workers" in lone.last("error")
    team.address, began_s = f"127.0.0.1:{free_port_pair()}", time.monotonic()
    lone = team.start("w1", terms={"give_up_s": 2.0})
    assert lone.wait(20) == 1
    assert 2.0 <= time.monotonic() - began_s <= 4.0
    assert lone.last("kind") == "ExchangeError"
    assert team.address in lone.last("error")
    assert "thinwire" in lone.last("error").split("do:")[1]
    assert lone.errors.read_text() == ""


# -- thinwire train -------------------------------------------------------------------------------


MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
def test_three_workers_of_the_command_line_of_which_one_is_killed(
    team: Team,
    tmp_path,
    corpus,  # noqa: F811
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    settings = {
        "elastic": team.address, "method": "diloco", "model": tmp_path / "model.json",
        "corpus": corpus, "workers": 3, "global-batch": 6, "sequence-length": 16, "steps": 1200,
        "sync-every": 5, "warmup-steps": 2, "threads": 1, "evaluate-steps": 0,
        "checkpoint-steps": 20, "log-steps": 100,
    }  # fmt: skip
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(MODEL | {"hidden_size": 24}))
    programs: list[Program] = []

    def start(name: str, *more: str, **environment: str) -> Program:
        command = ("train", *flags, "--out", str(tmp_path / name), *more)
        errors = tmp_path / f"{name}-{len(programs)}.txt"
        programs.append(Program("command", *command, errors=errors, **environment))
        return programs[-1]

    folders = [tmp_path / name for name in ("a", "b", "c")]
    try:
        first, second, victim = start("a"), start("b"), start("c")
        team.until(lambda: all(list((out / "checkpoints").glob("*")) for out in folders))
        strangers = {
            "token": start("d", THINWIRE_TOKEN="another token, which is long, too"),
            "method": start("e", "--method", "muloco"),
            "sync_every": start("f", "--sync-every", "6"),
            "model": start("g", "--model", str(other)),
            "is taken by": start("h", "--identity", default_identity(folders[0])),
        }
        victim.kill()
        again = start("c", "--resume")
        # While the others train: an identity is taken for as long as a worker has it.
        assert [stranger.wait(60) for stranger in strangers.values()] == [1] * len(strangers)
        for program in (first, second, again):
            assert program.wait(60) == 0, program.errors.read_text()
    finally:
        for program in programs:
            program.end()
    for why, stranger in strangers.items():
        said = "".join(stranger.lines) + stranger.errors.read_text()
        assert "Traceback" not in said
        assert re.search(rf"error: cannot .*{why}", said), said
    summaries = [json.loads((out / "summary.json").read_text()) for out in folders]
    assert len({summary["outer_digest"] for summary in summaries}) == 1
    for out, summary in zip(folders, summaries, strict=True):
        lines = (out / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in lines]
        kept = [kind for kind in kinds if kind != "committed"]
        assert "joined" in kinds
        # The file has those of the process that was killed, too.
        summed = [event["kind"] for event in summary["events"]["events"]]
        assert kept[-len(summed) :] == summed
    assert "left" in summaries[0]["events"]["counts"]
    assert "healed" in summaries[2]["events"]["counts"]


# -- at random ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_schedule_ends_with_equal_digests(tmp_path, seed: int) -> None:
    """`make soak` has more of them."""
    with Team(tmp_path, **OPTIONS) as team:
        inject_faults(team, seed)
        team.finish()
