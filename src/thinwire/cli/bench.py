"""`thinwire bench`."""

import importlib.metadata
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import tyro
from rich.console import Console
from rich.table import Table

from thinwire import bench
from thinwire.train.run_folder import write_json

__all__ = ["Bench"]

_BENCHES = {"simulation": bench.simulation, "outer-step": bench.outer_step}


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure this machine: ratios against a named baseline in the same run."""

    what: tyro.conf.Positional[Literal["all", "simulation", "outer-step"]] = "all"
    """Which benchmark."""
    out: Path | None = None
    """Folder for one JSON file per benchmark."""

    def main(self, console: Console) -> None:
        """Run the command."""
        table = Table(title="speed against a baseline, median of paired repetitions")
        for column in ("benchmark", "ours", "baseline", "ratio", "ours ms", "baseline ms"):
            table.add_column(column)
        for name in _BENCHES if self.what == "all" else [self.what]:
            result = _BENCHES[name]()
            table.add_row(*_row(result))
            if self.out is not None:
                self.out.mkdir(parents=True, exist_ok=True)
                write_json(self.out / f"{name}.json", _with_context(result))
        console.print(table)


def _row(result: bench.Result) -> list[str]:
    ours_ms, baseline_ms = (
        f"{1000 * statistics.median(s):.1f}" for s in (result.ours_s, result.baseline_s)
    )
    ratio = f"{result.speed_ratio:.2f}"
    return [result.name, result.ours, result.baseline, ratio, ours_ms, baseline_ms]


def _with_context(result: bench.Result) -> dict[str, Any]:
    return asdict(result) | {
        "speed_ratio": result.speed_ratio,
        "command": f"thinwire bench {result.name}",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "thinwire": importlib.metadata.version("thinwire"),
    }
