"""`thinwire report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import tyro
from rich.console import Console

from thinwire import report

__all__ = ["Report"]


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """Turn run folders into one HTML file that opens without a network."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Of runs, or of folders that hold some, such as those of `thinwire compare`."""
    out: Path = Path("report.html")
    """The page; a file that exists is replaced."""

    def main(self, console: Console) -> None:
        """Run the command."""
        report.plotly_source()  # before anything is read for a page that cannot be
        evidence = report.gather_evidence(self.folders)
        page = report.run_page(evidence, self.folders, self.out)
        report.write_page(page, self.out)
        runs = sum(len(arm.runs) for arm in evidence.arms)

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        for found in evidence.left_out:
            say(f"left out {found.folder}: {found.reason}")
        say(f"wrote {self.out}: {len(evidence.arms)} methods, {runs} runs")
