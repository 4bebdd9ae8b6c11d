"""Elastic workers whose model is sharded over two ranks each, as real processes."""

import json
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_schedule import OPTIONS, inject_faults
from elastic_team import TOKEN, Team
from forked import Forked
from processes import fork_ranks, until
from thinwire.blocks import DenseVector
from thinwire.elastic.worker_ranks import AgreedRound, WorkerRanks
from thinwire.errors import RoundDiscarded
from thinwire.exchange.state import RoundResult
from thinwire.rejection import Rejection, RejectReason
from training import corpus  # noqa: F401

METHODS = ["diloco", "muloco:bits=2", "sparseloco:density=1/8"]
SHARDED = {"ranks": 2, "layers": 4, "step_s": 0.02, "among": 2}


def test_a_worker_of_two_ranks_and_one_that_comes_late_end_alike(tmp_path) -> None:
    with Team(tmp_path, steps=60, step_s=0.02) as team:
        first = team.start("a", ranks=2)
        team.until(lambda: first.version > 2)
        late = team.start("b", ranks=2)
        assert team.finish() == [*first.ranks, *late.ranks]
        assert any("b" in event["who"] for event in first.events("arrived"))


@pytest.mark.parametrize(
    ("mine", "other", "counts"),
    [
        ({}, {}, True),
        ({1: RejectReason.DAMAGED}, {1: RejectReason.DAMAGED}, True),
        # Each rank judges the numbers of its own shard.
        ({1: RejectReason.OUTLIER}, {}, True),
        ({1: RejectReason.DAMAGED}, {}, False),
        ({}, {0: RejectReason.DAMAGED}, False),
        ({0: RejectReason.DAMAGED}, {1: RejectReason.DAMAGED}, False),
    ],
)
def test_a_worker_counts_on_all_ranks_of_another_one_or_the_round_on_none(
    monkeypatch, mine, other, counts: bool
) -> None:
    ranks, absent = WorkerRanks(), {r for r, why in other.items() if why is RejectReason.DAMAGED}
    monkeypatch.setattr(ranks, "gather", lambda own: [own, absent if isinstance(own, set) else own])
    rejected = {rank: Rejection(reason=why) for rank, why in mine.items()}
    result = RoundResult(mean=DenseVector(torch.zeros(1)), left_out=rejected, messages=[])
    done: Any = SimpleNamespace(wait=lambda: result)
    if counts:
        assert AgreedRound(done, ranks).wait() is result
    else:
        with pytest.raises(RoundDiscarded, match="only some ranks"):
            AgreedRound(done, ranks).wait()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "moment"), [(0, "landed"), (1, "started")])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_in_an_exchange_ends_its_worker_which_comes_back_and_heals(
    tmp_path, method: str, rank: int, moment: str
) -> None:
    with Team(tmp_path, method=method, steps=100) as team:
        first = team.start("a", **SHARDED)
        second = team.start("b", of_rank={rank: {"die": [moment, 3]}}, **SHARDED)
        team.until(lambda: all(process.gone for process in second.ranks))
        killed, survivor = second.ranks[rank], second.ranks[1 - rank]
        # The other one by itself, as no launcher ends it here: it is FSDP that notices, or what
        # the ranks tell each other.
        assert (killed.returncode, survivor.returncode) == (-signal.SIGKILL, 1)
        assert re.search("rank of it is gone|gloo", survivor.last("error")), team.report()
        team.until(lambda: first.version > second.version)
        back = team.start("b", **SHARDED)
        team.until(lambda: team.met(back, 2))
        assert back.events("healed"), team.report()
        assert len(team.finish()) == 4
        for one, other in zip(first.ranks, back.ranks, strict=True):
            assert one.last("shard") == other.last("shard")
        # The control: shards differ, and so no rank has the digest of all.
        assert len({rank.last("shard") for rank in first.ranks} | {first.digest}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["hsdp", "tensor"])
def test_copies_of_a_parameter_stay_equal_if_a_message_of_one_rank_is_lost(
    tmp_path, sharding: str
) -> None:
    with Team(tmp_path, method="diloco", sharding=sharding, steps=100) as team:
        team.start("a", **SHARDED)
        second = team.start("b", of_rank={0: {"die": ["landed", 3]}}, **SHARDED)
        team.until(lambda: all(process.gone for process in second.ranks))
        back = team.start("b", **SHARDED)
        team.until(lambda: team.met(back, 2))
        assert back.events("healed"), team.report()
        stranger = team.start("r", layers=4)
        team.until(lambda: stranger.gone)
        assert "ranks of a worker" in stranger.last("error")
        # With one digest, of which copies are a part.
        assert len(team.finish()) == 4


