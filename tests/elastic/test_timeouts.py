"""How long an elastic worker waits."""

import pytest

from thinwire.elastic.timeouts import Timeouts


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
