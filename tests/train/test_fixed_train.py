"""`thinwire join` with numbers: a fixed number of workers, each with a run folder of its own."""

import shutil
import socket
import subprocess
import sys

import pytest

from processes import free_port
from s3_server import in_aws, s3_server
from thinwire.cli import main
from thinwire.train import observers, trainer
from training import Team, flags, summary

pytest.importorskip("obstore")


@pytest.mark.slow
def test_workers_that_share_a_folder_reach_the_digest_of_one_process(tiny, tmp_path) -> None:
    config, address = tiny("streaming_diloco", steps=13), f"file://{tmp_path}/shared/r"
    secret = {"THINWIRE_TOKEN": "a secret of many characters"}
    with Team(tmp_path, config, address, **secret) as workers:
        for worker in range(2):
            workers.start(f"worker{worker}", worker=worker)
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
def test_workers_at_a_port_resume_from_a_step_that_all_have(tiny, tmp_path) -> None:
    """One saved once more when it was stopped, and the other did not see that coming."""

    def together(*more: str) -> Team:
        team = Team(tmp_path, config, f"tcp://127.0.0.1:{free_port()}", *more)
        for worker in range(2):
            team.start(f"worker{worker}", worker=worker)
        return team

    config = tiny("diloco", steps=17)
    with together() as workers:
        first = workers.finish()
    folder = tmp_path / "worker1"

    def lose(pattern: str) -> None:
        for name in first:
            (tmp_path / name / "summary.json").unlink(missing_ok=True)
        found = list((folder / "checkpoints").glob(pattern))
        assert found
        for file in found:
            file.unlink()

    lose("*16.*")
    with together("--resume") as workers:
        again = workers.finish()
    digests = {each["outer_digest"] for each in (*first.values(), *again.values())}
    assert digests == {first["worker0"]["outer_digest"]}
    # Neither none of the other's steps nor an empty folder makes the other begin anew.
    lose("*12.*")
    for file in (folder / "checkpoints").glob("*16.*"):
        file.rename(file.with_name(file.name.replace("16", "04")))
    for _ in range(2):
        with together("--resume") as workers:
            said = [each.communicate(timeout=150)[1] for each in workers.workers.values()]
        assert all("none of a step that all have" in each for each in said), said
        shutil.rmtree(folder, ignore_errors=True)
    assert len(list((tmp_path / "worker0" / "checkpoints").glob("*.pt"))) == 2


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
    monkeypatch.setattr(observers, "tracker", lambda *to, **about: runs.append((to, about)))
    monkeypatch.setattr(trainer, "train", begin)
    for command in commands:
        given = [*command.split(), "--out", str(tmp_path / str(len(runs)))]
        with pytest.raises(Begun):
            main([*given, "--steps", "5", f"--{package}", "mine"])
    assert [(to, about["name"]) for to, about in runs] == [((package, "mine"), n) for n in names]
    assert {about["group"] for _, about in runs} == {group}
    assert runs[0][1]["config"]["steps"] == 5


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
