"""Workers over a store that drift, come back, come late, end, and cannot go on."""

import asyncio
import json
import time
from typing import Any
from unittest import mock

import obstore
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
    Stopped,
    Worker,
    ended,
    memory,
    method,
    names_in,
    read,
    slowly,
    started,
    stops,
    train,
    workers,
    write,
)
from processes import free_port, promptly, until
from s3_server import options_of
from thinwire.elastic import loop_thread, run_objects, timeouts, transport
from thinwire.elastic.loop_thread import LOOK_S, LoopThread
from thinwire.elastic.roll import identity_of
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout, MismatchError
from thinwire.transport import Elastic
from thinwire.transport.sealed_objects import SealedObjects
from toy import build_model

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(name="snapshots")
def snapshots_fixture(monkeypatch) -> None:
    """A snapshot is due as often as can be."""
    monkeypatch.setattr(bucket_workers, "SNAPSHOT_AFTER", 1e-9)


def rolls(store: Any) -> list[dict[str, Any]]:
    return [json.loads(read(store, key)[:-4]) for key in names_in(store, "a-run/roll/")]


def test_a_worker_whose_anchor_changed_takes_a_snapshot(monkeypatch, store) -> None:
    monkeypatch.setattr(bucket_workers, "SNAPSHOT_AFTER", 1e6)  # only because it is needed
    running = workers(store, 3)
    slowly(*running)

    def change_anchor() -> None:
        with running[1].state.lock, torch.no_grad():
            running[1].state.fragments[0].outer.flat_anchor()[0] += 1.0

    running[1].before_step[3 * H] = change_anchor
    assert len(set(train(running, LONG))) == 1
    whys = [event.why for event in running[1].events("refused")]
    assert any("have changed since its last round" in why for why in whys)
    assert any("by a snapshot" in event.why for event in running[1].events("healed"))
    assert not running[0].events("healed")


