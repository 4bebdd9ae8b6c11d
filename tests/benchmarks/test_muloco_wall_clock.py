"""MuLoCo's wall-clock: some of its rows, against the paper and an equation."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("rate", "method"), [(10, "MuLoCo K=1"), (10, "DiLoCo K=16"), (6400, "MuLoCo K=16")]
)
def test_published_hours(monkeypatch, rate: int, method: str) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import muloco_wall_clock as clock

    row = clock.row(rate, method, clock.PUBLISHED_H[rate][method])
    assert abs(row["off"]) <= clock.AT_MOST
    assert row["hours"] == pytest.approx(row["closed_form_hours"], rel=1e-9)
