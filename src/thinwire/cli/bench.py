"""`thinwire bench`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console

    from thinwire import bench


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure this machine: ratios against a named baseline in the same run.

    thinwire bench codecs --out results
    """

    what: tyro.conf.Positional[
        Literal[
            "all",
            "simulation",
            "plain-loop",
            "muon",
            "round",
            "round-memory",
            "round-scaling",
            "codecs",
            "gpu-kernels",
        ]
    ] = "all"
    """Which benchmark; all of them are without gpu-kernels where no GPU has any."""
    out: Path | None = None
    """Folder for one JSON file per benchmark."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire import bench
        from thinwire.runs.folder import write_json

        benches = {
            "simulation": bench.simulation,
            "plain-loop": bench.plain_loop,
            "muon": bench.muon,
            "round": bench.round,
            "round-memory": bench.round_memory,
            "round-scaling": bench.round_scaling,
            "codecs": bench.codecs,
            "gpu-kernels": bench.gpu_kernels,
        }
        tables: dict[str, rich.table.Table] = {}
        for name in _here(benches) if self.what == "all" else [self.what]:
            report = benches[name]()
            for table in report.tables():
                _add(tables, table)
            if self.out is not None:
                self.out.mkdir(parents=True, exist_ok=True)
                write_json(self.out / f"{name}.json", _with_context(report))
        for table in tables.values():
            console.print(table)


def _here(names: Iterable[str]) -> list[str]:
    """Those of the benchmarks that this machine has what it takes for."""
    import torch

    from thinwire.codecs.kernels import kernel_backend

    has_kernels = torch.cuda.is_available() and kernel_backend(torch.device("cuda")) != "torch"
    return [name for name in names if name != "gpu-kernels" or has_kernels]


def _add(tables: dict[str, rich.table.Table], table: bench.BenchTable) -> None:
    if table.title not in tables:
        tables[table.title] = _empty(table.title)
    shown = tables[table.title]
    for heading in table.columns[len(shown.columns) :]:
        shown.add_column(heading, no_wrap=not shown.columns)
    for row in table.rows:
        shown.add_row(*row)


def _empty(title: str) -> rich.table.Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # So that a row of numbers fits into 80 columns.
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _with_context(report: bench.BenchReport) -> dict[str, Any]:
    import importlib.metadata
    import platform

    return report.describe() | {
        "command": f"thinwire bench {report.name}",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "thinwire": importlib.metadata.version("thinwire"),
    }
