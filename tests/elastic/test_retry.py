"""How often and how long a worker tries again."""

import pytest

from thinwire.elastic import timeouts as retry
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
        budget.failed("form a group", because="no worker connects", newcomer=True)
    budget.worked()
    for _ in range(3):
        budget.failed("form a group", because="no worker connects", newcomer=True)
    with pytest.raises(ExchangeError) as raised:
        budget.failed("form a group", because="no worker connects", newcomer=True)
    assert raised.value.cannot == "form a group"
    assert raised.value.because == "it failed 4 times: no worker connects"
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
