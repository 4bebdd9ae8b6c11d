"""`thinwire doctor`."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import Option, arg, flag, given_in, optional_token, read_address, read_flag
from thinwire.cli.job_flags import check_flags
from thinwire.errors import ConfigurationError
from thinwire.plan.units import parse_count, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from thinwire.address import Address
    from thinwire.doctor import ExpectedRun, Finding

_OF_THE_MODEL = ("parameters", "layers", "model")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check this machine, and the way to a store in which workers meet, before a run.

    $ thinwire doctor
    $ thinwire doctor s3://my-bucket/first
    $ thinwire doctor s3://my-bucket/first --parameters 10B --layers 48
    """

    at: Annotated[str | None, tyro.conf.Positional, arg(metavar="[ADDRESS]")] = None
    """Of a run: does its method fit the way to the store? Default this machine alone."""
    token_file: Option[Path] = None
    """Holds the run's token; default THINWIRE_TOKEN."""
    parameters: Option[str] = None
    """N, such as 350M or 10B, for which a method is looked for; default that of the run there."""
    layers: Option[str] = None
    """L: layers of the stack; with --parameters."""
    model: Option[str] = None
    """In place of both: a built-in size (250k to 15b), a config.json, or a hub name in cache."""
    workers: Option[str] = None
    """K; default those there and this one, at least 2."""
    step_time: Option[str] = None
    """Of an inner step, such as 0.8s; default 1s."""

    def main(self, console: Console) -> None:
        """Run the command."""
        given = given_in(self)
        flags = [flag(name) for name in given if name not in ("at", "token_file")]
        if flags and self.at is None:
            raise ConfigurationError(
                f"use {', '.join(flags)} without an address",
                because="a method is looked for by the way to the store in which workers meet",
                do="pass the address of a run, or ask thinwire plan about a link that you know",
            )
        from thinwire.cli.advice import show_advice

        address = None if self.at is None else read_address(self.at)
        findings = list(self._findings(address))
        console.print(_table(findings))
        for run in (finding.run for finding in findings):
            if run is not None:
                show_advice(console, run.advice, run.job, model=run.model, at=address)
        failed = [finding.name for finding in findings if finding.status == "fail"]
        if failed:
            raise ConfigurationError(
                "take part in a run from here" if self.at else "use thinwire here",
                because=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
                do="follow the arrows in the table",
            )

    def _findings(self, address: Address | None) -> Iterator[Finding]:
        from thinwire.doctor import examine, machine_checks, store_findings

        # Before anything is measured: a flag that is wrong stays so.
        expected = self._expected()
        lacking = "warn" if address is None else "fail"
        for name, check in machine_checks(lacking=lacking, token_file=self.token_file).items():
            yield examine(name, check)
        if address is not None:
            # A token that cannot be is one of the findings above.
            with suppress(ConfigurationError):
                token = optional_token(self.token_file)
                yield from store_findings(address.place, expected, run=address.run, token=token)

    def _expected(self) -> ExpectedRun:
        """What the flags say of the run, checked."""
        from thinwire.doctor import ExpectedRun
        from thinwire.plan.models import resolve
        from thinwire.plan.shape import Shape

        given: dict[str, str] = given_in(self)
        of_the_model = [name for name in _OF_THE_MODEL if name in given]
        if of_the_model == ["layers"]:
            raise ConfigurationError(
                "plan with --layers and without --parameters",
                because="layers alone do not say how large they are",
                do="pass --parameters 10B --layers 48, or the like",
            )
        # What the doctor finds out or assumes is not missing.
        check_flags({*(of_the_model or ["model"]), "bandwidth", "workers", "step_time"})
        readers = {"parameters": parse_count, "layers": parse_count, "workers": parse_count}
        counts = {n: read_flag(n, read, given[n]) for n, read in readers.items() if n in given}
        step = self.step_time
        shape = None
        if "parameters" in counts:
            shape = Shape.of_size(counts["parameters"], counts["layers"])
        elif self.model is not None:
            shape = resolve(self.model)
        return ExpectedRun(
            shape=shape,
            model=self.model,
            shape_flags=" ".join(f"{flag(n)} {shlex.quote(given[n])}" for n in of_the_model),
            workers=counts.get("workers"),
            step_s=None if step is None else read_flag("step_time", parse_duration, step),
        )


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
