import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from elastic_registry import Clock, at, client, registry_server
from processes import free_port
from thinwire.cli import main
from thinwire.cli.status_page import bucket_page
from thinwire.elastic.bucket.roll import NewestState, View, WorkerReport
from thinwire.elastic.bucket.watch import BucketStatus
from thinwire.membership import Progress, WorkerMetrics

SECRET = "a secret of many characters"


@pytest.fixture(autouse=True)
def with_token(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    monkeypatch.setenv("COLUMNS", "160")


def test_it_shows_who_is_there_and_how_far(capsys) -> None:
    with registry_server() as server:
        address = f"127.0.0.1:{server.port}"
        assert main(["status", address]) == 0
        assert "0 workers; no outer step yet" in capsys.readouterr().out
        a, b, c = (client(server.port, name) for name in ("a[red]", "b", "c"))
        a.join(at(7), "10.0.0.1:4000")
        measured = {"tokens_per_s": 12345.6, "sent_bytes": 106_000_000, "received_bytes": 7500}
        a.report(WorkerMetrics(loss=2.65432, wait_s=99.0, **measured))
        a.heartbeat(at(7))
        b.join(at(5), "10.0.0.2:4000")
        b.report(WorkerMetrics(loss=float("nan"), sent_bytes=0))
        b.heartbeat(at(5), waiting_s=3.2)
        other = dataclasses.replace(at(7), digest="ff")
        c.join(other, "10.0.0.3:4000")
        c.finished = True
        c.heartbeat(other)
        assert main(["status", address]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 workers; the run is under way: outer step 7, inner step 35" in out
    # Names are shown as they are.
    assert "a[red] 10.0.0.1:4000 7 35 2.6543 12.3k 106 MB 7.5 kB 1.65 min trains" in out
    # What is not known is a dash: c is of an earlier version.
    assert "b 10.0.0.2:4000 5 25 - - 0 B - - 2 outer steps behind, waits for others, 3 s" in out
    assert "c 10.0.0.3:4000 7 35 - - - - - finished, another state: digest ff" in out


def test_it_shows_whose_contributions_were_not_used_and_why(capsys, monkeypatch) -> None:
    with registry_server() as server:

        def shown(*flags: str) -> str:
            assert main(["status", f"127.0.0.1:{server.port}", *flags]) == 0
            return capsys.readouterr().out

        workers = [client(server.port, name) for name in ("a[red]", "b")]
        for worker in workers:
            worker.join(at(7), "10.0.0.1:4000")
        assert "rejected" not in shown()
        for worker in workers:
            for step, kind in ((5, "outlier"), (6, "not finite"), (6, "clipped"), (7, "outlier")):
                worker.note_contribution(step, "a[red]", kind)
            worker.heartbeat(at(7))
        page, told = " ".join(shown().split()), json.loads(shown("--json"))
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, shown().splitlines())) <= 80
    assert "contributions of rejected clipped why" in page
    assert "a[red] 3 1 not finite 1, outlier 2" in page
    assert told["contributions"] == {"a[red]": {"not finite": 1, "outlier": 2, "clipped": 1}}
    assert [worker["identity"] for worker in told["workers"]] == ["a[red]", "b"]
    assert (told["run"]["version"], told["workers"][1]["state"]) == (7, "trains")


