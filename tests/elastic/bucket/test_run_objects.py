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
