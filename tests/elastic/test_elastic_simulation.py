"""Whole sessions over a store in memory, under one scheduler with a virtual clock."""

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from elastic_simulation import Fault, Setup, Simulation, Violation, play
from thinwire.elastic.group import StoreGroup
from thinwire.transport.object_store import ObjectStore
from virtual_time import StoreFaults

pytestmark = pytest.mark.usefixtures("quiet")

SCHEDULES = int(os.environ.get("THINWIRE_SCHEDULES", "100000"))
STARTS = [0, 50, 100, *range(1000, SCHEDULES + 1, 1000)]


def failures(seeds, **changes) -> dict[int, Exception]:
    errors = {seed: play(seed, **changes)[1] for seed in seeds}
    return {seed: error for seed, error in errors.items() if error is not None}


@pytest.mark.timeout(3600)
@pytest.mark.slow_cases(but=("0-", "50-"))
@pytest.mark.parametrize(("first", "after"), list(pairwise(STARTS)))
def test_whatever_happens_workers_agree_and_end(first: int, after: int) -> None:
    assert failures(range(first, after)) == {}


# Each of these once did not end, or ended apart, too early or without a worker that had a way.
@pytest.mark.parametrize("seed", [389, 567, 589, 1577, 500_014, 1_000_803, 1_001_325, 2_110_331])
def test_a_schedule_that_once_failed(seed: int) -> None:
    assert failures([seed]) == {}


# Three rounds of workers of one rank, which nothing goes wrong in.
PLAIN: dict[str, Any] = {
    **{"rounds": 3, "left_over": 0, "fragments": 1, "ranks": 1, "kind": "gather"},
    **{"spread": 0.05, "floor_s": 5.0, "snapshot_after": 4.0, "checkpoints": 0.0, "late": 0.0},
    **{"is_sealed": False, "store": StoreFaults(latency_s=0.03), "faults": []},
}


@pytest.mark.parametrize("killed_s", [0.0, 30.0])
def test_a_newcomer_waits_for_the_end_of_a_first_round_of_any_length(killed_s: float) -> None:
    """Nobody knows yet how long a round takes; one that comes in it, or again, waits for it."""
    faults = [Fault(kind="kill", slot=0, at_s=killed_s, for_s=1.0, back="empty")]
    changes = {"starts_s": (0.5, 0.0, 40.0), "min_workers": 1, "train_s": 400.0}
    changes |= {"faults": faults if killed_s else []}
    simulation, error = play(0, **PLAIN | changes)
    assert error is None
    rolls = simulation.checks.rolls
    assert [(roll.phase, roll.position.version) for roll in rolls] == [
        *(("join", 0), ("round", 0), ("round", 1), ("round", 2)),
        ("done", 3),
    ]
    assert [len(roll.names) for roll in rolls] == [2, 3, 3, 3, 0]
    assert waits(simulation, "w0") == (["round 0: waits for w1 to end the round"] * (killed_s > 0))
    assert waits(simulation, "w1") == []
    assert waits(simulation, "w2") == ["round 0: waits for w0 w1 to end the round"]


def waits(simulation: Simulation, identity: str) -> list[str]:
    shards = [life.ranks[0].shard for life in simulation.lives if life.identity == identity]
    events = [event for shard in shards for event in shard.events.events]
    return [str(event) for event in events if event.kind == "waits for"]


def test_a_worker_says_that_min_workers_is_what_it_waits_for() -> None:
    simulation, error = play(3, **PLAIN, starts_s=(0.0, 60.0), min_workers=2, train_s=5.0)
    assert error is None
    assert waits(simulation, "w0") == ["round 0: waits for 1 more of min_workers=2"]
    assert waits(simulation, "w1") == []


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_round_waits_for_a_slower_worker_as_long_as_the_others_do(seed: int) -> None:
    """Of a round of 200 s, 100 s: more than the 20 s that are assumed before one is measured."""
    changes = {"starts_s": (0.5, 0.0), "train_s": 200.0, "spread": 0.4, "min_workers": 1}
    simulation, error = play(seed, **PLAIN | changes)
    assert error is None
    assert [len(roll.names) for roll in simulation.checks.rolls] == [2, 2, 2, 2, 0]


def test_a_checkpoint_of_an_earlier_roll_goes_on_where_that_roll_began() -> None:
    changes = {"kind": "scatter", "fragments": 2, "late": 0.3, "late_s": 20.0, "rounds": 4}
    assert failures([399], ranks=1, train_s=0.5, **changes) == {}


def test_damaged_reads_undo_nothing_that_counted() -> None:
    for seed in range(12):
        store = replace(Setup.drawn(seed).store, damaged=0.05)
        assert failures([seed], store=store, is_sealed=bool(seed % 2)) == {}


def test_an_object_that_the_store_loses_does_not_set_workers_apart() -> None:
    for seed in range(15):
        setup = Setup.drawn(seed)
        at_s = 5.0 + seed % 7 * setup.train_s / 2
        losing = [Fault(kind="lose", slot=-1, at_s=at_s + n) for n in range(3)]
        assert failures([seed], faults=[*setup.faults, *losing]) == {}


def test_a_store_that_fails_half_of_the_time_and_lists_late_ends_no_worker() -> None:
    for seed in range(4):
        store = replace(Setup.drawn(seed).store, lost=0.4, unanswered=0.1, listing_lag_s=5.0)
        assert failures([seed], store=store) == {}


def test_the_same_seed_replays_the_same_schedule() -> None:
    one, two = (play(17, trace=True)[0].lines for _ in range(2))
    assert one == two
    assert len(one) > 10


def test_a_store_that_ignores_put_if_absent_is_named_and_found(monkeypatch) -> None:
    assert "despite If-None-Match" in str(play(0, has_put_if_absent=False)[1])

    async def passes(self, key: str, until_s: float) -> None:
        pass

    monkeypatch.setattr(ObjectStore, "check_put_if_absent", passes)
    errors = (play(seed, has_put_if_absent=False)[1] for seed in range(20))
    assert any(isinstance(error, Violation) for error in errors)


def test_a_message_that_counts_though_it_came_too_late_is_found(monkeypatch) -> None:
    put = StoreGroup._put

    async def counts_late(self, *args) -> bool:
        await put(self, *args)
        return True

    monkeypatch.setattr(StoreGroup, "_put", counts_late)
    errors = (play(seed, late=0.3)[1] for seed in range(45, 110))
    assert any(" steps from " in str(error) for error in errors)