def test_a_narrow_terminal_is_told_what_a_wide_one_shows(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with registry_server() as server:
        a = client(server.port, "a worker with a name of 30 let")
        a.join(at(7), "10.0.0.1:4000")
        a.report(WorkerMetrics(loss=-1e18, tokens_per_s=1e18, sent_bytes=10**18, wait_s=1e18))
        a.heartbeat(at(7))
        assert main(["status", f"127.0.0.1:{server.port}"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "10.0.0.1" not in out
    assert "a terminal of 116 columns shows address, sent, received, too" in out
    # Names are cut before numbers are.
    for shown in ("a worker", "-1e+18", "1e+06T", "1.16e+13 d", "trains"):
        assert shown in out


def test_who_is_silent_a_run_that_is_over_and_another_token_are_named(capsys, monkeypatch) -> None:
    with registry_server() as server:
        where = f"127.0.0.1:{server.port}"
        clock = server._registry._clock = Clock()
        silent, heard = client(server.port, "a"), client(server.port, "b")
        for worker in (silent, heard):
            worker.join(at(7), "10.0.0.1:4000")
        clock.now_s += 3.2
        heard.heartbeat(at(7))
        assert main(["status", where]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "a 10.0.0.1:4000 7 35 - - - - - no heartbeat for 3 s b" in out
        assert out.endswith("b 10.0.0.1:4000 7 35 - - - - - trains")
        heard.heartbeat(dataclasses.replace(at(8), over=True))
        for worker in (silent, heard):
            worker.leave()
        assert main(["status", where]) == 0
        assert "0 workers; the run is over: outer step 8" in capsys.readouterr().out
        monkeypatch.setenv("THINWIRE_TOKEN", "another secret, also long enough")
        assert main(["status", where]) == 1
        assert "token" in capsys.readouterr().err
    assert main(["status", f"127.0.0.1:{free_port()}"]) == 1
    assert "error: cannot" in capsys.readouterr().err


def test_watching_goes_on_until_it_is_interrupted() -> None:
    with registry_server() as server:
        command = ["-m", "thinwire", "status", f"127.0.0.1:{server.port}", "--watch"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, *command], **pipes)
        try:
            assert "0 workers" in process.stdout.readline()
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()
            process.communicate()


# What is shown of a run over an object store, as far as its newest roll tells.
AT = Progress(version=7, step=35, digest="ab", dealt=14)
METRICS = {"loss": 2.65432, "tokens_per_s": 12345.6, "sent_bytes": 106_000_000, "wait_s": 99.0}


def roll(*names: str, **changes) -> View:
    given = {"number": 9, "phase": "round", "position": AT, **changes}
    return View(names=names or ("a:1", "b:1"), **given)


def call(name: str, **changes) -> WorkerReport:
    return WorkerReport(**{"name": name, "phase": "round", "position": AT, **changes})


def of_bucket(
    newest: View | None, *calls: WorkerReport, age_s: float | None = 90.0
) -> BucketStatus:
    return BucketStatus(roll=newest, roll_age_s=None if newest is None else age_s, calls=calls)


def words(status: BucketStatus) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(bucket_page(status, "run r in s3://x").shown(120))
    return " ".join(captured.get().split())


def states(found: BucketStatus) -> dict[str, str]:
    workers = bucket_page(found, "r").record["workers"]
    return {worker["identity"]: worker["state"] for worker in workers}


def test_workers_that_train_are_shown_with_what_they_measured() -> None:
    page = words(of_bucket(roll("a[red]:1", "b:1", metrics={"a[red]:1": METRICS})))
    assert "run r in s3://x: roll 9, written 1.5 min ago; 2 workers" in page
    assert "the run is under way: outer step 7, inner step 35, 14 data shares dealt" in page
    assert "no snapshot yet" in page
    # A dash is what was not measured.
    assert "a[red] 7 35 2.6543 12.3k 106 MB - 1.65 min trains" in page
    assert "b 7 35 - - - - - trains" in page
    assert "address" not in page


def test_what_a_roll_does_not_tell_is_unknown_and_snapshots_have_an_outer_step() -> None:
    page = words(of_bucket(roll(lacking=("c:1",), behind=("b:1",)), age_s=None))
    assert "written unknown; 3 workers" in page
    assert "b unknown unknown - - - - - catches up" in page
    assert "c unknown unknown - - - - - waits for a snapshot" in page
    state = NewestState(version=4, roll=5, writer="a:1")
    page = words(of_bucket(roll(state=state, next_state=NewestState(version=7, writer="b:1"))))
    assert "newest snapshot: of outer step 4; b writes one of outer step 7" in page


AHEAD = Progress(version=8, step=40, digest="cd")
FURTHER = call("b:2", position=AHEAD, metrics=WorkerMetrics(loss=1.5))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_bucket(roll(), FURTHER), "a trains, others wait for it; b waits for the next round"),
        # A newcomer, before a roll names it.
        (of_bucket(roll(), call("n:1", lacks=True)), "n waits for a snapshot"),
        (of_bucket(roll(), call("n:1", leaves=True)), "n has left"),
        (of_bucket(roll(), call("n:1", phase="join")), "n waits for the next round"),
        # Who leaves is not said to wait.
        (of_bucket(roll(), call("b:1", leaves=True)), "a trains; b has left"),
        (of_bucket(roll(new=("b:1",))), "a trains; b has just come"),
    ],
)
def test_a_call_says_more_than_the_roll_before_it(found: BucketStatus, expected: str) -> None:
    told = "; ".join(f"{name} {state}" for name, state in states(found).items())
    assert told.endswith(expected)
    if FURTHER in found.calls:
        assert "b 8 40 1.5 - - - - waits for the next round" in words(found)


def test_a_run_that_has_not_begun_or_is_over_is_said_to_be() -> None:
    page = words(of_bucket(None, call("a:1", phase="join")))
    assert "run r in s3://x: 1 worker; no round has begun" in page
    assert bucket_page(of_bucket(None), "r").record["run"] is None
    # Over, it has the workers of its last round.
    last = View(number=10, names=(), phase="done", position=AT, metrics={"a:1": METRICS, "b:1": {}})
    assert "the run is over: outer step 7" in words(of_bucket(last))
    assert states(of_bucket(last)) == {"a": "finished", "b": "finished"}
    assert bucket_page(of_bucket(last), "r").record["run"]["over"]
