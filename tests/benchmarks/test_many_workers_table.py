"""The committed table of many workers: docs/scaling.md has what its file says."""

import json
from pathlib import Path

from many_workers import CASES, case_name, cells

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/many-workers.json").read_text())["runs"]


def test_the_table_is_what_was_run() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    shown = [line for line in lines if " kB | " in line]
    rows = [(kind, churn, COMMITTED[case_name(kind, k, churn)][0]) for kind, k, churn in CASES]
    assert shown == [f"| {cells(*row)} |" for row in rows]
    # One report of many that say the same is read, also among a thousand.
    assert max(row["meeting_bytes"]["most"] for _, churn, row in rows if not churn) < 100_000
