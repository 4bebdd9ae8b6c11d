"""`thinwire report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import tyro

from thinwire.cli.output import say

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ReportCommand"]


@final
@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Turn run folders into one HTML file that opens without a network.

    thinwire report runs/mine --out mine.html
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Of runs, or of folders that hold some, such as those of thinwire compare."""
    out: Path = Path("report.html")
    """The page; a file that exists is replaced."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire import report

        data = report.read_report_data(self.folders)
        page = report.run_page(data, self.folders, self.out)
        report.write_page(page, self.out)
        runs = sum(len(variant.runs) for variant in data.variants)

        for folder, status in data.left_out.items():
            say(console, f"left out {folder}: {status}")
        say(console, f"wrote {self.out}: {len(data.variants)} methods, {runs} runs")
