"""`thinwire join ADDRESS`: workers that come and go, and share an object store alone."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from s3_server import SECRETS, Proxy, in_aws, s3_fixture  # noqa: F401 - the fixture
from thinwire.cli import main
from thinwire.train.config import TrainConfig
from training import Team, summary
from training import flags as long_flags

pytest.importorskip("obstore")

SECRET = "a secret of many characters"
SHORT = ("--evaluate-steps", "0", "--warmup-steps", "2", "--checkpoint-steps", "5")
RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def without_a_token(monkeypatch) -> None:
    for name in ("THINWIRE_TOKEN", *RANKED):
        monkeypatch.delenv(name, raising=False)


def flags(config: TrainConfig, out: Path) -> list[str]:
    return [*long_flags(config, out), *SHORT]


def team_of(folder: Path, config: TrainConfig) -> Team:
    """Workers that come and go, and share a folder."""
    return Team(folder, config, f"file://{folder}/shared/r", *SHORT)


def status(capsys, *where: str) -> dict:
    capsys.readouterr()
    assert main(["status", *where, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow_cases("file")
@pytest.mark.parametrize("token", ["none", "file"])
def test_two_workers_that_share_a_folder_end_as_one_run(tiny, tmp_path, capsys, token: str) -> None:
    (tmp_path / "token.txt").write_text(SECRET)
    (tmp_path / "token.txt").chmod(0o600)
    given = ["--token-file", str(tmp_path / "token.txt")] if token == "file" else []
    with team_of(tmp_path, tiny("diloco", steps=10)) as team:
        team.start("a", "--min-workers", "2", *given)
        team.start("b", "--min-workers", "2", *given)
        summaries = team.finish()
    assert len({found["outer_digest"] for found in summaries.values()}) == 1
    assert all(found["requests"]["puts"] for found in summaries.values())
    told = status(capsys, team.address, *given)
    assert (told["run"]["over"], told["run"]["step"], told["run"]["version"]) == (True, 10, 2)
    assert [worker["identity"].split("@")[0] for worker in told["workers"]] == ["a", "b"]
    assert {worker["state"] for worker in told["workers"]} == {"finished"}
    assert all(worker["metrics"]["loss"] > 0 for worker in told["workers"])
    # Sealed, nothing that is in them can be read.
    raw = b"".join(file.read_bytes() for file in (tmp_path / "shared" / "r" / "roll").iterdir())
    assert (b'"dealt"' in raw) == (token == "none")


def refused(capsys, arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    told = [line for line in error.splitlines() if line.startswith("error: cannot ")]
    assert len(told) == 1, error
    assert "; because " in told[0]
    assert "; do: " in told[0]
    return told[0]


def test_a_run_that_is_over_gives_its_model_and_is_joined_by_nothing_else(
    tiny, tmp_path, capsys, monkeypatch
) -> None:
    config, store = tiny("diloco", steps=5), f"file://{tmp_path}/shared"
    place, late = f"{store}/r", tmp_path / "late"
    assert main(["join", place, *flags(config, tmp_path / "first")]) == 0
    assert main(["join", place, *flags(config, late)]) == 0
    first, last = (summary(tmp_path / name) for name in ("first", "late"))
    assert last["outer_digest"] == first["outer_digest"]
    assert last["tokens"] == 0 < first["tokens"]
    assert (late / "model" / "config.json").exists()
    other = ["join", place, *flags(config, tmp_path / "other")]
    told = refused(capsys, [*other, "--method", "muloco"])
    assert "method" in told
    assert "another name" in told
    assert "nothing of that name" in refused(capsys, ["status", f"{store}/typo"])
    missing = f"file://{tmp_path}/missing"
    assert "no such folder" in refused(capsys, ["status", f"{missing}/r"])
    assert not (tmp_path / "missing").exists()
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    told = refused(capsys, ["status", place])
    assert "set THINWIRE_TOKEN to the run's" in told
    assert "THINWIRE_TOKEN" in refused(capsys, other)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_worker_that_waits_is_shown_keeps_its_folder_and_stops_when_asked(
    tiny, tmp_path, capsys
) -> None:
    with team_of(tmp_path, tiny("diloco", steps=20)) as team:
        team.start("a", "--min-workers", "2")
        team.until(lambda: any(tmp_path.glob("shared/r/call/*/*")))
        told = status(capsys, team.address)
        assert told["run"] is None
        assert [worker["state"] for worker in told["workers"]] == ["waits for the next round"]
        same = ["join", team.address, *flags(team.config, tmp_path / "a")]
        assert "another process is writing a run there" in refused(capsys, same)
        (waiting,) = team.workers.values()
        waiting.send_signal(signal.SIGTERM)
        _, error = waiting.communicate(timeout=30)
        assert (waiting.returncode, "was asked to stop" in error) == (143, True)


@pytest.mark.slow
def test_of_two_with_one_identity_the_earlier_one_ends(tiny, tmp_path) -> None:
    events = tmp_path / "a" / "events.jsonl"
    with team_of(tmp_path, tiny("diloco", steps=400)) as team:
        team.start("a", "--identity", "same")
        team.until(lambda: events.exists() and events.read_text().count("committed") > 2)
        team.start("b", "--identity", "same")
        _, error = team.workers["a"].communicate(timeout=60)
        assert "cannot take part as 'same'" in error
        assert "give each worker a name of its own" in error
        assert team.workers["a"].returncode == 1
        del team.workers["a"]
        assert team.finish()["b"]["steps"] == 400


RUN = "join memory:///r"
ONE = f"{RUN}?workers=2&worker=0"
ALONE = "one torchrun are one worker, which ends with any of them; do: start one torchrun --nproc"


@pytest.mark.parametrize(
    ("more", "said", "ranks"),
    [
        ("join 127.0.0.1:1", "it has no scheme; do: pass tcp://HOST:PORT", ""),
        (f"{RUN} --worker-size 2", ALONE, ""),
        (f"{RUN} --patience 0", "patience=0", ""),
        (f"{RUN} --token-file nowhere", "nowhere", ""),
        (f"{RUN} --method noloco", "every worker has its own outer parameters", ""),
        (f"{RUN} --method ddp --sync-every 1", "by GradientAveraging where workers come", ""),
        (f"{RUN} --identity a\nb", "call a worker", ""),
        (RUN, "--worker-size 1 in 2 processes", "2"),
        (f"{RUN} --worker-size 3 --global-batch 12", "--worker-size 3 in 2 processes", "2"),
        (f"{RUN} --asynchronous", f"{RUN} with --asynchronous", ""),
        # With a fixed number.
        (f"{ONE} --identity a", "use --identity at memory:///r?", ""),
        (f"{ONE} --patience 0.5 --min-workers 2", "use --patience, --min-workers at", ""),
        (f"{RUN}?workers=3&worker=0", "join with --workers 2 at memory:///r?workers=3", ""),
        ("join tcp://h:1?workers=2&worker=0 --asynchronous", "have numbers, and a store", ""),
        (f"{ONE} --asynchronous --resume --wandb x", "use --resume, --wandb with --asy", ""),
        (ONE, "--worker-size 1 in 2 processes", "2"),
        ("status tcp://127.0.0.1:1?workers=2&worker=0", "tcp:// has no store", ""),
        ("status memory:///r", "nothing of that name", ""),
        # Workers of several ranks.
        ("train --worker-size 2", "with torchrun", ""),
        ("train --worker-size 0", "worker_size to 0", ""),
        ("train --worker-size 2", "torchrun started 5 ranks", "5"),
        ("train --worker-size 2 --global-batch 9", "3 workers of 2 ranks", "6"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny, tmp_path, capsys, monkeypatch, more: str, said: str, ranks: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if ranks:  # of torchrun
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    given = more.split(" ")
    if given[0] == "join":
        given[2:2] = flags(tiny(), tmp_path / "out")
    assert said in refused(capsys, given)
    assert not list(tmp_path.glob("*out*"))


def test_other_data_under_one_name_are_refused(tiny, tmp_path, capsys) -> None:
    config, other = tiny("diloco", steps=5), tmp_path / "there" / "corpus"
    join = ["join", f"file://{tmp_path}/shared/r"]
    assert main([*join, *flags(config, tmp_path / "a")]) == 0
    shutil.copytree(config.data.corpus, other)
    (other / "00.txt").write_text("thin wires carry little " * 60)
    there = replace(config, data=replace(config.data, corpus=str(other)))
    said = refused(capsys, [*join, *flags(there, tmp_path / "b")])
    assert "corpus differs" in said
