"""What grows with the number of workers grows no faster than it must."""

import asyncio
import gc
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest

import elastic_simulation
from elastic_simulation import SYNC_EVERY, Fault, Setup, Simulation
from thinwire.elastic import timeouts
from thinwire.elastic.alive import FEW, LostWorkers
from thinwire.elastic.group import StoreGroup
from thinwire.elastic.roll import View, WorkerReport, next_roll
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.timeouts import Timeouts
from thinwire.membership import Progress, Replay, RoundRecord
from thinwire.transport.object_store import ObjectStore, now_s, together
from virtual_time import StoreFaults, VirtualLoop, VirtualStore

pytestmark = pytest.mark.usefixtures("quiet")

RUN = "run/"


class Watched(Simulation):
    """Counts requests by kind and place, and remembers what was written."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.asked = Counter[tuple[str, str]]()
        self.written: dict[str, bytes] = {}
        for kind in ("get_async", "list"):
            setattr(self.store, kind, self._counted(kind, getattr(self.store, kind)))

    def _counted(self, kind, ask):
        def counted(store, key, **options):
            self.asked[kind, key.split("/")[1]] += 1
            return ask(store, key, **options)

        return counted

    def _wrote(self, key: str, raw: bytes) -> None:
        self.written[key] = raw
        super()._wrote(key, raw)

    def objects(self, area: str) -> dict[str, bytes]:
        """What was written last below `area`, without checksums."""
        found = {key: raw[:-4] for key, raw in self.written.items() if key.startswith(RUN + area)}
        assert found
        return found


def run_of(workers: int, **changes) -> Watched:
    setup = Setup(
        **{"seed": workers, "rounds": 2, "left_over": 0, "fragments": 1, "kind": "gather"},
        **{"min_workers": 1, "train_s": 20.0, "spread": 0.1, "floor_s": 10.0, "checkpoints": 0.0},
        starts_s=[0.01 * n for n in range(workers)],
        snapshot_after=4.0,
        store=StoreFaults(latency_s=0.02),
    )
    simulation = Watched(replace(setup, **changes))
    simulation.run()
    return simulation


@pytest.fixture(name="many", scope="module")
def many_fixture() -> Watched:
    return run_of(3 * FEW)


def test_a_report_does_not_grow_with_the_number_of_workers(many) -> None:
    lengths = [max(map(len, run.objects("call/00000003").values())) for run in (run_of(2), many)]
    assert lengths[1] < lengths[0] + 20


def test_a_roll_has_a_name_of_each_worker_and_nothing_else(many) -> None:
    names = 3 * FEW * len('"w00:00000001", ')
    short, raw = run_of(2).objects("roll/00000003"), many.objects("roll/00000003")
    assert len(*raw.values()) < len(*short.values()) + names


def test_one_worker_lists_the_reports_and_reads_none_that_says_what_its_own_does(many) -> None:
    rolls, others = len(many.checks.rolls), 3 * FEW - 1
    # Before the first roll all are read.
    assert others <= many.asked["get_async", "call"] < others + rolls
    assert many.asked["list", "call"] < rolls * others


def test_a_round_that_is_replayed_has_the_names_that_counted(monkeypatch) -> None:
    """Reports and rolls tell who did not count, and by rank."""
    replayed = list[RoundRecord]()

    class Noting(elastic_simulation.Worker):
        def replay(self, missed: Replay) -> None:
            replayed.extend(missed.records)
            super().replay(missed)

    monkeypatch.setattr(elastic_simulation, "Worker", Noting)
    run = run_of(4, rounds=4, starts_s=[0.0, 0.1, 30.0, 75.0], snapshot_after=100.0)
    began = {roll.position.version: roll.names for roll in run.checks.rolls}
    uncounted = [record.facts["left_out"] for record in replayed]
    assert [] in uncounted
    assert [2] in uncounted
    for record, left_out in zip(replayed, uncounted, strict=True):
        names = enumerate(began[record.version - 1])
        assert record.facts["counted"] == [name for rank, name in names if rank not in left_out]


def test_a_newcomer_goes_on_after_many_dead_workers_within_minutes(monkeypatch) -> None:
    # However long an exchange of theirs may have taken.
    monkeypatch.setattr(timeouts, "SLOWEST_BYTES_PER_S", 1e-3)
    kill = Fault(kind="kill", slot=-1, at_s=50.0, back="never")
    workers = 3 * FEW
    starts_s = [*(0.01 * n for n in range(workers)), 60.0]
    run = run_of(workers, starts_s=starts_s, faults=[kill], rounds=4)
    assert run.checks.rolls[-1].is_over
    assert run.loop.time() < 180


def test_no_round_is_lost_by_workers_that_die_in_an_exchange(monkeypatch) -> None:
    stood_in, of_lost = list[int](), StoreGroup._of_lost

    async def noting(self, *args):
        stood_in.append(args[-1])
        return await of_lost(self, *args)

    class Dying(elastic_simulation.Worker):
        def _send(self, fragment) -> None:
            super()._send(fragment)
            if self.step == 2 * SYNC_EVERY and self.name[1] in "37":
                dies = partial(
                    self.simulation._strike,
                    Fault(kind="kill", slot=int(self.name[1]), back="never"),
                )
                self.simulation.loop.call_later(0.05, dies)

    monkeypatch.setattr(StoreGroup, "_of_lost", noting)
    monkeypatch.setattr(elastic_simulation, "Worker", Dying)
    # Each would double the wait for a slow worker, until a round without any loss.
    monkeypatch.setattr(Timeouts, "timed_out", lambda self: pytest.fail("it was no timeout"))
    run = run_of(8, kind="scatter", rounds=4, spread=0.0)
    assert [roll.position.version for roll in run.checks.rolls] == [0, *range(5)]
    assert len(run.checks.rolls[-2].names) == 6
    # By two workers, and not by all six.
    assert sorted(stood_in) == [3, 7]


def test_a_worker_that_an_exchange_waited_for_is_not_waited_for_again(monkeypatch) -> None:
    class Dying(elastic_simulation.Worker):
        def _send(self, fragment) -> None:
            if self.name.startswith("w2") and self.step == 2 * SYNC_EVERY:
                self.simulation._strike(Fault(kind="kill", slot=2, back="never"))
            super()._send(fragment)  # which gets no further

    monkeypatch.setattr(elastic_simulation, "Worker", Dying)
    run = run_of(3, rounds=4, spread=0.0)
    written_s = [s for key, s in run.store.written_s.items() if key.startswith(RUN + "roll/")]
    usual_s, *_, longest_s = sorted(b - a for a, b in pairwise(written_s))[1:]
    assert 10 < longest_s - usual_s < 14
    assert len(run.checks.rolls[-2].names) == 2


def test_signs_of_life_are_looked_up_for_a_few_of_many_missing_workers(request) -> None:
    loop = VirtualLoop(Random(1))
    request.addfinalizer(loop.close)
    store, names = ObjectStore("memory://"), [f"w{n}:1" for n in range(4 * FEW)]
    store._obstore = virtual = VirtualStore(loop, Random(2), StoreFaults(), lambda key, raw: None)
    lost = LostWorkers(RunObjects(store, "run", None), 10.0)

    async def look() -> None:
        await lost.first_of(names)
        assert virtual.requests == FEW
        # All of the first few are lost, so that the others may be, too.
        for there in (names[:FEW], names):
            for _ in range(5):
                await lost.first_of(names)
                await asyncio.sleep(2.0)
            assert await lost.first_of(names) == set(there)

    loop.run_until_complete(look())


def test_few_requests_are_made_at_once() -> None:
    running = most = 0

    async def one(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if number == 900:
            raise ValueError
        return number

    assert asyncio.run(together(*map(one, range(900)))) == list(range(900))
    assert most == 64
    # What was not begun is closed: else a warning ends this test.
    with pytest.raises(ValueError):
        asyncio.run(together(*map(one, range(2000))))
    gc.collect()


def test_a_listing_of_a_thousand_names_is_one_request() -> None:
    store = ObjectStore("memory://")

    async def listed() -> int:
        until_s = now_s() + 10
        for number in range(1001):
            await store.put(f"a/{number}", [memoryview(b"a")], until_s, lambda _: True)
        return len(await store.sizes("a/", until_s))

    assert asyncio.run(listed()) == 1001
    assert store.requests.lists == 2


def test_a_roll_of_twenty_thousand_workers_is_concluded_at_once() -> None:
    at = Progress(version=1, step=2, digest="ab")
    calls = [WorkerReport(name=f"{n:05}:1", phase="round", position=at) for n in range(20_000)]
    before = View(number=1, names=tuple(call.name for call in calls), phase="round", position=at)
    began_s = time.process_time()
    roll = next_roll(before, calls, me=calls[0].name, min_workers=1, largest_log=1)
    assert roll is not None
    assert roll.names == before.names
    assert time.process_time() - began_s < 1
