"""`thinwire train --elastic --worker`: a fixed number, each with a run folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from processes import rank_environment
from s3_server import in_aws, s3_server
from thinwire.cli import main
from thinwire.elastic.transport import FixedElastic
from thinwire.train import trainer
from thinwire.train.trainer import train
from thinwire.train.workers.elastic import ElasticConfig
from training import Team, flags, records, summary

pytest.importorskip("obstore")


def team(folder: Path, config, **environment: str) -> Team:
    return Team(folder, config, "--elastic", f"file://{folder}/shared", **environment)


def start_two(team: Team, *more: str) -> None:
    for worker in range(2):
        team.start(f"worker{worker}", "--worker", str(worker), *more)


def digests(team: Team) -> set[str]:
    return {summary["outer_digest"] for summary in team.finish().values()}


@pytest.mark.slow_cases("open", "sealed")
@pytest.mark.parametrize("token", ["", "a secret of many characters"], ids=["open", "sealed"])
def test_workers_that_share_a_folder_reach_the_digest_of_one_process(
    tiny, tmp_path, token: str
) -> None:
    config = tiny("streaming_diloco", steps=13)
    with team(tmp_path, config, THINWIRE_TOKEN=token) as workers:
        start_two(workers)
        summaries = workers.finish()
    assert main(["train", *flags(config, tmp_path / "one")]) == 0
    one = summary(tmp_path / "one")
    for found in summaries.values():
        assert found["outer_digest"] == one["outer_digest"]
        assert found["val_loss"] == pytest.approx(one["val_loss"], abs=1e-6)
        assert found["workers"] == 2
    assert summaries["worker0"]["requests"]["puts"]
    assert (tmp_path / "worker1" / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_killed_worker_resumes_alone_and_all_end_as_if_left_alone(tiny, tmp_path) -> None:
    config = tiny("diloco", steps=100)
    with team(tmp_path, config) as workers:
        start_two(workers)
        workers.until(lambda: len(list(tmp_path.glob("worker1/checkpoints/step-*.json"))) > 1)
        workers.workers["worker1"].kill()
        assert not (tmp_path / "worker1" / "summary.json").exists()
        workers.start("worker1", "--worker", "1", "--resume")
        assert digests(workers) == {train(config, tmp_path / "one")["outer_digest"]}


def test_messages_since_the_oldest_checkpoint_stay_and_the_timeout_is_the_runs(
    tiny, tmp_path
) -> None:
    config = tiny("diloco", steps=60)
    worker = ElasticConfig(store=f"file://{tmp_path}/shared", run="r", worker=1)
    transport = worker.connect(config, tmp_path)
    periods, every = config.periods, config.method.sync_every
    rounds = -(-periods.checkpoint_steps // every) * periods.keep_checkpoints
    assert isinstance(transport, FixedElastic)
    assert transport._fixed._keep == 2 + rounds
    assert transport._fixed._timeout_s == config.machine.timeout_s
    assert transport.member(1) == "worker 1"


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_while_it_waits_stops(tiny, tmp_path) -> None:
    config = tiny("diloco", steps=60)
    with team(tmp_path, config) as workers:
        start_two(workers)
        log = tmp_path / "worker0" / "metrics.jsonl"
        workers.until(lambda: log.exists() and len(records(log.parent)) > 1)
        waiting, other = workers.workers.values()
        other.kill()
        time.sleep(2.0)
        waiting.send_signal(signal.SIGTERM)
        said, error = waiting.communicate(timeout=30)
        assert waiting.returncode == 143, said + error
        assert "asked to stop" in " ".join(error.split())
        start_two(workers, "--resume")
        assert digests(workers) == {train(config, tmp_path / "one")["outer_digest"]}


class Begun(Exception):
    """Raised in place of training."""


# One of them has typed the place with a slash at its end, which is the same place.
FIXED = ("--elastic s3://b/runs --worker 0", "--elastic s3://b/runs/ --worker 1")
COMING = ("--elastic s3://b/runs --identity oslo", "--elastic s3://b/runs/")
ME = f"@{socket.gethostname()}"


@pytest.mark.parametrize("package", ["wandb", "trackio"])
@pytest.mark.parametrize(
    ("places", "run", "names", "group"),
    [
        (FIXED, "first", ["first worker 0", "first worker 1"], "s3://b/runs first"),
        (COMING, "first", ["oslo", f"1{ME}"], "s3://b/runs first"),
        (("", ""), "", ["0", "1"], None),
    ],
    ids=["fixed", "elastic", "alone"],
)
def test_workers_of_a_run_are_one_group_and_have_their_names_in_it(
    tmp_path, monkeypatch, package: str, places, run: str, names: list[str], group: str | None
) -> None:
    def begin(config, out, make_observers, **connections):
        make_observers(config, 0)
        raise Begun

    runs = []
    client = types.ModuleType(package)
    client.init = lambda **described: runs.append(described) or client
    client.log = client.finish = None
    monkeypatch.setitem(sys.modules, package, client)
    monkeypatch.setattr(trainer, "train", begin)
    for place in places:
        named = ["--run-name", run] if run else []
        given = [*place.split(), *named, "--out", str(tmp_path / str(len(runs)))]
        with pytest.raises(Begun):
            main(["train", *given, "--steps", "5", f"--{package}", "mine"])
    assert [run["name"] for run in runs] == names
    assert {(run["project"], run["group"]) for run in runs} == {("mine", group)}
    assert runs[0]["config"]["steps"] == 5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--worker 0", "cannot use --worker without --elastic"),
        ("--run-name r", "cannot use --run-name without --elastic"),
        ("--elastic memory:// --worker 0", "without --run-name"),
        ("--elastic memory:// --worker 2 --run-name r", "as worker 2 of 2"),
        ("--elastic memory:// --worker 0 --run-name r --identity a", "--identity with --worker"),
        ("--bucket memory:// --worker 0 --run-name r", "cannot use --bucket"),
        ("--elastic memory:// --worker 0 --run-name r", "--worker-size 1 in 2 processes"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tiny, tmp_path, capsys, monkeypatch, more: str, said: str
) -> None:
    given = flags(tiny(), tmp_path / "out")
    if "2 processes" in said:
        given = [flag for flag in given if flag not in ("--workers", "2")]
        for name, value in rank_environment(0, 2, 1).items():
            if name not in os.environ:
                monkeypatch.setenv(name, value)
    assert main(["train", *given, *more.split()]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_workers_behind_routers_that_share_only_a_bucket(tiny, tmp_path, real) -> None:
    """Neither can be connected to, and the server of S3 sees no number."""
    config, secret = tiny("muloco", steps=11), "a secret of many characters"
    captured = tmp_path / "captured"
    link_of = {"nodes": 3, "rate_bps": 100e6, "delay_s": 0.005, "behind_routers": (1, 2)}
    with real.Link(**link_of, capture=captured) as link:
        within = ("ip", "netns", "exec", link.namespaces[0])
        (tmp_path / "weed").mkdir()
        with s3_server(tmp_path / "weed", host=link.addresses[0], within=within) as endpoint:
            keys = in_aws(endpoint) | {"AWS_ALLOW_HTTP": "true", "THINWIRE_TOKEN": secret}
            unset = ("env", "-u", "RANK", "-u", "WORLD_SIZE", sys.executable, "-m", "thinwire")
            place = ("--elastic", "s3://run/here", "--run-name", "r", "--worker")
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes = []
            for worker in range(2):
                given = flags(config, tmp_path / f"worker{worker}")
                command = [*unset, "train", *given, *place, str(worker)]
                processes.append(link.popen(1 + worker, command, env=keys, **output))
            for process in processes:
                said, _ = process.communicate(timeout=150)
                assert process.returncode == 0, said
    assert main(["train", *flags(config, tmp_path / "one")]) == 0
    found = [summary(tmp_path / name) for name in ("worker0", "worker1", "one")]
    assert len({each["outer_digest"] for each in found}) == 1
    # This server speaks no TLS: names of objects are readable, and nothing that is in them.
    raw = captured.read_bytes()
    assert b"PUT /run/here/r/" in raw
    for word in (secret.encode(), b"muloco", b"sync_every", b"THINWIRE"):
        assert word not in raw
