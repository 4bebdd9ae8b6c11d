"""`thinwire status`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from thinwire.cli.output import say
from thinwire.cli.status_page import StatusPage, metric_cells
from thinwire.cli.tickets import address_in, is_store
from thinwire.errors import ConfigurationError, ExchangeError
from thinwire.plan.units import duration_text
from thinwire.security.token import TOKEN_VARIABLE, find_token
from thinwire.transport.address import split_address

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from thinwire.elastic.quorum import Member
    from thinwire.elastic.registry_server import RegistryReply

_PERIOD_S, _STORE_PERIOD_S = 1.0, 5.0  # a store charges for requests


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in an elastic run, how far each is, what each measured and who waits.

    thinwire status 10.9.0.1:29400 --watch
    thinwire status s3://my-bucket/runs --run-name first
    """

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET|URL")]
    """Ticket that thinwire lighthouse printed, in quotes, or HOST:PORT; or the URL of an object
    store, with --run-name."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Show it anew every second (of a store every 5 s), until Ctrl-C."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Print what is known as JSON, once."""
    run_name: str | None = None
    """Of the run in that store."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""

    def main(self, console: Console) -> None:
        """Run the command."""
        look = self._source()
        from rich.live import Live
        from rich.text import Text

        # Before the screen is taken: an address or a token that is wrong stays so.
        first = look()
        if self.json:
            say(console, json.dumps(first.record, indent=2))
            return
        page: RenderableType = first.shown(console.width)
        if not self.watch or not console.is_terminal:
            console.print(page)
        if not self.watch:
            return
        period_s = _STORE_PERIOD_S if is_store(self.address) else _PERIOD_S
        with (
            Live(page, console=console, screen=console.is_terminal) as live,
            suppress(KeyboardInterrupt),
        ):
            while True:
                time.sleep(period_s)
                try:
                    page = look().shown(console.width)
                except ExchangeError as error:  # it may come back
                    page = Text(str(error))
                live.update(page)
        if console.is_terminal:
            # Its screen is gone, and what was last there with it.
            console.print(page)

    def _source(self) -> Callable[[], StatusPage]:
        if is_store(self.address):
            return self._store()
        if self.run_name is not None:
            raise ConfigurationError(
                "use --run-name with the address of a lighthouse",
                because="it names a run in an object store, and a lighthouse has one run",
                do="leave --run-name out, or pass the URL of the store",
            )
        address = address_in(self.address)
        token = find_token(self.token_file)
        split_address(address)
        from thinwire.elastic.registry_server import ask_registry

        return lambda: _page(ask_registry(token, address))

    def _store(self) -> Callable[[], StatusPage]:
        if self.run_name is None:
            raise ConfigurationError(
                f"show a run in {self.address} without --run-name",
                because="runs in one place are told apart by their names",
                do="pass --run-name NAME, as the workers did",
            )
        is_sealed = self.token_file is not None or os.environ.get(TOKEN_VARIABLE)
        token = find_token(self.token_file) if is_sealed else None
        from thinwire.cli.bucket_status import bucket_page
        from thinwire.elastic.bucket.watch import BucketWatch

        watch, where = BucketWatch(self.address, run=self.run_name, token=token), self.address
        name = self.run_name
        return lambda: bucket_page(watch.look(), f"run {name} in {where}")


def _page(reply: RegistryReply) -> StatusPage:
    members = sorted(reply.peers, key=lambda member: member.identity)
    return StatusPage(
        headlines=[_headline(reply)],
        rows=[_row(member, reply) for member in members],
        contributions=reply.contributions,
        record=_record(members, reply),
    )


def _record(members: list[Member], reply: RegistryReply) -> dict[str, Any]:
    """What the page shows, as JSON-able data."""
    from thinwire.membership import WorkerMetrics

    return {
        "age_s": reply.age_s,
        "run": reply.run.describe(),
        "workers": [
            {
                "identity": member.identity,
                "address": member.address,
                "position": member.position.describe(),
                "metrics": reply.metrics.get(member.identity, WorkerMetrics()).describe(),
                "heartbeat_age_s": reply.heartbeat_age_s.get(member.identity),
                "state": _state(member, reply),
            }
            for member in members
        ],
        "contributions": reply.contributions,
    }


def _row(member: Member, reply: RegistryReply) -> dict[str, str]:
    from thinwire.membership import WorkerMetrics

    return {
        "worker": member.identity,
        "address": member.address,
        "outer": str(member.position.version),
        "inner": str(member.position.step),
        **metric_cells(reply.metrics.get(member.identity, WorkerMetrics())),
        "state": _state(member, reply),
    }


def _headline(reply: RegistryReply) -> str:
    run, count = reply.run, len(reply.peers)
    workers = "1 worker" if count == 1 else f"{count} workers"
    age = duration_text(reply.age_s)
    if run.version == 0:
        return f"lighthouse up for {age}; {workers}; no outer step yet"
    state = "over" if run.over else "under way"
    return (
        f"lighthouse up for {age}; {workers}; the run is {state}: outer step {run.version}, "
        f"inner step {run.step}, {run.dealt} data shares dealt, state {run.digest}"
    )


def _state(member: Member, reply: RegistryReply) -> str:
    run, behind = reply.run, reply.run.version - member.position.version
    silent_s = reply.heartbeat_age_s.get(member.identity, 0.0)
    found = []
    # Heartbeats are sent five times within the timeout, or more often.
    if silent_s > reply.heartbeat_timeout_s / 2:
        found.append(f"no heartbeat for {silent_s:.0f} s")
    if member.finished:
        found.append("finished")
    if behind > 0:
        found.append(f"{behind} outer steps behind" if behind > 1 else "1 outer step behind")
    elif behind == 0 and run.version and member.position.digest not in ("", run.digest):
        found.append(f"another state: digest {member.position.digest}")
    if member.waiting_s >= 1:  # at the end of every round one waits for a moment
        found.append(f"waits for others, {member.waiting_s:.0f} s")
    return ", ".join(found) or "trains"
