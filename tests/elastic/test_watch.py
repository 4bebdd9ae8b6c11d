"""Looking at a run from outside: nothing is written, and what cannot be read is said."""

import asyncio
import time
from pathlib import Path

import pytest

from elastic_ready import write_run
from thinwire.elastic.roll import View, WorkerReport
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.watch import BucketWatch
from thinwire.membership import Progress
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

pytest.importorskip("obstore")

TOKEN = Token("a secret of many characters")
AT = Progress(version=3, step=15, digest="ab")


def roll(number: int, **changes) -> View:
    return View(
        **{"number": number, "names": ("a:1",), "phase": "round", "position": AT, **changes}
    )


def call(name: str) -> WorkerReport:
    return WorkerReport(name=name, phase="round", position=AT)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/shared"


def test_the_newest_roll_and_the_calls_for_the_next_are_read(url, tmp_path) -> None:
    early = [(call("old:1"), 2), (call("b:1"), 3), (call("b:2"), 3)]
    write_run(url, roll(1), roll(2), calls=early, token=TOKEN)
    before = files(tmp_path)
    watch = BucketWatch(url, run="r", token=TOKEN)
    found = watch.look()
    assert found.roll == roll(2)
    assert 0 <= found.roll_age_s < 60
    assert [each.name for each in found.calls] == ["b:2"]
    assert files(tmp_path) == before
    write_run(url, roll(3), token=TOKEN)
    assert watch.look().roll.number == 3
    assert watch.look().calls == ()


def test_signs_of_life_are_read_with_their_age(url) -> None:
    write_run(url, roll(1, names=("a:1", "b:1")), token=TOKEN)
    objects = RunObjects(ObjectStore(url), "r", TOKEN)
    asyncio.run(objects.put_sign_of_life("a:1", time.monotonic() + 10))
    signs_s = BucketWatch(url, run="r", token=TOKEN).look().signs_s
    assert list(signs_s) == ["a:1"]
    assert -1 < signs_s["a:1"] < 60


def test_a_run_before_its_first_roll_and_one_that_is_over(url) -> None:
    write_run(url, calls=[(call("a:1"), 1)], token=TOKEN)
    watch = BucketWatch(url, run="r", token=TOKEN)
    found = watch.look()
    assert (found.roll, found.roll_age_s, len(found.calls)) == (None, None, 1)
    write_run(url, roll(1, phase="done", names=()), calls=[(call("a:1"), 2)], token=TOKEN)
    found = watch.look()
    assert (found.roll.is_over, found.calls) == (True, ())
