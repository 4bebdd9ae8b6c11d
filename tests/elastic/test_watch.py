"""Looking at a run from outside: nothing is written, and what cannot be read is said."""

import asyncio
import time
from pathlib import Path

from elastic_ready import write_run
from thinwire.elastic.roll import View, WorkerReport
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.watch import BucketWatch
from thinwire.membership import Progress, WorkerMetrics
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

TOKEN = Token("a secret of many characters")
AT = Progress(version=3, step=15, digest="ab")


def roll(number: int, **changes) -> View:
    known = {"names": ("a:1",), "phase": "round", "position": AT, **changes}
    return View(number=number, **known)


def call(name: str) -> WorkerReport:
    return WorkerReport(name=name, phase="round", position=AT)


def test_a_run_is_looked_at_from_before_its_first_roll_to_its_end(tmp_path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    url = f"file://{tmp_path}/shared"
    write_run(url, calls=[(call("a:1"), 1)], token=TOKEN)
    watch = BucketWatch(url, run="r", token=TOKEN)
    found = watch.look()
    assert (found.roll, found.roll_age_s, len(found.calls)) == (None, None, 1)

    early = [(call("old:1"), 2), (call("b:1"), 3), (call("b:2"), 3)]
    second = roll(2, names=("a:1", "b:1"))
    write_run(url, roll(1), second, calls=early, token=TOKEN)
    objects = RunObjects(ObjectStore(url), "r", TOKEN)
    measured = WorkerMetrics(loss=2.5)
    asyncio.run(objects.put_sign_of_life("a:1", measured, time.monotonic() + 10))
    before, found = files(), watch.look()
    assert (found.roll, [each.name for each in found.calls]) == (second, ["b:2"])
    assert 0 <= found.roll_age_s < 60
    assert list(found.signs_s) == ["a:1"]
    assert -1 < found.signs_s["a:1"] < 60
    assert (found.metrics["a:1"], found.metrics["b:1"]) == (measured, WorkerMetrics())
    assert files() == before

    write_run(url, roll(3, phase="done", names=()), calls=[(call("a:1"), 4)], token=TOKEN)
    found = watch.look()
    assert (found.roll.number, found.roll.is_over, found.calls) == (3, True, ())
    # Of the workers of the last round.
    assert found.metrics == {"a:1": measured, "b:1": WorkerMetrics()}