def test_a_newcomer_that_is_restarted_as_it_heals_reads_no_part_twice(
    snapshots, store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 64)
    monkeypatch.setattr(run_objects, "_AT_ONCE", 1)
    known = {"min_workers": 1, "least_wait_s": 0.5}
    (first,) = workers(store, 1, **known)
    asked, whole, dies = list[str](), RunObjects._opened, [True]

    async def opened(self: RunObjects, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/state/" in key and not key.endswith("/end"):
            if dies[0] and len(asked) == 3:
                raise ExchangeError("heal", because="this process is killed", do="nothing")
            asked.append(key)
        return await whole(self, key, *args, **kwargs)

    def stops_after_a_snapshot() -> None:
        until(lambda: any(key.endswith("/end") for key in names_in(store, "a-run/state/")))
        stops()

    first.before_step[3 * H] = stops_after_a_snapshot
    first.start(LONG).fails(Stopped)
    # Without its first round, only the snapshot leads to where the run is.
    obstore.delete(store, names_in(store, "a-run/message/")[0])
    monkeypatch.setattr(RunObjects, "_opened", opened)
    cache = tmp_path / "snapshot"
    Worker(store, "w9", cache=cache, **known).start(LONG).fails(ExchangeError, "killed")
    assert len(list(cache.iterdir())) == len(asked) == 3
    dies[0] = False
    # What a worker that needs no snapshot finds there is of no use to it.
    other = tmp_path / "other"
    other.mkdir()
    (other / "a-run-state-00000").write_bytes(b"x")
    again = Worker(store, "w9", cache=cache, **known)
    train([again], LONG)
    alone = Worker(memory(), "w0", cache=other, **known)
    train([alone], H)
    assert not other.exists()
    assert any("by a snapshot" in event.why for event in again.events("healed"))
    assert len(asked) == len({*asked}) > 3
    assert not cache.exists()


def test_a_worker_with_other_initial_weights_takes_those_of_the_others(store) -> None:
    running = workers(store, 2, min_workers=3)
    other = Worker(store, "w2", number=1, of=2, model=lambda: build_model(1), min_workers=3)
    slowly(*running, other)
    assert len(set(train([*running, other], LONG))) == 1
    assert [bool(worker.events("healed")) for worker in (*running, other)] == [False, False, True]


def test_a_newcomer_replays_the_rounds_of_a_lone_worker(monkeypatch, store) -> None:
    first, second = workers(store, 2, min_workers=1)
    free = mock.Mock()
    monkeypatch.setattr(SealedObjects, "free_memory", free)
    slowly(first)
    first.start(LONG)
    until(lambda: first.version >= 3)
    second.start(LONG)
    assert len(set(ended([first, second]))) == 1
    assert any("by the rounds" in event.why for event in second.events("healed"))
    free.assert_called()
    assert first.events("arrived")
    assert not second.events("late")
    assert not set(first.shares) & set(second.shares)


@pytest.mark.slow_cases(but=("before",))
@pytest.mark.parametrize("request_", ["put", "get"], ids=["before it sent", "after it sent"])
def test_a_worker_that_comes_back_after_its_round_was_deleted_catches_up(
    request_: str, snapshots, store
) -> None:
    running = workers(store, 3, timeout_s=0.3, least_wait_s=0.3)
    away, hold = running[1], Hold()

    def sizes() -> list[int]:  # listed, not read: a message may be deleted in between
        batches = obstore.list(store, "a-run/message/00000004/")
        return [each["size"] for batch in batches for each in batch]

    slowly(*running, steps=20 * H)
    away.before(request_, lambda key: "/message/00000004/" in key, hold)
    started(running, 20 * H)
    until(hold.has_come.is_set)
    until(lambda: not any(sizes()))
    until(lambda: running[0].version >= 10)
    hold.may_go.set()
    assert len(set(ended(running))) == 1
    assert away.events("healed")
    # Nor did it count that round for itself meanwhile.
    assert all(running[0].digests.get(v, digest) == digest for v, digest in away.digests.items())
    # What was decided as lost stays.
    assert {*sizes()} == {0}


def test_what_is_left_when_all_have_gone_is_gone_on_with(store) -> None:
    before = workers(store, 2, min_workers=1)
    started(before, 1000 * H)
    until(lambda: min(worker.version for worker in before) >= 3)
    for worker in before:
        worker.before_step |= dict.fromkeys(range(1000 * H), stops)
        worker.fails(Stopped)
    version = max(worker.version for worker in before)
    again = workers(store, 2)
    steps = max(worker.loop.inner_step for worker in before) + 2 * H
    assert len(set(train(again, steps))) == 1
    assert all(min(worker.digests) >= version - 1 for worker in again)


@pytest.mark.slow
def test_one_long_wait_makes_no_later_one_long(store) -> None:
    """Polling begins when the last rounds' objects came; a wait for a latecomer tells nothing."""
    first, late = workers(store, 2)
    first.start(6 * H)
    time.sleep(4.0)
    with promptly(3.5):
        late.start(6 * H)
        assert len(set(ended([first, late]))) == 1


def test_snapshots_are_written_by_turns_and_what_they_replace_is_deleted(snapshots, store) -> None:
    running = workers(store, 2)
    slowly(*running)
    train(running, LONG)
    assert len({key.split("/")[2] for key in names_in(store, "a-run/state/")}) <= 3
    writers = {roll["next_state"]["writer"][:2] for roll in rolls(store)}
    assert writers >= {"w0", "w1"}
    assert "a-run/roll/00000001" in names_in(store)
    assert names_in(store, "a-run/message/00000002/") == []


@pytest.mark.parametrize(("steps", "slow_s"), [(3 * H, 0.0), (3 * H + 1, 0.0), (3 * H, 0.2)])
def test_a_worker_that_comes_after_the_end_has_the_digest_of_the_others(
    steps: int, slow_s: float, monkeypatch, store
) -> None:
    """Also on a busy machine: its session finds the snapshot before its thread waits for any."""
    digests, start = {*train(workers(store, 2), steps)}, LoopThread.start

    def started(self, work: Any) -> Any:
        running = start(self, work)
        time.sleep(slow_s)
        return running

    monkeypatch.setattr(LoopThread, "start", started)
    before = rolls(store)
    assert before[-1]["phase"] == "done"
    late = Worker(store, "w9")
    assert {late.start(steps).digest()} == digests
    assert late.loop.stats.sent_bytes == 0
    assert rolls(store) == before


def test_a_worker_with_more_steps_than_the_run_had_is_told_so(store) -> None:
    digests = {*train(workers(store, 2), 3 * H)}
    late, ahead, other = (Worker(into, "w9") for into in (store, store, memory()))
    late.start(8 * H).fails(ExchangeError, f"over, at version 3 and inner step {3 * H}")
    assert {late.loop.digest()} == digests
    other.train(8 * H)
    ahead.loop.load_state_dict(other.loop.state_dict())
    ahead.start(8 * H).fails(ExchangeError, "the run is over, at version 3")


def cut_once(worker: Worker, place: str) -> list[str]:
    """Have the first read of a `place` fail; returns what has failed."""
    failed: list[str] = []

    async def fail(key: str) -> None:
        if not failed:
            failed.append(key)
            raise ExchangeError("read it", because="the line was cut", do="try again")

    worker.before("get", lambda key: place in key, fail)
    return failed


def test_a_worker_whose_end_comes_second_ends_with_the_digest_of_the_others() -> None:
    running = workers(memory(), 2)  # one discards the last round
    failed = cut_once(running[1], "/message/00000004/")
    assert len(set(train(running, 2 * H + 1))) == 1
    assert failed
    assert running[1].events("healed")

    first, second = running = workers(memory(), 2, min_workers=1, least_wait_s=0.5, timeout_s=0.5)
    hold = Hold()
    # The last round counts for the first worker alone, and the second goes on before the end is
    # written.
    first.before("put", lambda key: key.endswith("/roll/00000005"), hold)
    cut_once(second, "/message/00000004/")
    started(running, 2 * H + 1)
    until(lambda: second.has_ended)
    hold.may_go.set()
    assert len(set(ended(running))) == 1


def test_a_worker_that_is_put_back_after_its_last_step_takes_it_again(store) -> None:
    first, other = workers(store, 2, min_workers=1, least_wait_s=0.5, timeout_s=0.5)
    hold = Hold()

    def is_held(key: str) -> bool:
        return "/call/00000005/" in key or (hold.has_come.is_set() and "/alive/" in key)

    async def too_late(key: str) -> None:  # the next roll does not know that it waits
        while len(rolls(store)) < 7:
            await asyncio.sleep(0.01)

    first.before("replace", is_held, hold)
    first.before("replace", lambda key: "/call/00000007/" in key, too_late)
    # It has its last outer step for itself, and the other one begins anew without it.
    first.start(3 * H + 1)
    until(hold.has_come.is_set)

    def comes() -> None:
        hold.may_go.set()
        until(lambda: names_in(store, "a-run/call/00000006/"))

    async def cut(key: str) -> None:
        raise ExchangeError(f"write {key}", because="the line was cut", do="try again")

    def dies() -> None:
        until(lambda: first.events("healed"))
        other.before("replace", lambda key: "/call/" in key, cut)  # it cannot say that it leaves
        stops()

    other.before_step = {2 * H: comes, 4 * H: dies}
    other.start(5 * H).fails(Stopped)
    ended([first])
    assert first.loop.inner_step == 3 * H + 1
    assert [rolls(store)[-1][what] for what in ("phase", "names")] == ["done", []]
    assert rolls(store)[-1]["position"]["step"] == 3 * H + 1


def test_no_worker_waits_for_one_that_has_left(store) -> None:
    running = workers(store, 3, min_workers=2, least_wait_s=UP_S)
    running[1].before_step[3 * H] = stops
    started(running, 6 * H)
    running[1].fails(Stopped)
    assert len(set(ended([running[0], running[2]]))) == 1
    assert running[0].events("left")


def test_the_last_outer_step_of_a_lone_worker_that_left_is_the_run_s(store) -> None:
    first, second = workers(store, 2, min_workers=1, least_wait_s=0.5)
    first.before_step[3 * H] = stops
    first.start(LONG).fails(Stopped)
    assert rolls(store)[-1]["position"]["version"] == 2
    train([second], 5 * H)
    assert min(second.digests) == first.version == 3
    assert second.digests[3] == first.digests[3]
    assert second.loop.inner_step == 5 * H


def test_a_worker_that_is_asked_to_stop_reports_however_slow_the_store_is(store) -> None:
    first, second = workers(store, 2, min_workers=1, least_wait_s=5.0)

    async def slow(key: str) -> None:
        await asyncio.sleep(3 * LOOK_S if first.is_stopped.is_set() else 0)

    def asked() -> None:
        first.is_stopped.set()
        raise Stopped

    first.before("replace", lambda key: "/call/" in key, slow)
    first.before_step[3 * H] = asked
    first.start(LONG).fails(Stopped)
    train([second], 4 * H)
    assert min(second.digests) == first.version == 3


def test_a_worker_of_another_run_is_refused_by_what_differs(store) -> None:
    def wider() -> torch.nn.Module:
        return build_model().append(torch.nn.Linear(3, 3))

    train(workers(store, 2, token=SECRET), H)
    for reason, stranger in {
        "token": Worker(store, "t", token="another token, which is long, too"),
        "parameters": Worker(store, "m", model=wider, token=SECRET),
        "sync_every": Worker(store, "h", method(sync_every=5), token=SECRET),
        "aggregate": Worker(store, "o", tw.presets.sparseloco(sync_every=H), token=SECRET),
    }.items():
        stranger.start(H).fails(MismatchError, reason)


def test_too_few_workers_are_waited_for_so_long_and_no_longer(monkeypatch) -> None:
    monkeypatch.setattr(transport, "_UNMEASURED_ROUND_S", 0.2)
    worker = Worker(memory(), "w0", min_workers=2, give_up_s=0.3, least_wait_s=0.2)
    worker.start(H).fails(ExchangeError, "min_workers=2, and only 1")


def test_a_roll_that_was_deleted_is_named(monkeypatch, store) -> None:
    monkeypatch.setattr(bucket_workers, "SNAPSHOT_AFTER", 1e6)  # no snapshot
    train(workers(store, 2), 5 * H)
    obstore.delete(store, "a-run/roll/00000003")
    Worker(store, "w9").start(5 * H).fails(ExchangeError, "roll 3", "lifecycle")


def test_a_store_that_is_gone_is_waited_for_as_long_after_the_process_was_stopped(
    monkeypatch,
) -> None:
    monkeypatch.setattr(loop_thread._Loop, "_stopped_s", 1e6)
    gone = Elastic(
        "s3://run/gone",
        run="a-run",
        options=ElasticOptions(give_up_s=1.0),
        store_options=options_of(f"http://127.0.0.1:{free_port()}"),
    )
    with promptly(20), pytest.raises(ExchangeTimeout, match="s3://run/gone"):
        gone.join(mock.Mock())


def test_any_printable_identity_can_be_a_workers_name() -> None:
    for identity in ("größe 🙂", "a:b:c", "a/b/../c", "x" * 200, "-"):
        store = memory()
        assert train([Worker(store, identity)], H)
        assert identity_of(rolls(store)[0]["names"][0]) == identity
    for wrong in ("", "x" * 201, f"{identity}\n", f"{identity}\0"):
        with pytest.raises(ConfigurationError, match="part of the names of objects"):
            Worker(memory(), wrong)


def test_a_run_whose_objects_have_an_earlier_form_is_refused(monkeypatch, store) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(transport, "_FORMAT", "4")
        train([Worker(store, "w0")], H)
    Worker(store, "w1").start(H).fails(MismatchError, "take part in run 'a-run'", "objects")


def test_a_full_store_ends_no_training_over_a_snapshot(snapshots, store) -> None:
    async def full(key: str) -> None:
        raise ExchangeError(f"write {key}", because="the disk is full", do="make room")

    running = workers(store, 2)
    for worker in running:
        worker.before("put", lambda key: "/state/" in key, full)
    assert len(set(train(running, 5 * H))) == 1
    assert any(worker.events("unsaved") for worker in running)


def test_a_store_that_cannot_be_read_for_a_moment_ends_no_snapshots(snapshots, store) -> None:
    failed, parts = list[str](), list[str]()

    async def note(key: str) -> None:
        parts.append(key)

    async def fails_once(key: str) -> None:
        if not failed:
            failed.append(key)
            raise ExchangeError(f"read {key}", because="the file is stale", do="try again")

    (worker,) = workers(store, 1, min_workers=1, least_wait_s=0.2)
    worker.before("get", lambda key: key.endswith("/end"), fails_once)
    worker.before("put", lambda key: "/state/" in key and not key.endswith("/end"), note)
    slowly(worker, seconds=0.1)
    train([worker], LONG)
    assert len(failed) == 1
    assert len(parts) == len({*parts})  # nothing is uploaded again
    assert rolls(store)[-1]["state"]["version"] > 5


@pytest.mark.parametrize("bytes_per_s", [1e9, 10.0])
def test_a_lone_worker_over_a_slow_link_counts_its_rounds(bytes_per_s, monkeypatch, store) -> None:
    """What it sends takes longer than another worker would be waited for; 1e9 is the control."""
    monkeypatch.setattr(timeouts, "SLOWEST_BYTES_PER_S", bytes_per_s)
    put = list[str]()

    async def slow(key: str) -> None:
        put.append(key)
        await asyncio.sleep(2.0 if len(put) < 3 else 0.0)

    (worker,) = workers(store, 1, min_workers=1, least_wait_s=0.2)
    worker.before("_write", lambda key: "/message/" in key, slow)
    train([worker], LONG)
    whys = [event.why for event in worker.events("discarded")]
    assert bool(whys) == (bytes_per_s > 10.0)
    assert all("no answer in time" in why for why in whys)


def test_a_snapshot_that_is_damaged_is_read_once_and_waited_for_no_longer(snapshots, store) -> None:
    (first,) = workers(store, 1, min_workers=1, least_wait_s=0.5)

    def stops_after_a_snapshot() -> None:
        until(lambda: any(key.endswith("/end") for key in names_in(store, "a-run/state/")))
        stops()

    first.before_step[3 * H] = stops_after_a_snapshot
    first.start(LONG).fails(Stopped)
    for key in names_in(store, "a-run/state/"):
        if not key.endswith("/end"):
            write(store, key, read(store, key)[:-1])
    for key in names_in(store, "a-run/message/"):
        obstore.delete(store, key)
    second = Worker(store, "w9", min_workers=1, least_wait_s=0.5, give_up_s=1.0)
    second.start(LONG).fails(ExchangeError, "what is left in the store")
    assert second.objects.requests.gets + second.objects.requests.polls < 1000


class Table(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(11, 3)[x]


@pytest.mark.parametrize(
    ("weight", "exchange"),
    [(torch.ones(1), tw.ReduceScatter()), (torch.linspace(0, 1, 33).view(3, 11).t(), tw.Gather())],
)
def test_models_of_one_number_or_transposed_are_trained_and_replayed(
    weight, exchange, store
) -> None:
    described, model = method(exchange=exchange), lambda: Table(weight.clone())
    digests = {*train(workers(store, 2, described, model=model), 3 * H)}
    assert {Worker(store, "w9", described, model=model).start(3 * H).digest()} == digests


@pytest.mark.slow
def test_those_that_come_wait_for_one_that_still_waits_for_a_lost_worker(store) -> None:
    known = {"min_workers": 1, "least_wait_s": 0.3, "timeout_s": 2.5}
    first, lost = running = workers(store, 2, **known)
    hold = Hold()
    lost.before("put", lambda key: "/message/" in key and "/00000003/" in key, hold)
    slowly(first)
    started(running, LONG)
    until(hold.has_come.is_set)
    again, late = Worker(store, "w1", number=1, of=2, **known), Worker(store, "w9", **known)
    slowly(again, late)
    started([again, late], LONG)
    assert len(set(ended([first, again, late]))) == 1
    hold.may_go.set()
    assert not first.events("late")
    assert not first.events("healed")
