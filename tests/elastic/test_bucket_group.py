"""Workers over a store: the numbers of a fixed run; late, damaged and foreign messages."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import bucket_workers
import thinwire as tw
from bucket_workers import (
    LONG,
    SECRET,
    UP_S,
    H,
    Hold,
    Worker,
    ended,
    fixed_digest,
    memory,
    method,
    names_in,
    read,
    slowly,
    started,
    train,
    workers,
    write,
)
from exchanges import LAYOUT, delta_of, exchanged, state_of, tag_of
from processes import until
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.elastic.alive import LostWorkers
from thinwire.elastic.group import StoreGroup
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.timeouts import Timeouts
from thinwire.exchange import ExchangeState
from thinwire.plan.job import meeting_requests
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.security.sealing import SEAL_NBYTES
from thinwire.security.token import Token
from thinwire.storage import StatePlacement
from thinwire.transport import RoundTag, in_process, object_store
from thinwire.transport.base import to_all
from thinwire.transport.object_store import ObjectStore
from toy import build_model

pytestmark = pytest.mark.usefixtures("quick")

STEPS = 4 * H
REDUCED = tw.presets.muloco(sync_every=H, bits=2, exchange=tw.ReduceScatter())


def message(round: int, rank: int, step: int = 0):
    """Whether an object is this message of an all-gather."""
    end = f"/{round:08}/{step}/{rank:05}"
    return lambda key: "/message/" in key and key.endswith(end)


def key_of(store: Any, round: int, rank: int) -> str:
    (key,) = filter(message(round, rank), names_in(store, "a-run/message/"))
    return key


def test_a_message_that_comes_too_late_counts_for_no_worker_and_is_sent_again(store) -> None:
    running, hold = workers(store, 3, timeout_s=0.4, token=SECRET), Hold()
    running[1].before("put", message(2, 1), hold)
    left: dict[str, float] = {}

    def note(worker: Worker) -> None:
        (fragment,) = worker.state.fragments
        left[worker.identity] = float(fragment.outer.pseudo_gradient().abs().max())

    for worker in running:
        worker.before_step[2 * H] = partial(note, worker)
        worker.start(STEPS)
    until(lambda: running[0].version >= 2 and running[2].version >= 2)
    hold.may_go.set()
    assert len(set(ended(running))) == 1
    left_out = [worker.loop.stats.left_out for worker in running]
    assert left_out[0] == left_out[2]
    assert list(left_out[0]) == [1]
    # On a busy machine the late one takes the round over from the others, and counts nothing.
    assert left_out[1] in ({}, left_out[0])
    assert left["w0"] == left["w2"] == 0.0 < left["w1"]
    # The others would have waited for it otherwise.
    assert {worker.version for worker in running} == {4}


FORGED = {
    "cut": lambda store: read(store, key_of(store, 1, 1))[:-3],
    "replayed": lambda store: read(store, key_of(store, 1, 1)),
    "from another": lambda store: read(store, key_of(store, 1, 2)),
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
    (left_out, version), *others = [(dict(w.loop.stats.left_out), w.version) for w in running]
    assert others == [(left_out, version)] * 2
    assert ([*left_out], version) == ([1], 3)


# The sender counts its message as it sent it and not as the store has it. TLS and the store's own
# checksums see to that they are one; where they are not, the sender has drifted from all others.
@pytest.mark.slow_cases(but=("sealed-body",))
@pytest.mark.parametrize("at", [5, -1], ids=["header", "body"])
@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_the_sender_of_a_message_that_is_damaged_on_its_way_takes_a_snapshot(token, at) -> None:
    running = workers(memory(), 3, timeout_s=5.0, token=token)

    def damaged(raw: bytearray) -> bytearray:
        raw[at] ^= 1
        return raw

    running[1].sends(message(2, 1), damaged)
    slowly(*running)
    assert len(set(train(running, LONG))) == 1
    assert [list(running[place].loop.stats.left_out) for place in (0, 2)] == [[1]] * 2
    assert any("by a snapshot" in event.why for event in running[1].events("healed"))
    (event,) = running[0].events("left out")
    assert event.who == ("w1",)
    assert "did not arrive as it was sent" in event.why


def test_a_reduction_of_which_a_result_is_damaged_is_discarded_on_all(store) -> None:
    running, forged = workers(store, 3, REDUCED, timeout_s=5.0), list[str]()

    async def forge(key: str) -> None:
        if not forged:
            write(store, key, b"")
        forged.append(key)

    running[1].before("put", message(2, 1, step=1), forge)
    assert len(set(train(running, STEPS))) == 1
    assert {worker.version for worker in running} == {3}


def test_shards_that_come_too_late_are_left_out_by_all_of_their_owners(store) -> None:
    running, hold, late = workers(store, 3, REDUCED, timeout_s=0.4), Hold(), message(2, 1)
    running[1].before("put", late, hold)
    started(running, STEPS)
    # Another worker has written that they are lost.
    until(lambda: any(map(late, names_in(store, "a-run/message/"))))
    hold.may_go.set()
    assert len(set(ended(running))) == 1
    # On a busy machine its result is late, too, and another worker stands in for it.
    assert {worker.version for worker in running} == {4}
    assert all(1 in worker.loop.stats.left_out for worker in running)


def reductions(
    store: Any, token: Token | None, device: str = "cpu"
) -> tuple[list[StoreGroup], list[ExchangeState]]:
    timeouts = {"floor_s": 1, "patience": 1, "unmeasured_s": 1, "fixed_s": 0.5}
    groups = list[StoreGroup]()
    for rank in range(3):
        objects = RunObjects(ObjectStore(store), "a-run", token)
        groups.append(
            StoreGroup(objects, "abc", rank, Timeouts(**timeouts), LostWorkers(objects, 0.5))
        )
    how = {"drops_bad_messages": True, "storage": StatePlacement(torch.device(device))}
    states = [
        state_of(tw.ReduceScatter(), rank, 3, codec=codecs.CastBF16(), **how) for rank in range(3)
    ]
    return groups, states


def begun(groups: Sequence[StoreGroup], states: Sequence[ExchangeState], tag: RoundTag) -> Any:
    messages = [
        state.encode(DenseVector(delta_of(rank).to(state._device)), tag)
        for rank, state in enumerate(states)
    ]
    pairs = zip(groups, states, messages, strict=True)
    return [group.run(state.run(message, tag), tag) for group, state, message in pairs]


GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("token", [None, Token(SECRET)], ids=["open", "sealed"])
def test_another_worker_combines_the_shard_of_one_that_is_lost(
    token, device: str, store, monkeypatch
) -> None:
    groups, states, hold = *reductions(store, token, device), Hold()
    stand_in = ExchangeState._stand_in
    # Neither on the host, perhaps, nor in one piece.
    monkeypatch.setattr(
        ExchangeState, "_stand_in", lambda *args: torch.stack([stand_in(*args)] * 2, 1)[:, 0]
    )
    put = groups[1]._objects.store.put

    async def dies(key: str, *args: Any) -> bool:
        if key.endswith("/1/00001"):
            await hold(key)
        return await put(key, *args)

    groups[1]._objects.store.put = dies  # type: ignore[method-assign]
    rounds = begun(groups, states, tag_of())
    found = [rounds[rank].wait() for rank in (0, 2)]
    groups[1].close()
    bf16 = {"codec": codecs.CastBF16()}
    every = exchanged([state_of(tw.ReduceScatter(), r, 3, **bf16) for r in range(3)], in_process(3))
    without = exchanged(
        [state_of(tw.Gather(), rank, 2, **bf16) for rank in range(2)],
        in_process(2),
        encode=lambda rank, state: state.encode(DenseVector(delta_of(2 * rank)), tag_of()),
    )
    _, (start, _), (end, _) = LAYOUT.cut(3)
    expected = every[0].mean.whole().clone()
    # It had not sent its own shard to anybody.
    expected[start:end] = without[0].mean.whole()[start:end].bfloat16()
    for result in found:
        assert torch.equal(result.mean.whole().cpu(), expected)
        assert not result.left_out
    assert not torch.equal(expected, every[0].mean.whole())
    # What a newcomer replays.
    place, until_s = groups[0].place_of(found[0].messages), time.monotonic() + UP_S
    there = asyncio.run(groups[0]._objects.messages(place, 3, until_s, nbytes=1))
    mean = states[2].replay_mean(there, tag_of(), left_out=())
    assert torch.equal(mean.whole().cpu(), expected)
    for each in groups:
        each.close()


def test_a_round_of_which_nobody_can_combine_a_shard_is_discarded(store, monkeypatch) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ExchangeState, "_stand_in", fails)
    groups, states = reductions(store, None)
    groups[1]._objects.store.put = Hold()  # type: ignore[method-assign]
    rounds = begun(groups, states, tag_of())
    groups[1].close()
    for rank in (0, 2):
        with pytest.raises(tw.errors.RoundDiscarded, match="worker 1: its message did not arrive"):
            rounds[rank].wait()
        groups[rank].close()


def test_a_lone_worker_tells_its_rounds_apart() -> None:
    objects = RunObjects(ObjectStore(memory()), "a-run", None)
    timeouts = Timeouts(floor_s=5, patience=0.5, unmeasured_s=5, fixed_s=None)
    group = StoreGroup(objects, ["a"], 0, timeouts, LostWorkers(objects, 5))

    def posts(payload: torch.Tensor):
        yield to_all(payload, 0, 1)
        return lambda: payload

    sent = {what: torch.full((7,), ord(what), dtype=torch.uint8) for what in "ab"}
    rounds = [group.run(posts(sent[what]), RoundTag(what=what, round=1)) for what in "ba"]
    for each in rounds:
        each.wait()
    # As they are applied, which is not as they were sent where one was discarded and sent again.
    assert [group.place_of([sent[what]]).split("/")[3] for what in "ab"] == ["a", "b"]
    group.close()


STAYING = 3 * H + 1
TOP_K = {"codec": tw.codecs.TopK(k=64), "feedback": tw.ErrorFeedback(decay=0.9)}
STREAMING = tw.presets.streaming_diloco(
    sync_every=H, fragments=tw.Balanced(count=2), overlap=tw.Delay(tau=1, mixing=0.5)
)
STAY = {
    "diloco": (method(), build_model, 1),
    "2 bits": (tw.presets.muloco(sync_every=H, bits=2), build_model, 2),
    "2 bits, reduced": (REDUCED, build_model, 3),
    "2 bits, reduced by one": (REDUCED, build_model, 1),
    "sparse": (method(**TOP_K), build_model, 3),
    "streaming": (STREAMING, build_model, 2),
    "bf16": (method(), lambda: build_model().to(torch.bfloat16), 3),
}


@pytest.mark.parametrize(("described", "model", "count"), STAY.values(), ids=STAY)
def test_workers_that_stay_have_the_digest_of_a_fixed_run(described, model, count: int) -> None:
    digests = train(workers(memory(), count, described, model=model), STAYING)
    assert set(digests) == {fixed_digest(described, count, STAYING, model=model)}
    # The control: one step fewer.
    assert digests[0] != fixed_digest(described, count, STAYING - 1, model=model)


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_messages_that_are_large_for_the_store_count_and_are_deleted_like_others(
    exchange, token, monkeypatch
) -> None:
    store, described = memory(), method(exchange=exchange)
    monkeypatch.setitem(object_store._LARGEST_NBYTES, repr(store), 400)
    digests = train(workers(store, 3, described, token=token), LONG)
    assert set(digests) == {fixed_digest(described, 3, LONG)}
    left = names_in(store, "a-run/message/")
    assert sum("." in name for name in left) >= len(left) // 3 > 0
    assert "00000002" not in {name.split("/")[2] for name in left}


def test_the_bytes_and_requests_of_workers_that_all_come_in_time_are_those_of_the_plan(
    monkeypatch,
) -> None:
    monkeypatch.setattr(bucket_workers, "SNAPSHOT_AFTER", 1e9)
    running = workers(memory(), 4, min_workers=4, least_wait_s=4 * UP_S, token=SECRET)
    before: list[Counter[str]] = []  # what a worker asks before its first step is of no round
    for worker in running:
        worker.before_step[0] = lambda of=worker: before.append(Counter(of.loop.stats.requests))
    assert len(set(train(running, STEPS))) == 1
    asked = sum((Counter(worker.loop.stats.requests) for worker in running), Counter[str]())
    for each in before:
        asked.subtract(each)
    described, shape = running[0].loop.method, Shape.of_model(running[0].model)
    plan = traffic(described, shape, workers=4, added_nbytes=SEAL_NBYTES)
    # They meet once more at the end.
    (puts, gets, lists), meetings = meeting_requests(4), STEPS // H + 1
    assert asked["puts"] == 4 * plan.puts(STEPS) + meetings * puts
    assert asked["gets"] == 4 * plan.gets(STEPS) + meetings * gets
    assert asked["lists"] == meetings * lists
    for worker in running:
        assert worker.loop.stats.sent_bytes == plan.sent_nbytes(STEPS)
        assert worker.loop.stats.received_bytes == plan.received_nbytes(STEPS)