@pytest.mark.slow
def test_all_workers_go_on_from_checkpoints_in_another_store(tmp_path) -> None:
    def start(team: Team, name: str):
        files = {rank: {"checkpoint": str(tmp_path / f"{name}{rank}.pt")} for rank in range(2)}
        return team.start(name, of_rank=files, **SHARDED)

    (tmp_path / "other").mkdir()
    with Team(tmp_path, steps=20) as team:
        before = [start(team, name) for name in "ab"]
        team.finish()
    with Team(tmp_path / "other", steps=60, terms={"give_up_s": 20.0}) as team:
        after = [start(team, name) for name in "ab"]
        assert len(team.finish()) == 4
        assert after[0].steps()[0]["version"] == before[0].version == 5
        assert after[0].version > 10


@pytest.mark.slow
def test_a_worker_that_is_stopped_stalls_no_rank_for_longer_than_a_wait(tmp_path) -> None:
    with Team(tmp_path, steps=200, terms={"timeout_s": 3.0}) as team:
        first = team.start("a", **SHARDED)
        second = team.start("b", die=["landed", 5], stops_there=True, **SHARDED)
        team.until(lambda: second.version == 4)
        stopped_s = time.monotonic()
        team.until(lambda: first.version > 6)
        assert time.monotonic() - stopped_s < 15.0, team.report()
        second.send_to_all(signal.SIGCONT)
        assert len(team.finish()) == 4


@pytest.mark.slow
def test_a_worker_that_was_stopped_until_the_others_wait_for_it_ends_with_their_model(
    tmp_path,
) -> None:
    with Team(tmp_path, steps=120) as team:
        first, victim = team.start_all("a", "b", **SHARDED)
        team.until(lambda: first.version >= 26)
        victim.send_to_all(signal.SIGSTOP)
        team.until(lambda: all(rank.digest for rank in first.ranks))
        victim.send_to_all(signal.SIGCONT)
        assert len(team.finish()) == 4
        assert {rank.last("last_step") for rank in victim.ranks} == {120}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_random_schedule_for_workers_and_single_ranks(tmp_path, seed: int) -> None:
    terms = {"timeout_s": 3.0, "patience": 0.2}
    with Team(tmp_path, **{**OPTIONS, "method": METHODS[seed % 3], "terms": terms}) as team:
        inject_faults(team, seed, ["kill", "stop"], 3, workers=2, **SHARDED)
        team.finish(100)


# -- thinwire train -------------------------------------------------------------------------------

FLAGS = {
    "method": "sparseloco:density=1/8", "model": "250k", "workers": 2, "worker-size": 2,
    "global-batch": 8, "sequence-length": 16, "steps": 90, "sync-every": 5, "warmup-steps": 2,
    "threads": 1, "evaluate-steps": 30, "checkpoint-steps": 10, "log-steps": 5,
}  # fmt: skip


@pytest.mark.slow
def test_sharded_workers_of_the_command_line_of_which_one_loses_a_rank(
    tmp_path,
    monkeypatch,
    corpus,  # noqa: F811
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN)
    running: list[Forked] = []

    def start(name: str, *more: str, ranks: int = 2) -> list[Forked]:
        given = FLAGS | {"corpus": corpus, "out": tmp_path / name}
        flags = [f"--{flag}={value}" for flag, value in given.items()]
        url = f"file://{tmp_path}/store/r"
        running.extend(fork_ranks(ranks, "-m", "thinwire", "join", url, *flags, *more))
        return running[-ranks:]

    def ended(processes: list[Forked]) -> list[tuple[int, str]]:
        return [(p.wait(100), p.stdout + p.stderr) for p in processes]

    try:
        first, second = start("a"), start("b")
        checkpoints = tmp_path / "b" / "checkpoints"
        until(lambda: list(checkpoints.glob("step-00000020*.json")), 90)
        second[1].kill()
        (status, said), _ = ended(second)
        assert status == 1
        assert said.count("error: cannot") == 1, said
        # The first rank reads the folder; a launcher ends those that wait for it.
        refused = start("b", "--resume", "--worker-size", "4", ranks=4)
        (status, said), *_ = ended(refused[:1])
        assert status == 1
        assert "worker_size differs; because the run there has 2 and this run 4" in said
        for process in refused:
            process.kill()
        for status, said in ended([*first, *start("b", "--resume")]):
            assert status == 0, said
    finally:
        for process in running:
            process.kill()
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "ab"]
    assert summaries[0]["outer_digest"] == summaries[1]["outer_digest"]
    assert summaries[1]["events"]["counts"]["healed"]
    assert summaries[0]["val_loss"] == summaries[1]["val_loss"]
