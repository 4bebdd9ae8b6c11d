"""`thinwire doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import tyro

from thinwire.cli.tickets import address_in
from thinwire.errors import ConfigurationError
from thinwire.security.token import Token, find_token
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

    where: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET")] = None
    """Ticket that thinwire lighthouse printed, in quotes, or HOST:PORT; without it only this
    machine is checked."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""

    def main(self, console: Console) -> None:
        """Run the command."""
        address = None if self.where is None else address_in(self.where)
        findings = list(self._findings(address))
        console.print(_table(findings))
        failed = [finding.name for finding in findings if finding.status == "fail"]
        if failed:
            raise ConfigurationError(
                "take part in a run from here" if address else "use thinwire here",
                because=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
                do="follow the arrows in the table",
            )

    def _findings(self, address: str | None) -> Iterator[Finding]:
        if address is not None:
            split_address(address)
        from thinwire.doctor import examine, machine_checks, network_findings

        lacking = "warn" if address is None else "fail"
        for name, check in machine_checks(lacking=lacking, token_file=self.token_file).items():
            yield examine(name, check)
        if address is not None:
            yield from network_findings(address, self._token())

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
