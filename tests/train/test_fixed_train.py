"""`thinwire join` with numbers: a fixed number of workers, each with a run folder of its own."""

import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from s3_server import in_aws, s3_server
from thinwire.cli import main
from thinwire.train import trainer
from thinwire.train.trainer import train
from training import Team, flags, records, summary

pytest.importorskip("obstore")


def team(folder: Path, config, **environment: str) -> Team:
    return Team(folder, config, f"file://{folder}/shared/r", **environment)


def start_two(team: Team, *more: str) -> None:
    for worker in range(2):
        team.start(f"worker{worker}", *more, worker=worker)


@pytest.mark.slow
def test_workers_that_share_a_folder_reach_the_digest_of_one_process(tiny, tmp_path) -> None:
    config = tiny("streaming_diloco", steps=13)
    with team(tmp_path, config, THINWIRE_TOKEN="a secret of many characters") as workers:
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
        digests = {found["outer_digest"] for found in workers.finish().values()}
        assert digests == {train(config, tmp_path / "one")["outer_digest"]}


class Begun(Exception):
    """Raised in place of training."""


FIXED = ("join s3://b/runs/first?workers=4&worker=0", "join s3://b/runs/first?worker=1&workers=4")
COMING = ("join s3://b/runs/first --identity oslo", "join s3://b/runs/first")
ME = f"@{socket.gethostname()}"


@pytest.mark.parametrize("package", ["wandb", "trackio"])
@pytest.mark.parametrize(
    ("commands", "names", "group"),
    [
        (FIXED, ["first worker 0", "first worker 1"], "s3://b/runs/first"),
        (COMING, ["oslo", f"1{ME}"], "s3://b/runs/first"),
        (("train", "train"), ["0", "1"], None),
    ],
    ids=["fixed", "elastic", "alone"],
)
def test_workers_of_a_run_are_one_group_and_have_their_names_in_it(
    tmp_path, monkeypatch, package: str, commands, names: list[str], group: str | None
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
    for command in commands:
        given = [*command.split(), "--out", str(tmp_path / str(len(runs)))]
        with pytest.raises(Begun):
            main([*given, "--steps", "5", f"--{package}", "mine"])
    assert [run["name"] for run in runs] == names
    assert {(run["project"], run["group"]) for run in runs} == {("mine", group)}
    assert runs[0]["config"]["steps"] == 5


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
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes = []
            for worker in range(2):
                given = flags(config, tmp_path / f"worker{worker}")
                command = [*unset, "join", f"s3://run/here/r?workers=2&worker={worker}", *given]
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
