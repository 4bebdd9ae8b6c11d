"""`thinwire train --bucket`: workers that share a folder, each with a run folder of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from forked import Forked
from processes import free_port, rank_environment
from s3_server import SECRETS, s3_server
from thinwire.cli import main
from thinwire.plan.calibration import calibrate
from thinwire.train import trainer
from thinwire.train.trainer import train

pytest.importorskip("obstore")


def flags(config, out: Path) -> list[str]:
    return [
        *("train", "--method", config.method.name, "--model", config.model.size),
        *("--corpus", config.data.corpus, "--sequence-length", "16", "--workers", "2"),
        *("--steps", str(config.steps), "--sync-every", "5", "--global-batch", "4"),
        *("--threads", "1", "--device", "cpu", "--log-steps", "3", "--evaluate-steps", "6"),
        *("--checkpoint-steps", "4", "--out", str(out)),
    ]


def start(config, shared: Path, worker: int, *more: str, token: str = "") -> Forked:
    place = ["--bucket", f"file://{shared}/shared", "--run-name", "r", "--worker", str(worker)]
    environment = {k: v for k, v in rank_environment(0, 1, free_port()).items() if "RANK" not in k}
    del environment["WORLD_SIZE"]
    environment["THINWIRE_TOKEN"] = token
    out = shared / f"worker{worker}"
    return Forked(("-m", "thinwire", *flags(config, out), *place, *more), environment)


def finished(processes: list[Forked], shared: Path) -> list[dict]:
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    return [
        json.loads((shared / f"worker{worker}" / "summary.json").read_text()) for worker in range(2)
    ]


@pytest.mark.slow_cases("open", "sealed")
@pytest.mark.parametrize("token", ["", "a secret of many characters"], ids=["open", "sealed"])
def test_workers_that_share_a_folder_reach_the_digest_of_one_process(
    tiny, tmp_path, token: str
) -> None:
    config = tiny("streaming_diloco", steps=13)
    summaries = finished([start(config, tmp_path, w, token=token) for w in range(2)], tmp_path)
    assert main(flags(config, tmp_path / "one")) == 0
    one = json.loads((tmp_path / "one" / "summary.json").read_text())
    for summary in summaries:
        assert summary["outer_digest"] == one["outer_digest"]
        assert summary["val_loss"] == pytest.approx(one["val_loss"], abs=1e-6)
        assert summary["workers"] == 2
    plan = calibrate(tmp_path / "worker0", step_s=1).traffic
    assert summaries[0]["requests"]["puts"] == plan.puts_after(13)
    assert summaries[0]["requests"]["gets"] == plan.gets_after(13)
    assert (tmp_path / "worker1" / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_killed_worker_resumes_alone_and_all_end_as_if_left_alone(tiny, tmp_path) -> None:
    config = tiny("diloco", steps=100)
    first, killed = start(config, tmp_path, 0), start(config, tmp_path, 1)
    until_s = time.monotonic() + 60
    while len(list(tmp_path.glob("worker1/checkpoints/step-*.json"))) < 2:
        assert time.monotonic() < until_s
        assert killed.poll() is None, killed.stderr
        time.sleep(0.005)
    killed.kill()
    assert not (tmp_path / "worker1" / "summary.json").exists()
    summaries = finished([first, start(config, tmp_path, 1, "--resume")], tmp_path)
    expected = train(config, tmp_path / "one")["outer_digest"]
    assert [summary["outer_digest"] for summary in summaries] == [expected] * 2


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_while_it_waits_stops(tiny, tmp_path) -> None:
    config = tiny("diloco", steps=60)
    waiting, other = (start(config, tmp_path, worker) for worker in range(2))
    until_s = time.monotonic() + 60
    while not list(tmp_path.glob("shared/r/fragment*/*/*/00001")):
        assert time.monotonic() < until_s
        time.sleep(0.005)
    other.kill()
    time.sleep(2.0)
    waiting.send_signal(signal.SIGTERM)
    said, error = waiting.communicate(timeout=30)
    assert waiting.returncode == 143, said + error
    assert "asked to stop while it waited for the others" in " ".join(error.split())
    summaries = finished([start(config, tmp_path, w, "--resume") for w in range(2)], tmp_path)
    expected = train(config, tmp_path / "one")["outer_digest"]
    assert [summary["outer_digest"] for summary in summaries] == [expected] * 2


class Begun(Exception):
    """Raised in place of training."""


@pytest.mark.parametrize("package", ["wandb", "trackio"])
@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("--bucket {} --worker 0", ["first worker 0", "first worker 1"]),
        ("--elastic {} --identity oslo", ["oslo", f"1@{socket.gethostname()}"]),
    ],
    ids=["fixed", "elastic"],
)
def test_workers_over_a_bucket_are_one_group_and_have_their_names_in_it(
    tmp_path, monkeypatch, package: str, where: str, names: list[str]
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
    second = where.replace("--worker 0", "--worker 1").replace("--identity oslo", "")
    # One of them has typed the place with a slash at its end, which is the same place.
    for given in (where.format("s3://b/runs"), second.format("s3://b/runs/")):
        place = [*given.split(), "--run-name", "first", "--out", str(tmp_path / str(len(runs)))]
        with pytest.raises(Begun):
            main(["train", *place, f"--{package}", "mine"])
    assert [run["name"] for run in runs] == names
    assert {(run["project"], run["group"]) for run in runs} == {("mine", "s3://b/runs first")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--worker", "0"], "cannot use --worker without --bucket"),
        (["--run-name", "r"], "cannot use --run-name without --bucket"),
        (["--bucket", "memory://"], "cannot use --bucket without --worker"),
        (["--bucket", "memory://", "--worker", "0"], "cannot use --bucket without --run-name"),
        (["--bucket", "memory://", "--worker", "2", "--run-name", "r"], "be worker 2 of 2"),
        (
            ["--bucket", "memory://", "--worker", "0", "--run-name", "r", "--elastic", "h:1"],
            "both --elastic and --bucket",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(tiny, tmp_path, capsys, more, said: str) -> None:
    assert main([*flags(tiny(), tmp_path / "out"), *more]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_of_torchrun_are_refused(tiny, tmp_path, capsys, monkeypatch) -> None:
    for name, value in rank_environment(0, 2, 1).items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)
    place = ["--bucket", "memory://", "--worker", "0", "--run-name", "r"]
    without = [f for f in flags(tiny(), tmp_path / "out") if f not in ("--workers", "2")]
    assert main([*without, *place]) == 1
    assert "train with --bucket under torchrun" in capsys.readouterr().err


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
            keys = {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "admin",
                "AWS_SECRET_ACCESS_KEY": SECRETS["admin"],
                "AWS_ALLOW_HTTP": "true",
                "THINWIRE_TOKEN": secret,
            }
            unset = ["env", "-u", "RANK", "-u", "WORLD_SIZE", sys.executable, "-m", "thinwire"]
            processes = [
                link.popen(
                    1 + worker,
                    [
                        *(*unset, *flags(config, tmp_path / f"worker{worker}")),
                        *("--bucket", "s3://run/here", "--run-name", "r", "--worker", str(worker)),
                    ],
                    env=keys,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for worker in range(2)
            ]
            for process in processes:
                said, _ = process.communicate(timeout=150)
                assert process.returncode == 0, said
    assert main(flags(config, tmp_path / "one")) == 0
    digests = {
        json.loads((tmp_path / name / "summary.json").read_text())["outer_digest"]
        for name in ("worker0", "worker1", "one")
    }
    assert len(digests) == 1
    # This server speaks no TLS: names of objects are readable, and nothing that is in them.
    raw = captured.read_bytes()
    assert b"PUT /run/here/r/" in raw
    for word in (secret.encode(), b"muloco", b"sync_every", b"THINWIRE"):
        assert word not in raw
