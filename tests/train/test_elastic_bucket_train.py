"""`thinwire train --elastic URL`: workers that come and go, and share an object store alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked
from s3_server import SECRETS, Proxy, s3_fixture  # noqa: F401 - the fixture
from thinwire.cli import main
from thinwire.train.config import TrainConfig
from thinwire.train.workers.elastic import ElasticBucketConfig

pytest.importorskip("obstore")

SECRET = "a secret of many characters"
RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def without_a_token(monkeypatch) -> None:
    for name in ("THINWIRE_TOKEN", *RANKED):
        monkeypatch.delenv(name, raising=False)


def flags(config: TrainConfig, out: Path) -> list[str]:
    return [
        *("--method", config.method.name, "--model", config.model.size, "--workers", "2"),
        *("--corpus", config.data.corpus, "--sequence-length", "16", "--seed", str(config.seed)),
        *("--steps", str(config.steps), "--sync-every", "5", "--global-batch", "4"),
        *("--threads", "1", "--device", "cpu", "--log-steps", "5", "--evaluate-steps", "0"),
        *("--warmup-steps", "2", "--checkpoint-steps", "5", "--out", str(out)),
    ]


class Team:
    """Workers that were started, by the names of their folders."""

    def __init__(self, folder: Path, config: TrainConfig, url: str, **environment: str) -> None:
        self.folder, self.config, self.url = folder, config, url
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.workers: dict[str, Forked] = {}

    def start(self, name: str, *more: str) -> None:
        given = [*flags(self.config, self.folder / name), "--run-name", "r", *more]
        command = ("-m", "thinwire", "train", "--elastic", self.url, *given)
        self.workers[name] = Forked(command, self.environment)

    def until(self, reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < until_s
            ended = {
                n: w.stdout + w.stderr for n, w in self.workers.items() if w.poll() is not None
            }
            assert not ended, ended
            time.sleep(0.02)

    def rounds(self, name: str) -> int:
        return sum(event["kind"] == "committed" for event in self.events(name))

    def events(self, name: str) -> list[dict]:
        file = self.folder / name / "events.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def finish(self) -> dict[str, dict]:
        said = {name: worker.communicate(timeout=150) for name, worker in self.workers.items()}
        assert not any(worker.returncode for worker in self.workers.values()), said
        return {
            name: json.loads((self.folder / name / "summary.json").read_text())
            for name in self.workers
        }

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *details: object) -> None:
        for worker in self.workers.values():
            worker.kill()


def status(capsys, *where: str) -> dict:
    capsys.readouterr()
    assert main(["status", *where, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow_cases("file", "variable")
@pytest.mark.parametrize("token", ["none", "variable", "file"])
def test_two_workers_that_share_a_folder_end_as_one_run(
    tiny, tmp_path, capsys, monkeypatch, token: str
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET if token == "variable" else "")
    (tmp_path / "token.txt").write_text(SECRET)
    given = ["--token-file", str(tmp_path / "token.txt")] if token == "file" else []
    place = f"file://{tmp_path}/shared"
    where = (place, "--run-name", "r", *given)
    with Team(tmp_path, tiny("diloco", steps=15), place) as team:
        team.start("a", "--min-workers", "2", *given)
        team.start("b", "--min-workers", "2", *given)
        summaries = team.finish()
    assert len({summary["outer_digest"] for summary in summaries.values()}) == 1
    assert all(summary["requests"]["puts"] for summary in summaries.values())
    told = status(capsys, *where)
    assert (told["run"]["over"], told["run"]["step"], told["run"]["version"]) == (True, 15, 3)
    assert [worker["identity"].split("@")[0] for worker in told["workers"]] == ["a", "b"]
    assert {worker["state"] for worker in told["workers"]} == {"finished"}
    assert all(worker["metrics"]["loss"] > 0 for worker in told["workers"])
    # Sealed, nothing that is in them can be read.
    raw = b"".join(file.read_bytes() for file in (tmp_path / "shared" / "r" / "roll").iterdir())
    assert (b'"dealt"' in raw) == (token == "none")


def killed_back_and_joined(team: Team, capsys) -> dict[str, dict]:
    """A run of which b is killed and comes back, and that c joins."""
    where = (team.url, "--run-name", "r")
    team.start("a", "--min-workers", "2")
    team.start("b", "--min-workers", "2")
    team.until(lambda: team.rounds("b") > 3 and any(team.folder.glob("b/checkpoints/step-*.json")))
    told = status(capsys, *where)
    assert {worker["identity"].split("@")[0] for worker in told["workers"]} == {"a", "b"}
    assert not told["run"]["over"]
    assert told["age_s"] < 60
    team.workers.pop("b").kill()
    team.start("c")
    team.start("b", "--resume")
    before = team.rounds("b")
    team.until(lambda: team.rounds("b") > before and team.rounds("c") > 0)
    assert len(status(capsys, *where)["workers"]) == 3
    return team.finish()


def check_all_came(team: Team, summaries: dict[str, dict]) -> None:
    assert len({summary["outer_digest"] for summary in summaries.values()}) == 1
    came = [event for event in team.events("a") if event["kind"] == "arrived"]
    assert {who.split("@")[0] for event in came for who in event["who"]} >= {"b", "c"}
    assert any(event["kind"] == "healed" for event in team.events("c"))
    assert (team.folder / "c" / "model" / "config.json").exists()


@pytest.mark.slow
def test_one_is_killed_and_comes_back_and_a_third_joins_over_a_folder(
    tiny, tmp_path, capsys
) -> None:
    with Team(tmp_path, tiny("diloco", steps=600), f"file://{tmp_path}/shared") as team:
        check_all_came(team, killed_back_and_joined(team, capsys))


def test_workers_of_a_run_are_shown_as_one_group() -> None:
    first, other = (ElasticBucketConfig(url="s3://here", run=run) for run in ("r", "q"))
    assert first.run_name == "s3://here r" != other.run_name


def s3_environment(endpoint: str, *, key: str = "admin") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": SECRETS[key],
    }


@pytest.fixture
def as_admin(s3, monkeypatch) -> str:
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.mark.slow
def test_one_is_killed_and_comes_back_and_a_third_joins_over_s3(
    tiny, tmp_path, capsys, as_admin, monkeypatch
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    config, place = tiny("muloco:bits=2", steps=600), f"s3://run/{tmp_path.name}"
    with Team(tmp_path, config, place) as team:
        check_all_came(team, killed_back_and_joined(team, capsys))
    # Reading is enough to look.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["reader"])
    assert status(capsys, place, "--run-name", "r")["run"]["over"]


# -- what is refused -------------------------------------------------------------------------------


def refused(capsys, arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    told = [line for line in error.splitlines() if line.startswith("error: cannot ")]
    assert len(told) == 1, error
    assert "; because " in told[0]
    assert "; do: " in told[0]
    return told[0]


@pytest.fixture(name="run")
def run_fixture(tiny, tmp_path) -> tuple[TrainConfig, str, list[str]]:
    """A run of one worker that is over: its configuration, its place, and the flags of another."""
    config, place = tiny("diloco", steps=5), f"file://{tmp_path}/shared"
    more = ["--elastic", place, "--run-name", "r"]
    assert main(["train", *flags(config, tmp_path / "first"), *more]) == 0
    return config, place, ["train", *flags(config, tmp_path / "other"), *more]


def test_a_run_that_is_over_gives_its_model_to_those_that_come_late(run, tmp_path, capsys) -> None:
    config, place, _ = run
    late = tmp_path / "late"
    assert main(["join", place, "--run-name", "r", *flags(config, late)]) == 0
    first, last = (
        json.loads((tmp_path / n / "summary.json").read_text()) for n in ("first", "late")
    )
    assert last["outer_digest"] == first["outer_digest"]
    assert last["tokens"] == 0 < first["tokens"]
    assert (late / "model" / "config.json").exists()


def test_another_method_under_the_name_of_a_run_is_refused(run, tmp_path, capsys) -> None:
    _, _, other = run
    told = refused(capsys, [*other, "--method", "muloco"])
    assert "method" in told
    assert "another name" in told
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_another_token_than_the_runs_is_refused(run, tmp_path, capsys, monkeypatch) -> None:
    _, place, other = run
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    assert "THINWIRE_TOKEN" in refused(capsys, other)
    told = refused(capsys, ["status", place, "--run-name", "r"])
    assert "set THINWIRE_TOKEN to the token of the run" in told
    assert not (tmp_path / "other").exists()


def test_a_run_that_is_not_there_is_said_and_nothing_is_made(run, tmp_path, capsys) -> None:
    _, place, _ = run
    assert "nothing of that name" in refused(capsys, ["status", place, "--run-name", "typo"])
    missing = f"file://{tmp_path}/missing"
    assert "no such folder" in refused(capsys, ["status", missing, "--run-name", "r"])
    assert not (tmp_path / "missing").exists()


@pytest.mark.slow
def test_a_worker_that_waits_is_shown_keeps_its_folder_and_stops_when_asked(
    tiny, tmp_path, capsys
) -> None:
    place = f"file://{tmp_path}/shared"
    with Team(tmp_path, tiny("diloco", steps=20), place) as team:
        team.start("a", "--min-workers", "2")
        team.until(lambda: any(tmp_path.glob("shared/r/call/*/*")))
        told = status(capsys, place, "--run-name", "r")
        assert told["run"] is None
        assert [worker["state"] for worker in told["workers"]] == ["waits for the next round"]
        same = ["train", *flags(team.config, tmp_path / "a"), "--elastic", place, "--run-name", "r"]
        assert "another process is writing a run there" in refused(capsys, same)
        (waiting,) = team.workers.values()
        waiting.send_signal(signal.SIGTERM)
        _, error = waiting.communicate(timeout=30)
        assert (waiting.returncode, "was asked to stop" in error) == (143, True)


@pytest.mark.slow
def test_of_two_with_one_identity_the_earlier_one_ends(tiny, tmp_path) -> None:
    place = f"file://{tmp_path}/shared"
    with Team(tmp_path, tiny("diloco", steps=400), place) as team:
        team.start("a", "--identity", "same")
        team.until(lambda: team.rounds("a") > 2)
        team.start("b", "--identity", "same")
        _, error = team.workers["a"].communicate(timeout=60)
        assert "cannot take part as 'same'" in error
        assert "give each worker a name of its own" in error
        assert team.workers["a"].returncode == 1
        del team.workers["a"]
        assert team.finish()["b"]["steps"] == 400


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--elastic", "memory://"], "without --run-name"),
        (["--elastic", "127.0.0.1:1", "--run-name", "r"], "a lighthouse has one run"),
        (["--run-name", "r"], "use --run-name without --bucket or --elastic"),
        (["--elastic", "memory://", "--bucket", "memory://", "--run-name", "r"], "one connection"),
        (
            ["--elastic", "memory://", "--run-name", "r", "--worker", "0"],
            "--worker without --bucket",
        ),
        (["--elastic", "memory://", "--run-name", "r", "--worker-size", "2"], "is one process"),
        (["--elastic", "memory://", "--run-name", "r/s"], "'r/s'"),
        (["--elastic", "memory://", "--run-name", "r", "--patience", "0"], "patience=0"),
        (["--elastic", "memory://", "--run-name", "r", "--token-file", "nowhere"], "nowhere"),
        (["--elastic", "memory://", "--run-name", "r", "--method", "noloco"], "shared anchor"),
        (["--elastic", "memory://", "--run-name", "r", "--identity", "a\nb"], "call a worker"),
        (["--elastic", "tape://here", "--run-name", "r"], "open the object store tape://here"),
        (["--elastic", "http://127.0.0.1:1/run", "--run-name", "r"], "AWS_ENDPOINT_URL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_do_not_fit_are_refused(tiny, tmp_path, capsys, more, said: str) -> None:
    assert said in refused(capsys, ["train", *flags(tiny(), tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["memory://"], "without --run-name"),
        (["127.0.0.1:1", "--run-name", "r"], "a lighthouse has one run"),
        (["tape://here", "--run-name", "r"], "open the object store tape://here"),
        (["memory://", "--run-name", "r/s"], "'r/s'"),
        (["memory://", "--run-name", "r"], "nothing of that name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_status_that_cannot_be_is_refused(capsys, more, said: str) -> None:
    assert said in refused(capsys, ["status", *more])


def test_ranks_of_torchrun_are_refused(tiny, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    place = ["--elastic", "memory://", "--run-name", "r"]
    told = refused(capsys, ["train", *flags(tiny(), tmp_path / "out"), *place])
    assert "a worker of a run over an object store is one process" in told


@pytest.mark.slow
def test_a_bucket_that_is_not_there_and_keys_that_only_read_are_refused(
    tiny, tmp_path, capsys, as_admin, monkeypatch
) -> None:
    given = ["train", *flags(tiny(), tmp_path / "out"), "--run-name", "r", "--elastic"]
    # This server makes buckets of itself; others answer so.
    proxy = Proxy(as_admin, lambda count, line: "404" if line.startswith("PUT") else "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    told = refused(capsys, [*given, "s3://nothing/x"])
    proxy.close()
    assert "create the bucket, or correct its name" in told
    monkeypatch.setenv("AWS_ENDPOINT_URL", as_admin)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["reader"])
    told = refused(capsys, [*given, f"s3://run/{tmp_path.name}"])
    assert "keys that may put, get and delete" in told
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "keys" in refused(capsys, [*given, f"s3://run/{tmp_path.name}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_it_runs_without_torchft(tiny, tmp_path) -> None:
    """The control is a lighthouse, which does not."""
    code = (
        "import importlib.metadata, sys\n"
        "sys.modules['torchft'] = None\n"
        "found = importlib.metadata.version\n"
        "def version(name):\n"
        "    if name == 'torchft':\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "importlib.metadata.version = version\n"
        "from thinwire.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THINWIRE_TOKEN": SECRET}

    def run(*arguments: str) -> tuple[int, str]:
        done = Forked((str(tmp_path / "script.py"), *arguments), environment)
        _, error = done.communicate(timeout=100)
        assert done.returncode is not None
        return done.returncode, error

    given = flags(tiny("diloco", steps=10), tmp_path / "out")
    place = f"file://{tmp_path}/shared"
    assert run("join", place, "--run-name", "r", *given) == (0, "")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 10
    code, error = run("join", "127.0.0.1:1", *flags(tiny(), tmp_path / "no"))
    assert code == 1
    assert "torchft" in error


@pytest.mark.slow
def test_watching_goes_on_until_it_is_interrupted(run) -> None:
    _, place, _ = run
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "status", place, "--run-name", "r", "--watch"],
        env=os.environ | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "run r in file://" in process.stdout.readline()
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()
