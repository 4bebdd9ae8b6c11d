"""The table of tiers: its lines name what exists, and of several the longest decides."""

from pathlib import Path

import pytest

import tiers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("line", tiers.TIER_OF)
def test_a_line_of_the_table_names_what_exists(line: str) -> None:
    place, _, name = line.partition("::")
    path = ROOT / place if place.startswith("src/") else ROOT / "tests" / place
    assert path.exists()
    assert not name or name.partition("[")[0].removeprefix("Test") in path.read_text()


def test_the_longest_line_decides(monkeypatch) -> None:
    table = {"a": "core", "a/test_b.py": "slow", "a/test_b.py::test_c[1]": "core", "src/d": "slow"}
    monkeypatch.setattr(tiers, "TIER_OF", table)
    expected = {
        "tests/a/test_a.py::test_c": "core",
        "tests/a/test_b.py::test_d": "slow",
        "tests/a/test_b.py::test_c[1]": "core",
        "tests/test_a.py::test_c": "fast",
        "src/d/e.py::d.e": "slow",
    }
    assert {test: tiers.of(test) for test in expected} == expected


def test_tests_are_marked_by_the_table(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        tier = tiers.of(item.nodeid)
        assert {mark.name for mark in item.iter_markers() if mark.name in ("core", "slow")} == (
            {tier} - {"fast"}
        )
