"""How often and how long a worker tries again."""

import pytest

from thinwire.elastic import retry
from thinwire.errors import ExchangeError


class Clock:
    """What a module sees in the place of time."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def tries(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    return clock, retry.RetryBudget("10.0.0.7", give_up_s=300)


def test_a_newcomer_gives_up_at_its_fourth_failure(tries) -> None:
    _, budget = tries
    for _ in range(3):
        budget.failed_newcomer("form a group", because="no worker connects")
    budget.worked()
    for _ in range(3):
        budget.failed_newcomer("form a group", because="no worker connects")
    with pytest.raises(ExchangeError) as raised:
        budget.failed_newcomer("form a group", because="no worker connects")
    assert raised.value.cannot == "form a group"
    assert raised.value.because == "it failed 4 times: no worker connects"
    assert "the others reach 10.0.0.7" in raised.value.do


@pytest.mark.parametrize("kind", ["failed", "failed_newcomer"])
def test_other_workers_give_up_after_failing_for_too_long(tries, kind: str) -> None:
    clock, budget = tries
    for _ in range(50):
        clock.now_s += 6.0
        budget.failed("form a group", because="no worker connects")
    budget.worked()
    clock.now_s += 1000.0
    getattr(budget, kind)("heal", because="it is gone")  # the first since something worked
    clock.now_s += 300.0
    getattr(budget, kind)("heal", because="it is gone")  # at the limit and not beyond it
    clock.now_s += 0.1
    with pytest.raises(ExchangeError, match="it failed 3 times: it is gone"):
        getattr(budget, kind)("heal", because="it is gone")
