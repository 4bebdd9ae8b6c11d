"""The table on paper: what is committed is what is computed, and the page has it."""

import json
from pathlib import Path

import pytest

import internet_scale
from internet_scale import EXCHANGES, PARAMETERS, WORKERS, cells, row

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/internet-scale.json").read_text())["runs"]


def test_the_page_and_the_committed_file_have_what_is_computed() -> None:
    found = [(e, row(e, k, p)) for e in EXCHANGES for k in WORKERS for p in PARAMETERS]
    assert [run for (run,) in COMMITTED.values()] == [each for _, each in found]
    table = (ROOT / "docs/scaling.md").read_text().partition("s to heal | lost a day")[2]
    lines = [line.strip("| ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(lines) == 8
    assert {*lines} <= {cells(exchange, each).strip("| ") for exchange, each in found}


def test_what_is_lost_heals_and_what_leaves_the_store_is_paid(monkeypatch) -> None:
    before = row("reduce-scatter", 64, 10**9)
    monkeypatch.setattr(internet_scale, "LOST_PER_HOUR", 0.0)
    monkeypatch.setattr(internet_scale, "EGRESS_PER_GB", 0.18)
    after = row("reduce-scatter", 64, 10**9)
    assert after["utilisation"] > before["utilisation"]
    down_gb = 64 * after["down_bytes"] * 86400 / (1000 + after["moved_s"]) / 1e9
    assert after["dollars_a_day_for_egress"] == pytest.approx(0.18 * down_gb, rel=1e-2)
    assert 0.0 < before["dollars_a_day_for_requests"] < before["dollars_a_day_for_egress"]
