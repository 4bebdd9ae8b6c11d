"""How long a worker waits; a dead one is noticed long before the others' patience ends."""

import asyncio

from thinwire.elastic import alive
from thinwire.elastic.alive import LostWorkers, give_signs
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError
from thinwire.membership import WorkerMetrics
from thinwire.transport import object_store
from thinwire.transport.object_store import ObjectStore


def run_of(store) -> RunObjects:
    return RunObjects(ObjectStore(store), "a-run", None)


def test_a_worker_is_lost_once_its_signs_end_and_one_that_gave_none_too(monkeypatch) -> None:
    objects, clock_s = run_of("memory://"), [100.0]
    for module in (alive, object_store):
        monkeypatch.setattr(module, "now_s", lambda: clock_s[0])

    async def lost_after(tenths: int, lost: LostWorkers, living: str) -> list[set[str]]:
        """Those of a, b and c that are lost after each of so many tenths of a second."""
        found: list[set[str]] = []
        for _ in range(tenths):
            for name in living:
                await objects.put_sign_of_life(name, WorkerMetrics(), clock_s[0] + 1)
            clock_s[0] += 0.1
            found.append(await lost.among(["a", "b", "c"]))
        return found

    async def watch() -> None:
        lost = LostWorkers(objects, 0.35)
        assert await lost_after(6, lost, "ab") == [set()] * 4 + [{"c"}] * 2
        assert await lost_after(5, lost, "a") == [{"c"}] * 3 + [{"b", "c"}] * 2
        clock_s[0] += 60.0  # as if this machine, and perhaps that of a, was suspended
        assert await lost_after(1, lost, "") == [{"b", "c"}]
        assert await lost_after(1, lost, "b") == [{"c"}]

    asyncio.run(watch())


def test_a_store_that_refuses_signs_ends_nothing(caplog) -> None:
    objects = run_of("memory://")

    async def refuse(*_: object) -> None:
        raise ExchangeError("write", because="the disk is full", do="make room")

    objects.store.replace = refuse  # type: ignore[method-assign]

    async def watch() -> None:
        task = asyncio.ensure_future(give_signs(objects, "a", 0.3, WorkerMetrics))
        await asyncio.sleep(0.15)
        assert not task.done()
        task.cancel()

    with caplog.at_level("INFO", "thinwire.elastic.alive"):
        asyncio.run(watch())
    assert "may take this worker for lost" in caplog.text


def test_waits_double_until_an_exchange_succeeds() -> None:
    known = {"floor_s": 5, "patience": 0.5, "unmeasured_s": 60}
    timeouts, fixed = (Timeouts(**known, fixed_s=fixed_s) for fixed_s in (None, 7.0))
    assert (timeouts.round_s, timeouts.late()) == (None, 60)
    assert timeouts.exchange(125_000) == 5 + 60 + 1
    timeouts.exchanged(1000, seconds=1.0)
    timeouts.finished_round(20.0)
    waits = [timeouts.exchange(nbytes) for nbytes in (1000, 2000, 0)]
    assert waits == [5 + 10 + 3, 5 + 10 + 6, 5 + 10 + 3]
    for times, wait_s in ((2, 4 * 18), (2000, 3600)):
        for _ in range(times):
            timeouts.timed_out()
        assert timeouts.exchange(1000) == wait_s
        timeouts.exchanged(1000, seconds=1.0)
        assert timeouts.exchange(1000) == 18
    fixed.timed_out()
    fixed.exchanged(10, seconds=100.0)
    assert fixed.exchange(10**9) == 7.0
    for _ in range(20):  # a slow round is forgotten
        timeouts.finished_round(10.0)
    assert timeouts.round_s == 10
