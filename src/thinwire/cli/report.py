"""`thinwire report`."""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import Switch
from thinwire.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from thinwire.report import ReportData
    from thinwire.runs.status import RunStatus

_PERIOD_S = 3.0


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Turn run folders into one HTML file that opens without a network.

    - with --watch an open page loads again with each record, until all runs have ended, until
      Ctrl-C, or until half a minute after the process of a comparison is gone
    - a killed run of thinwire train may resume, so --watch waits for it

    $ thinwire report runs/mine --out mine.html
    $ thinwire report runs/mine --out mine.html --watch
    """

    folders: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FOLDER...", help_behavior_hint="(required)"),
    ]
    """Folders of runs, or folders that contain some, such as those of thinwire compare."""
    out: Path = Path("report.html")
    """The page; an existing file is replaced."""
    watch: Switch = False
    """Write the page again while its runs continue."""

    def main(self, console: Console) -> None:
        """Run the command."""
        if self.watch:
            with suppress(KeyboardInterrupt):
                self._follow(console)
        # Without the script that loads it again: nothing writes it after this.
        data = self._write({}, refresh_s=None)
        for folder, status in data.left_out.items():
            say(console, f"left out {folder}: {status}")
        runs = sum(len(variant.runs) for variant in data.variants)
        say(console, f"wrote {self.out}: {len(data.variants)} methods, {runs} runs")

    def _follow(self, console: Console) -> None:
        """Write the page whenever its runs have come further, until all have ended."""
        from thinwire.runs.find import find_planned_runs, is_over

        for folder in self.folders:
            if not folder.exists():  # it may be mistyped, or its comparison about to begin
                say(console, f"{folder} does not exist yet: waiting for it")
        shown: Mapping[Path, RunStatus] | None = None
        while not is_over(self.folders):
            begun_s = time.monotonic()
            found = find_planned_runs(self.folders)
            if found != shown:
                self._write(found, refresh_s=_PERIOD_S)
                if shown is None:
                    where = self.out.absolute().as_uri()
                    say(console, f"open {where} in a browser; Ctrl-C ends this, not the runs")
                shown = found
            # Of many runs a page takes seconds: no more than a quarter of a core, which they need.
            time.sleep(max(_PERIOD_S, 3 * (time.monotonic() - begun_s)))

    def _write(self, found: Mapping[Path, RunStatus], refresh_s: float | None) -> ReportData:
        from thinwire import report

        data = report.read_report_data(self.folders, may_be_empty=self.watch)
        # Also what has not begun: it says how much is to come.
        unfinished = {folder: status for folder, status in found.items() if status.run is None}
        data = dataclasses.replace(data, left_out={**unfinished, **data.left_out})
        report.write_page(report.run_page(data, refresh_s=refresh_s), self.out)
        return data
