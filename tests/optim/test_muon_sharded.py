"""Muon on sharded parameters: what the unsharded optimizer gives, to the bit."""

import pytest

from processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        ("fsdp,tp,placements_1d,shares,refusals", 2),
        ("fsdp,placements_1d,shares,placements_2d,fsdp_tp", 4),
    ],
)
def test_sharded_as_whole(cases: str, ranks: int) -> None:
    for process in run_ranks(cases, ranks, script="muon_ranks.py"):
        assert process.returncode == 0, process.stderr
        assert process.stdout.split() == cases.split(",")
