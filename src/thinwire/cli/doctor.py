"""`thinwire doctor`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.address import of_environment
from thinwire.cli.flags import StoreFlags, flag, given_in, read_address
from thinwire.cli.job_flags import Count, Duration, ModelFlags, check_flags
from thinwire.errors import ConfigurationError, check
from thinwire.security.token import optional_token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from thinwire.address import Address
    from thinwire.doctor.machine import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(StoreFlags, ModelFlags):
    """Check this machine and, at an address, its connection to the store of a run.

    With the size of a model it also finds a method that fits the connection.

    $ thinwire doctor
    $ thinwire doctor s3://my-bucket/first
    $ thinwire doctor s3://my-bucket/first --parameters 10B --layers 48
    """

    workers: Count = None
    """K; default the workers of the run and this one, at least 2."""
    step_time: Duration = None
    """Of an inner step, such as 0.8s; default 1s."""

    def main(self, console: Console) -> None:
        """Run the command."""
        given = [name for name in given_in(self) if name not in ("at", "token_file")]
        at = self.at or of_environment()
        check(
            bool(at) or not given,
            f"use {', '.join(map(flag, given))} without an address",
            because="a method is chosen for the connection to a store",
            do="pass the address of a run, or ask thinwire plan about a link that you know",
        )
        from thinwire.cli.advice import show_advice

        address = read_address(at) if at else None
        findings = list(self._findings(address, given))
        console.print(_table(findings))
        for run in (finding.run for finding in findings):
            if run is not None:
                show_advice(console, run.advice, run.job, model=run.model, at=address)
        failed = [finding.name for finding in findings if finding.status == "fail"]
        check(
            not failed,
            "take part in a run from here" if at else "use thinwire here",
            because=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
            do="follow the arrows in the table",
        )

    def _findings(self, address: Address | None, given: Collection[str]) -> Iterator[Finding]:
        from thinwire.doctor.machine import examine, machine_checks
        from thinwire.doctor.method import ExpectedRun
        from thinwire.doctor.store import store_findings

        # The doctor measures or assumes what is not given.
        size = {"model", "parameters", "layers"} & {*given} or {"model"}
        check_flags({*size, "bandwidth", "workers", "step_time"})
        expected = ExpectedRun(
            shape=self.shape(),
            model=self.model,
            workers=self.workers or (address.workers if address else None),
            step_s=self.step_time,
        )
        lacking = "warn" if address is None else "fail"
        for name, examined in machine_checks(lacking=lacking, token_file=self.token_file).items():
            yield examine(name, examined)
        if address is not None:
            # An invalid token is one of the findings above.
            with suppress(ConfigurationError):
                token = optional_token(self.token_file)
                yield from store_findings(address.place, expected, run=address.run, token=token)


def _table(findings: Sequence[Finding]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    what = Column("found, and what to do", overflow="fold")
    table = Table("check", "", what, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for finding in findings:
        said = finding.found + (f"\n-> {finding.do}" if finding.do else "")
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(finding.name, status, Text(said))
    return table
