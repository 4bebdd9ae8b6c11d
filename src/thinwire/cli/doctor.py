"""`thinwire doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from thinwire.elastic.token import Token, find_token
from thinwire.errors import ConfigurationError
from thinwire.transport.address import split_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from thinwire.doctor import Finding

__all__ = ["DoctorCommand"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@final
@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check this machine, and the network to a run, before taking part in it."""

    elastic: str | None = None
    """HOST:PORT that thinwire lighthouse printed; without it only this machine is checked."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""

    def main(self, console: Console) -> None:
        """Run the command."""
        findings = list(self._findings())
        console.print(_table(findings))
        failed = [finding.name for finding in findings if finding.status == "fail"]
        if failed:
            raise ConfigurationError(
                "take part in a run from here" if self.elastic else "use thinwire here",
                because=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
                do="follow the arrows in the table",
            )

    def _findings(self) -> Iterator[Finding]:
        if self.elastic is not None:
            split_address(self.elastic)
        from thinwire.doctor import examine, machine_checks, network_findings

        lacking = "warn" if self.elastic is None else "fail"
        for name, check in machine_checks(lacking=lacking, token_file=self.token_file).items():
            yield examine(name, check)
        if self.elastic is not None:
            yield from network_findings(self.elastic, self._token())

    def _token(self) -> Token | None:
        try:
            return find_token(self.token_file)
        except ConfigurationError:
            return None  # the check called token says so


def _table(findings: Sequence[Finding]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        said = finding.found + (f"\n-> {finding.do}" if finding.do else "")
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(finding.name, status, Text(said))
    return table
