"""The scaling benchmark: its simulation of workers that differ, against that of the planner."""

from pathlib import Path

import pytest

from thinwire.plan.simulate import simulate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scaling

    return scaling


def alike(scaling, monkeypatch) -> None:
    monkeypatch.setattr(scaling, "SIGMA", 0.0)
    monkeypatch.setattr(scaling, "SLOW_SHARE", 0.0)


def run(scaling, kind: str, workers: int = 8, *, waited_for: float = 1.0, seed: int = 0):
    sent = scaling.EXCHANGES[kind]("muloco:bits=2", workers)
    found = scaling.Stragglers(sent, waited_for=waited_for, seed=seed)
    found.train()
    return sent, found


@pytest.mark.parametrize("kind", ["gather", "reduce-scatter", "pairs"])
def test_without_stragglers_it_is_the_planner_s(scaling, monkeypatch, kind: str) -> None:
    alike(scaling, monkeypatch)
    for waited_for in (1.0, 0.5):
        sent, found = run(scaling, kind, waited_for=waited_for)
        planned = simulate(scaling.scenario_of(sent), steps=scaling.ROUNDS * scaling.EVERY)
        assert found.worth == pytest.approx(planned.utilisation, rel=1e-9)
        assert found.limit == planned.limit
        assert found.lost_s["latency"] / 8 == pytest.approx(planned.seconds.latency_s, rel=1e-9)
        assert found.lost_s["slowest worker"] == 0


def test_all_wait_for_the_slowest_unless_a_share_is_enough(scaling, monkeypatch) -> None:
    _, waits = run(scaling, "gather", 16)
    _, leaves = run(scaling, "gather", 16, waited_for=0.75)
    assert leaves.worth > waits.worth
    assert leaves.lost_s["slowest worker"] < waits.lost_s["slowest worker"]
    assert leaves.worker_steps < waits.worker_steps == 16 * scaling.ROUNDS * scaling.EVERY
    alike(scaling, monkeypatch)
    assert run(scaling, "gather", 16)[1].worth > waits.worth


def test_pairs_wait_for_each_other_only(scaling) -> None:
    def slowest(kind: str) -> float:
        return run(scaling, kind, 32)[1].lost_s["slowest worker"]

    assert 0 < slowest("pairs") < slowest("gather")


def test_a_seed_gives_a_run(scaling) -> None:
    one, again, other = (run(scaling, "pairs", 16, seed=seed)[1].worth for seed in (1, 1, 2))
    assert one == again != other
