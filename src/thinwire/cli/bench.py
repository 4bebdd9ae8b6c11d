"""`thinwire bench`."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import rich.table
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console

from thinwire import bench
from thinwire.runs.folder import write_json

__all__ = ["BenchCommand"]

_BENCHES: Mapping[str, Callable[[], bench.BenchReport]] = {
    "simulation": bench.simulation,
    "stacked-simulation": bench.stacked_simulation,
    "round": bench.round,
    "round-memory": bench.round_memory,
    "round-scaling": bench.round_scaling,
    "plain-loop": bench.plain_loop,
    "codecs": bench.codecs,
}

# So that a row of numbers fits into 80 columns.
_NARROW: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


@final
@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure this machine: ratios against a named baseline in the same run."""

    what: tyro.conf.Positional[
        Literal[
            "all",
            "simulation",
            "stacked-simulation",
            "plain-loop",
            "round",
            "round-memory",
            "round-scaling",
            "codecs",
        ]
    ] = "all"
    """Which benchmark."""
    out: Path | None = None
    """Folder for one JSON file per benchmark."""

    def main(self, console: Console) -> None:
        """Run the command."""
        tables: dict[str, rich.table.Table] = {}
        for name in _BENCHES if self.what == "all" else [self.what]:
            report = _BENCHES[name]()
            for table in report.tables():
                _add(tables, table)
            if self.out is not None:
                self.out.mkdir(parents=True, exist_ok=True)
                write_json(self.out / f"{name}.json", _with_context(report))
        for table in tables.values():
            console.print(table)


def _add(tables: dict[str, rich.table.Table], table: bench.BenchTable) -> None:
    shown = tables.setdefault(table.title, rich.table.Table(title=table.title, **_NARROW))
    for heading in table.columns[len(shown.columns) :]:
        shown.add_column(heading, no_wrap=not shown.columns)
    for row in table.rows:
        shown.add_row(*row)


def _with_context(report: bench.BenchReport) -> dict[str, Any]:
    return report.describe() | {
        "command": f"thinwire bench {report.name}",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "thinwire": importlib.metadata.version("thinwire"),
    }
