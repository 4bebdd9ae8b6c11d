"""Messages over a store: late, lost, damaged and foreign ones count for all workers or for none."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import thinwire as tw
from bucket_workers import (
    SECRET,
    H,
    Hold,
    Worker,
    ended,
    memory,
    method,
    names_in,
    quick_fixture,  # noqa: F401 - the fixture
    read,
    train,
    until,
    workers,
    write,
)
from thinwire.elastic.run_objects import absent_message
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor

pytestmark = pytest.mark.usefixtures("quick")

STEPS = 4 * H


@pytest.fixture(name="store")
def store_fixture() -> Any:
    return memory()


def message(round: int, rank: int, step: int = 0):
    """Whether an object is this message of an all-gather."""
    end = f"/{round:08}/{step}/{rank:05}"
    return lambda key: "/message/" in key and key.endswith(end)


def key_of(store: Any, round: int, rank: int) -> str:
    (key,) = filter(message(round, rank), names_in(store, "a-run/message/"))
    return key


def unsent(worker: Worker) -> float:
    deltas = (f.outer.pseudo_gradient() for f in worker.state.fragments)
    return max(float(delta.abs().max()) for delta in deltas)


# -- late messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_a_message_that_comes_too_late_counts_for_no_worker_and_is_sent_again(token, store) -> None:
    running = workers(store, 3, timeout_s=0.4, token=token)
    late, hold = running[1], Hold()
    late.before("put", message(2, 1), hold)
    left: dict[str, float] = {}
    for worker in running:

        def note(worker: Worker = worker) -> None:
            left[worker.identity] = unsent(worker)

        worker.before_step[2 * H] = note
        worker.start(STEPS)
    until(lambda: running[0].version >= 2 and running[2].version >= 2)
    hold.may_go.set()
    assert len(set(ended(running))) == 1
    left_out = [worker.left_out() for worker in running]
    assert left_out[0] == left_out[2]
    assert list(left_out[0]) == [1]
    # On a busy machine the late one takes the round over from the others, and counts nothing.
    assert left_out[1] in ({}, left_out[0])
    assert left["w0"] == left["w2"] == 0.0 < left["w1"]
    # The others would have waited for it otherwise.
    assert {worker.version for worker in running} == {4}


def test_the_work_of_a_late_message_is_in_the_next_round() -> None:
    described = method(outer=tw.outer.SGD(lr=1.0))
    digests: list[str] = []
    for is_late in (True, False):
        running = workers(memory(), 2, described, timeout_s=0.3)
        hold = Hold()
        if is_late:
            running[1].before("put", message(1, 1), hold)
        for worker in running:
            worker.start(2 * H)
        if is_late:
            until(lambda first=running[0]: first.version >= 1)
            hold.may_go.set()
        digests += {*ended(running)}
    late, in_time = digests
    assert late != in_time


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_one_of_two_that_write_at_the_same_time_decides(token, store) -> None:
    sealing = None if token is None else Token(token)
    payload, races = bytes_tensor(b"a message"), 150
    barrier = threading.Barrier(2)
    outcomes: dict[str, list[tuple[bool, bytes]]] = {"sender": [], "waiter": []}

    async def race(name: str, mine: torch.Tensor, delay_s: float) -> None:
        objects = SealedObjects(ObjectStore(store), sealing, "a-run")
        for number in range(races):
            key, until_s = f"a-run/message/{number:05}", time.monotonic() + 10
            barrier.wait()
            await asyncio.sleep(delay_s if number % 3 else 0.0)
            is_mine = await objects.put(key, mine, until_s)
            raw = await objects.store.get(key, until_s, nbytes=10)
            outcomes[name].append((is_mine, objects.opened(raw, key).numpy().tobytes()))

    with ThreadPoolExecutor(2) as pool:
        # The one that would be first without a delay begins a moment later.
        given = [("sender", payload, 0.0005), ("waiter", absent_message(), 0.0)]
        list(pool.map(lambda one: asyncio.run(race(*one)), given))
    for (sent, at_sender), (put_empty, at_waiter) in zip(
        outcomes["sender"], outcomes["waiter"], strict=True
    ):
        assert sent is not put_empty
        assert at_sender == at_waiter == (b"a message" if sent else b"")
    # Both were first at times.
    assert len({sent for sent, _ in outcomes["sender"]}) == 2


def test_workers_agree_whichever_of_them_is_late_at_the_limit() -> None:
    running = workers(memory(), 3, timeout_s=0.15)
    for worker, seconds in zip(running, (0.0, 0.15, 0.16), strict=True):

        async def wait(_: str, seconds: float = seconds) -> None:
            await asyncio.sleep(seconds)

        worker.before("put", lambda key: "/message/" in key, wait)
    assert len(set(train(running, 5 * H))) == 1
    shared = set(running[0].digests).intersection(*(w.digests for w in running[1:]))
    for version in shared:
        assert len({worker.digests[version] for worker in running}) == 1
    # On a busy machine a worker that is late takes a snapshot, and has no version but these two.
    assert {0, 5} <= shared


# -- messages that are not what was sent -----------------------------------------------------------


FORGED = {
    "cut": lambda store: read(store, key_of(store, 1, 1))[:-3],
    "longer": lambda store: read(store, key_of(store, 1, 1)) + b"more",
    "replayed": lambda store: read(store, key_of(store, 1, 1)),
    "from another": lambda store: read(store, key_of(store, 1, 2)),
    "one byte": lambda store: b"x",
    "noise": lambda store: bytes(range(256)) * 4,
}


@pytest.mark.slow_cases(but=("replayed-sealed",))
@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
@pytest.mark.parametrize("forged", FORGED)
def test_what_another_wrote_in_the_place_of_a_message_is_left_out_by_all(
    forged, token, store
) -> None:
    running = workers(store, 3, timeout_s=5.0, token=token)

    async def forge(key: str) -> None:
        until(lambda: any(map(message(1, 2), names_in(store, "a-run/message/"))))
        write(store, key, FORGED[forged](store))

    running[1].before("put", message(2, 1), forge)
    assert len(set(train(running, 3 * H))) == 1
    assert [worker.left_out() for worker in running] == [running[0].left_out()] * 3
    assert list(running[0].left_out()) == [1]
    assert all(worker.version == 3 for worker in running)


# The sender counts its message as it sent it and not as the store has it. TLS and the store's own
# checksums see to that they are one; where they are not, the sender has drifted from all others.
@pytest.mark.slow_cases(but=("sealed-body",))
@pytest.mark.parametrize("at", [5, -1], ids=["header", "body"])
@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_the_sender_of_a_message_that_is_damaged_on_its_way_takes_a_snapshot(token, at) -> None:
    running = workers(memory(), 3, timeout_s=5.0, token=token)

    def damaged(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[at] ^= 1
        return bytes(changed)

    running[1].sends(message(2, 1), damaged)
    for worker in running:
        for step in range(12 * H):
            worker.before_step[step] = lambda: time.sleep(0.03)
    assert len(set(train(running, 12 * H))) == 1
    assert [list(running[place].left_out()) for place in (0, 2)] == [[1]] * 2
    assert any("by a snapshot" in event.why for event in running[1].events("healed"))


@pytest.mark.parametrize("fault", ["damaged result", "late shard"])
def test_a_reduction_of_which_a_part_is_damaged_or_late_is_discarded_on_all(fault: str) -> None:
    described = tw.presets.muloco(sync_every=H, bits=2, exchange=tw.ReduceScatter())
    store, hold, shard = memory(), Hold(), "/00000002/0/00000/00001"
    is_late = fault == "late shard"
    running = workers(store, 3, described, timeout_s=0.4 if is_late else 5.0)
    forged: list[str] = []

    async def forge(key: str) -> None:
        if not forged:
            write(store, key, b"")
        forged.append(key)

    if is_late:
        running[1].before("put", lambda key: key.endswith(shard), hold)
    else:
        running[1].before("put", message(2, 1, step=1), forge)
    for worker in running:
        worker.start(STEPS)
    if is_late:
        # Another worker has written that it is lost.
        until(lambda: any(key.endswith(shard) for key in names_in(store, "a-run/message/")))
        hold.may_go.set()
    assert len(set(ended(running))) == 1
    assert {worker.version for worker in running} == {3}
