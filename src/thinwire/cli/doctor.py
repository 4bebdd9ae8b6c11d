"""`thinwire doctor`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.advice import show_advice
from thinwire.cli.flag_rules import check_flags, flag, read_flag
from thinwire.cli.tickets import address_in, is_store
from thinwire.errors import ConfigurationError
from thinwire.plan.units import parse_count, parse_duration
from thinwire.security.token import Token, find_token
from thinwire.transport.address import split_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from thinwire.doctor import Finding
    from thinwire.plan.shape import Shape

_OF_THE_MODEL = ("parameters", "layers", "model")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check this machine, and the network to a run, before taking part in it.

    thinwire doctor
    thinwire doctor 'thinwire://...' --parameters 10B --layers 48
    """

    where: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET")] = None
    """Ticket that thinwire lighthouse printed, in quotes, or HOST:PORT; or s3://, gs://, az:// or
    file:// of a store to share; without it only this machine is checked."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""
    parameters: str | None = None
    """N, such as 350M or 10B, for which a method is looked for; with --layers, in place of --model.
    Default the model of the run under way there, else 150m."""
    layers: str | None = None
    """L: layers of the stack."""
    model: str | None = None
    """A built-in size (250k to 15b), a config.json or its folder, or a hub name in the cache."""
    workers: str | None = None
    """K; default those there and this one, at least 2."""
    step_time: str | None = None
    """Of an inner step, such as 0.8s; default 1s."""

    def main(self, console: Console) -> None:
        """Run the command."""
        given = self._given()
        if given and self.where is None:
            raise ConfigurationError(
                f"use {', '.join(map(flag, given))} without a ticket",
                because="a method is looked for by the way to a run's lighthouse or store",
                do="pass a ticket, HOST:PORT or the URL of a store, or ask thinwire plan about a "
                "link that you know",
            )
        address = None if self.where is None else address_in(self.where)
        findings = list(self._findings(address))
        console.print(_table(findings))
        for run in (finding.run for finding in findings):
            if run is not None and address is not None:
                where = f"{shlex.quote(address)} --run-name NAME" if is_store(address) else None
                show_advice(console, run.advice, run.job, model=run.model, where=where)
        failed = [finding.name for finding in findings if finding.status == "fail"]
        if failed:
            raise ConfigurationError(
                "take part in a run from here" if address else "use thinwire here",
                because=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
                do="follow the arrows in the table",
            )

    def _findings(self, address: str | None) -> Iterator[Finding]:
        over_store = address is not None and is_store(address)
        if address is not None and not over_store:
            split_address(address)
        # Before anything is measured: a flag that is wrong stays so.
        shape, workers, step_s = self._planned()
        from thinwire.doctor import (
            ExpectedRun,
            examine,
            machine_checks,
            network_findings,
            store_findings,
        )

        flags = " ".join(
            f"{flag(name)} {shlex.quote(text)}"
            for name, text in self._given().items()
            if name in _OF_THE_MODEL
        )
        planned = ExpectedRun(
            shape=shape, model=self.model, shape_flags=flags, workers=workers, step_s=step_s
        )
        # Over a store neither torchft nor a token is needed.
        lacking = "warn" if address is None or over_store else "fail"
        for name, check in machine_checks(lacking=lacking, token_file=self.token_file).items():
            yield examine(name, check)
        if address is not None:
            yield from (
                store_findings(address, planned)
                if over_store
                else network_findings(address, self._token(), planned)
            )

    def _given(self) -> dict[str, str]:
        """The flags that say what is planned for, of those that were given."""
        names = (*_OF_THE_MODEL, "workers", "step_time")
        return {name: text for name in names if (text := getattr(self, name)) is not None}

    def _planned(self) -> tuple[Shape | None, int | None, float | None]:
        given = self._given()
        if given.keys() & set(_OF_THE_MODEL) == {"layers"}:
            raise ConfigurationError(
                "plan with --layers and without --parameters",
                because="layers alone do not say how large they are",
                do="pass --parameters 10B --layers 48, or the like",
            )
        # What the doctor finds out or assumes is not missing.
        known = {"bandwidth", "workers", "step_time"}
        check_flags({*given, *known} if given.keys() & set(_OF_THE_MODEL) else {"model", *known})
        readers = {"parameters": parse_count, "layers": parse_count, "workers": parse_count}
        counts = {n: read_flag(n, read, given[n]) for n, read in readers.items() if n in given}
        text = given.get("step_time")
        step_s = None if text is None else read_flag("step_time", parse_duration, text)
        if "parameters" in counts:
            from thinwire.plan.shape import Shape

            shape = Shape.of_size(counts["parameters"], counts["layers"])
        elif "model" in given:
            from thinwire.plan.models import resolve

            shape = resolve(given["model"])
        else:
            shape = None
        return shape, counts.get("workers"), step_s

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
