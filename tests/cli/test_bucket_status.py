"""What is shown of a run over an object store, as far as its newest roll tells."""

import pytest
from rich.console import Console

from thinwire.cli.status_page import bucket_page
from thinwire.elastic.bucket.roll import Call, NewestState, Roll
from thinwire.elastic.bucket.watch import BucketStatus
from thinwire.membership import Progress, WorkerMetrics

AT = Progress(version=7, step=35, digest="ab", dealt=14)
METRICS = {"loss": 2.65432, "tokens_per_s": 12345.6, "sent_bytes": 106_000_000, "wait_s": 99.0}


def roll(*names: str, **changes) -> Roll:
    given = {"number": 9, "phase": "round", "position": AT, **changes}
    return Roll(names=names or ("a:1", "b:1"), **given)


def shown(status: BucketStatus, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(bucket_page(status, "run r in s3://x").shown(width))
    return captured.get()


def words(status: BucketStatus) -> str:
    return " ".join(shown(status).split())


def status(newest: Roll | None, *calls: Call, age_s: float | None = 90.0) -> BucketStatus:
    return BucketStatus(roll=newest, roll_age_s=None if newest is None else age_s, calls=calls)


def states(found: BucketStatus) -> dict[str, str]:
    workers = bucket_page(found, "r").record["workers"]
    return {worker["identity"]: worker["state"] for worker in workers}


def test_workers_that_train_are_shown_with_what_they_measured() -> None:
    page = words(status(roll("a[red]:1", "b:1", metrics={"a[red]:1": METRICS})))
    assert "run r in s3://x: roll 9, written 1.5 min ago; 2 workers" in page
    assert "the run is under way: outer step 7, inner step 35, 14 data shares dealt" in page
    assert "no snapshot yet" in page
    # A dash is what was not measured.
    assert "a[red] 7 35 2.6543 12.3k 106 MB - 1.65 min trains" in page
    assert "b 7 35 - - - - - trains" in page
    assert "address" not in page


def test_what_a_roll_does_not_tell_is_unknown() -> None:
    page = words(status(roll(lacking=("c:1",), behind=("b:1",)), age_s=None))
    assert "written unknown; 3 workers" in page
    assert "b unknown unknown - - - - - catches up" in page
    assert "c unknown unknown - - - - - waits for a snapshot" in page


def test_snapshots_are_named_by_their_outer_step() -> None:
    state, coming = (
        NewestState(version=4, roll=5, writer="a:1"),
        NewestState(version=7, writer="b:1"),
    )
    page = words(status(roll(state=state, next_state=coming)))
    assert "newest snapshot: of outer step 4; b writes one of outer step 7" in page


def test_a_call_says_more_than_the_roll_before_it() -> None:
    further = Progress(version=8, step=40, digest="cd")
    call = Call(name="b:2", phase="round", position=further, metrics=WorkerMetrics(loss=1.5))
    found = status(roll(), call)
    assert states(found) == {"a": "trains, others wait for it", "b": "waits for the next round"}
    assert "b 8 40 1.5 - - - - waits for the next round" in words(found)


@pytest.mark.parametrize(
    ("call", "state"),
    [
        ({"lacks": True}, "waits for a snapshot"),
        ({"leaves": True}, "has left"),
        ({"phase": "join"}, "waits for the next round"),
    ],
)
def test_a_newcomer_is_shown_before_a_roll_names_it(call: dict, state: str) -> None:
    made = Call(**{"name": "n:1", "phase": "round", "position": AT, **call})
    assert states(status(roll(), made))["n"] == state


def test_those_that_leave_are_not_said_to_wait() -> None:
    gone = Call(name="b:1", phase="round", position=AT, leaves=True)
    assert states(status(roll(), gone)) == {"a": "trains", "b": "has left"}


def test_a_worker_that_has_just_come_is_said_to_have() -> None:
    assert states(status(roll(new=("b:1",)))) == {"a": "trains", "b": "has just come"}


def test_before_the_first_roll_those_are_shown_that_wait_for_it() -> None:
    page = words(status(None, Call(name="a:1", phase="join", position=AT)))
    assert "run r in s3://x: 1 worker; no round has begun" in page
    assert bucket_page(status(None), "r").record["run"] is None


def test_a_run_that_is_over_is_said_to_be_and_has_the_workers_of_its_last_round() -> None:
    last = Roll(number=10, names=(), phase="done", position=AT, metrics={"a:1": METRICS, "b:1": {}})
    page = words(status(last))
    assert "the run is over: outer step 7" in page
    assert states(status(last)) == {"a": "finished", "b": "finished"}
    assert bucket_page(status(last), "r").record["run"]["over"]


def test_a_narrow_terminal_is_told_what_a_wide_one_shows() -> None:
    lines = shown(status(roll("a worker with a name of thirty let:1")), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("shows sent, received, too" in line for line in lines)
