"""`thinwire status`: what it shows of a run over an object store."""

import os
import signal
import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from elastic_ready import write_run
from forked import Forked
from processes import until
from thinwire.cli import main
from thinwire.cli.status_page import bucket_page
from thinwire.elastic.roll import NewestState, View, WorkerReport
from thinwire.elastic.watch import BucketStatus
from thinwire.membership import Progress, WorkerMetrics

pytest.importorskip("obstore")


@pytest.fixture
def place(tmp_path) -> str:
    """Of a run with two workers."""
    write_run(url := f"file://{tmp_path}/store", roll())
    return f"{url}/r"


def test_watching_goes_on_until_it_is_interrupted(place: str) -> None:
    process = Forked(["-m", "thinwire", "status", place, "--watch"], os.environ)
    until(lambda: "trains" in process.files[0].read_text())
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    assert "roll 9" in " ".join(shown.split())


def test_watching_without_a_terminal_prints_every_look(place: str, monkeypatch, capsys) -> None:
    waits = iter([None, None])

    def wait(_: float) -> None:
        if next(waits, place) is not None:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=wait, time=time.time)
    monkeypatch.setattr("thinwire.cli.status.time", clock)
    assert main(["status", place, "--watch"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("roll 9") == 3


def test_metrics_are_served_until_it_is_interrupted(place: str, monkeypatch, capsys) -> None:
    def ask(_) -> None:
        with urllib.request.urlopen(capsys.readouterr().out.split()[-1], timeout=10) as answer:
            assert "thinwire_workers 2.0\n" in answer.read().decode()
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=ask, time=time.time)
    monkeypatch.setattr("thinwire.cli.status.time", clock)
    assert main(["status", place, "--metrics", "0"]) == 0


def test_a_narrow_terminal_folds_names_and_cuts_no_number() -> None:
    measured = WorkerMetrics(loss=-1e9, tokens_per_s=1e9, sent_bytes=10**12, wait_s=9e4)
    name = "a worker with a name of 30 let"
    found = of_bucket(roll(f"{name}:1"), metrics={f"{name}:1": measured})
    out = shown(found, 80)
    assert max(map(len, out.splitlines())) <= 80
    for text in ("worker", "30 let", "-1e+09", "1B", "1 TB", "1.04 d", "trains"):
        assert text in out


# What is shown of a run over an object store, as far as its newest roll tells.
AT = Progress(version=7, step=35, digest="ab", dealt=14)
METRICS = WorkerMetrics(loss=2.65432, tokens_per_s=12345.6, sent_bytes=106_000_000, wait_s=99.0)


def roll(*names: str, **changes) -> View:
    given = {"number": 9, "phase": "round", "position": AT, **changes}
    return View(names=names or ("a:1", "b:1"), **given)


def call(name: str, **changes) -> WorkerReport:
    return WorkerReport(**{"name": name, "phase": "round", "position": AT, **changes})


def of_bucket(
    newest: View | None, *calls: WorkerReport, age_s: float | None = 90.0, **known
) -> BucketStatus:
    age_s = None if newest is None else age_s
    return BucketStatus(roll=newest, roll_age_s=age_s, calls=calls, **known)


def shown(status: BucketStatus, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(bucket_page(status, "run r in s3://x"))
    return captured.get()


def words(status: BucketStatus) -> str:
    return " ".join(shown(status).split())


def states(found: BucketStatus) -> str:
    workers = bucket_page(found, "r").record["workers"]
    return "; ".join(f"{worker['identity']} {worker['state']}" for worker in workers)


def test_workers_that_train_are_shown_with_what_they_measured_and_their_last_sign_of_life() -> None:
    found = of_bucket(roll("a[red]:1", "b:1"), metrics={"a[red]:1": METRICS})
    page = words(found)
    assert "run r in s3://x: roll 9, written 1.5 min ago; 2 workers" in page
    assert "the run is under way: outer step 7, inner step 35, 14 data shares dealt" in page
    assert "no snapshot yet" in page
    # A dash is what was not measured.
    assert "a[red] 7 35 2.6543 12.3k 106 MB - 1.65 min - trains" in page
    assert "b 7 35 - - - - - - trains" in page
    assert "b 7 35 - - - - - 4.2 s trains" in words(replace(found, signs_s={"b:1": 4.2}))


def test_what_a_roll_does_not_tell_is_unknown_and_snapshots_have_an_outer_step() -> None:
    page = words(of_bucket(roll(lacking=("c:1",), behind=("b:1",)), age_s=None))
    assert "written unknown; 3 workers" in page
    assert "b unknown unknown - - - - - - catches up" in page
    assert "c unknown unknown - - - - - - waits for a snapshot" in page
    state = NewestState(version=4, roll=5, writer="a:1")
    page = words(of_bucket(roll(state=state, next_state=NewestState(version=7, writer="b:1"))))
    assert "newest snapshot: of outer step 4; b writes one of outer step 7" in page


AHEAD = Progress(version=8, step=40, digest="cd")
FURTHER = call("b:2", position=AHEAD)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_bucket(roll(), FURTHER), "a trains, others wait for it; b waits for the next round"),
        # A newcomer, before a roll names it.
        (of_bucket(roll(), call("n:1", lacks=True)), "n waits for a snapshot"),
        (of_bucket(roll(), call("n:1", phase="join")), "n waits for the next round"),
        # Who leaves is not said to wait.
        (of_bucket(roll(), call("b:1", leaves=True)), "a trains; b has left"),
        (of_bucket(roll(new=("b:1",))), "a trains; b has just come"),
    ],
)
def test_a_call_says_more_than_the_roll_before_it(found: BucketStatus, expected: str) -> None:
    assert states(found).endswith(expected)
    if FURTHER in found.calls:
        measured = replace(found, metrics={"b:2": WorkerMetrics(loss=1.5)})
        assert "b 8 40 1.5 - - - - - waits for the next round" in words(measured)


def test_a_run_that_has_not_begun_or_is_over_is_said_to_be() -> None:
    page = words(of_bucket(None, call("a:1", phase="join")))
    assert "run r in s3://x: 1 worker; no round has begun" in page
    assert bucket_page(of_bucket(None), "r").record["run"] is None
    # Over, it has the workers of its last round.
    last = View(number=10, names=(), phase="done", position=AT)
    found = of_bucket(last, metrics={"a:1": METRICS, "b:1": WorkerMetrics()})
    assert "the run is over: outer step 7" in words(found)
    assert states(found) == "a finished; b finished"
    assert bucket_page(found, "r").record["run"]["over"]
