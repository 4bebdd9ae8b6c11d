"""How long an elastic worker waits, and how often it tries again."""

import pytest

from thinwire.elastic import timeouts as timeouts_module
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError


def made(fixed_s: float | None = None) -> Timeouts:
    return Timeouts(floor_s=5, patience=0.5, unmeasured_s=60, fixed_s=fixed_s)


def test_waits_double_until_an_exchange_succeeds() -> None:
    timeouts = made()
    assert timeouts.exchange(125_000) == 5 + 60 + 1
    timeouts.exchanged(1000, seconds=1.0)
    timeouts.finished_round(20.0)
    assert timeouts.exchange(1000) == 5 + 10 + 3
    assert timeouts.exchange(2000) == 5 + 10 + 6
    assert timeouts.exchange(0) == 5 + 10 + 3
    timeouts.timed_out()
    timeouts.timed_out()
    assert timeouts.exchange(1000) == 4 * 18
    timeouts.exchanged(1000, seconds=1.0)
    assert timeouts.exchange(1000) == 18
    for _ in range(2000):
        timeouts.timed_out()
    assert timeouts.exchange(1000) == 3600
    fixed, timeouts = made(fixed_s=7.0), made()
    fixed.timed_out()
    fixed.exchanged(10, seconds=100.0)
    assert fixed.exchange(10**9) == 7.0
    assert (timeouts.round_s, timeouts.late()) == (None, 60)
    timeouts.finished_round(1000.0)
    assert timeouts.late() == pytest.approx(500)
    for _ in range(20):  # a slow round is forgotten
        timeouts.finished_round(10.0)
    assert timeouts.round_s == 10


class Clock:
    """What a module sees in the place of time."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def tries(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timeouts_module, "time", clock)
    return clock, timeouts_module.RetryBudget("10.0.0.7", give_up_s=300)


def test_a_newcomer_gives_up_at_its_fourth_failure(tries) -> None:
    def fail() -> None:
        tries[1].failed("form a group", because="no worker connects", newcomer=True)

    for _ in range(3):
        fail()
    tries[1].worked()
    for _ in range(3):
        fail()
    with pytest.raises(ExchangeError) as raised:
        fail()
    assert raised.value.because == "it failed 4 times: no worker connects"
    assert raised.value.cannot == "form a group"
    assert "the others reach 10.0.0.7" in raised.value.do


@pytest.mark.parametrize("newcomer", [False, True])
def test_other_workers_give_up_after_failing_for_too_long(tries, newcomer: bool) -> None:
    clock, budget = tries
    for _ in range(50):
        clock.now_s += 6.0
        budget.failed("form a group", because="no worker connects")
    budget.worked()
    clock.now_s += 1000.0
    budget.failed("heal", because="it is gone", newcomer=newcomer)
    clock.now_s += 300.0
    budget.failed("heal", because="it is gone", newcomer=newcomer)
    clock.now_s += 0.1
    with pytest.raises(ExchangeError, match="it failed 3 times: it is gone"):
        budget.failed("heal", because="it is gone", newcomer=newcomer)
