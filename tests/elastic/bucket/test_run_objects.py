"""The objects of a run in a store: what is written is found again, and garbage is passed over."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from bucket_workers import SECRET, flip, memory, names_in, obstore, read, write
from thinwire.elastic.bucket import run_objects
from thinwire.elastic.bucket.roll import Call, NewestState, Roll
from thinwire.elastic.bucket.run_objects import RunObjects, absent_message
from thinwire.errors import MismatchError
from thinwire.membership import Progress
from thinwire.security.token import Token
from thinwire.transport import RoundTag
from thinwire.transport.object_store import ObjectStore
from thinwire.transport.sealed_objects import bytes_tensor

AT = Progress(version=0, step=0, digest="ab")
STATE = NewestState(version=3, roll=4, writer="a:1")
LARGEST = 1 << 20


def objects(store: Any, token: str | None = None) -> RunObjects:
    return RunObjects(ObjectStore(store), "a-run", None if token is None else Token(token))


def soon() -> float:
    return time.monotonic() + 5


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def roll(number: int) -> Roll:
    return Roll(number=number, names=("a:1",), phase="join", position=AT)


def call(name: str) -> Call:
    return Call(name=name, phase="join", position=AT)


# -- rolls and calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["²", "٣", "a-note", "00000009x", "9", "1" * 5000, "00000007/b"])
def test_other_names_beside_rolls_are_no_rolls(name: str) -> None:
    store = memory()
    run = objects(store)
    for number in (1, 2, 3):
        assert do(run.put_roll(roll(number), soon()))
    write(store, f"a-run/roll/{name}", b"x")
    assert do(run.newest_roll(0, soon())) == 3


# -- snapshots -------------------------------------------------------------------------------------


def written(store: Any, token: str | None = None, payload: bytes = b"a snapshot") -> str:
    """Write a snapshot; returns the beginning of its names."""
    parts = [memoryview(payload[:3]), memoryview(b""), memoryview(payload[3:])]
    do(objects(store, token).put_state(parts, STATE, 5))
    return names_in(store, "a-run/state/")[0].rpartition("/")[0]


def found(store: Any, token: str | None = None, largest: int = LARGEST) -> bytes | None:
    file = do(objects(store, token).state(STATE, 5, largest=largest))
    return None if file is None else bytes(file)


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64])
def test_a_snapshot_in_pieces_is_found_again(token, nbytes: int, monkeypatch) -> None:
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 8)
    monkeypatch.setattr(run_objects, "_AT_ONCE", 2)
    store, payload = memory(), bytes(range(nbytes))
    written(store, token, payload)
    assert found(store, token) == payload
    assert found(store, token, largest=nbytes - 1) is None
    assert do(objects(store, token).has_state(STATE, soon()))


ENDS = [
    b"",
    b"}{",
    b"[]",
    b"{}",
    b'{"parts": 1}',
    b'{"parts": [], "nbytes": {}}',
    b'{"parts": 1, "nbytes": -10}',
    b'{"parts": 2, "nbytes": 10}',
    b'{"parts": 1, "nbytes": 11}',
    b'{"parts": 1e999, "nbytes": 10}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("end", ENDS)
def test_a_snapshot_whose_end_is_damaged_is_not_there(end: bytes) -> None:
    store = memory()
    base = written(store)
    assert found(store) == b"a snapshot"
    write(store, f"{base}/end", end)
    assert found(store) is None


def test_a_snapshot_without_an_end_or_a_part_is_not_there() -> None:
    store = memory()
    base = written(store)
    part = read(store, f"{base}/00000")
    write(store, f"{base}/00000", part[:-1])
    assert found(store) is None
    obstore.delete(store, f"{base}/00000")
    assert found(store) is None
    write(store, f"{base}/00000", part)
    assert found(store) == b"a snapshot"
    obstore.delete(store, f"{base}/end")
    assert found(store) is None


def test_a_sealed_snapshot_with_another_bit_is_not_there() -> None:
    store = memory()
    base = written(store, SECRET)
    flip(store, f"{base}/00000")
    assert found(store, SECRET) is None


def test_the_two_newest_snapshots_are_kept_and_so_is_one_that_is_being_written() -> None:
    store = memory()
    run = objects(store)
    for version in (3, 5, 8, 9):
        state = NewestState(version=version, roll=version, writer="a:1")
        do(run.put_state([memoryview(b"x")], state, 5))
    (end_of_nine,) = (key for key in names_in(store) if "0009/" in key and key.endswith("end"))
    obstore.delete(store, end_of_nine)
    do(run.delete_states(soon()))
    kept = {int(key.split("/")[2]) for key in names_in(store, "a-run/state/")}
    assert kept == {5, 8, 9}


# -- what the run is -------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [None, SECRET], ids=["open", "sealed"])
@pytest.mark.parametrize("raw", [b"", b"x" * 90, b"[]", b'"a"', b"[" * 100_000])
def test_a_description_that_does_not_open_names_the_token(raw: bytes, mine) -> None:
    store = memory()
    write(store, "a-run/about", raw)
    with pytest.raises(MismatchError, match="THINWIRE_TOKEN"):
        do(objects(store, mine).check_description({"a": "b"}, soon()))


def test_another_description_is_named() -> None:
    store = memory()
    do(objects(store).check_description({"a": "1", "b": "2"}, soon()))
    do(objects(store).check_description({"b": "2", "a": "1"}, soon()))
    with pytest.raises(MismatchError, match="b differs; because the run has 2 and this run 3"):
        do(objects(store).check_description({"a": "1", "b": "3"}, soon()))
