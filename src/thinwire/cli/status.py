"""`thinwire status`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, final

import tyro

from thinwire.cli.output import say
from thinwire.cli.tickets import address_in
from thinwire.errors import ExchangeError
from thinwire.plan.units import count_text, duration_text, nbytes_text
from thinwire.security.token import find_token
from thinwire.transport.address import split_address

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from thinwire.elastic.quorum import Member
    from thinwire.elastic.registry_server import RegistryReply

__all__ = ["StatusCommand"]

T = TypeVar("T")

_WIDE = 116
"""Columns of a terminal that has room for all of the table."""
_REST = 60
"""Columns that a narrow one needs for all but names."""
_ONLY_WIDE = ("address", "sent", "received")
_NUMBERS = {"outer": 5, "inner": 5, "loss": 6, "tokens/s": 6, "sent": 7, "received": 8, "waited": 8}
"""Columns of numbers, and how many characters of each are never cut."""


@final
@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in an elastic run, how far each is, what each measured and who waits."""

    address: Annotated[str, tyro.conf.Positional]
    """Ticket that thinwire lighthouse printed, in quotes, or HOST:PORT."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Show it anew every second, until Ctrl-C."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Print what is known as JSON, once."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""

    def main(self, console: Console) -> None:
        """Run the command."""
        address = address_in(self.address)
        token = find_token(self.token_file)
        split_address(address)
        from rich.live import Live
        from rich.text import Text

        from thinwire.elastic.registry_server import ask_registry

        # Before the screen is taken: an address or a token that is wrong stays so.
        reply = ask_registry(token, address)
        if self.json:
            say(console, json.dumps(_record(reply), indent=2))
            return
        page: RenderableType = _page(reply, console.width)
        if not self.watch or not console.is_terminal:
            console.print(page)
        if not self.watch:
            return
        with (
            Live(page, console=console, screen=console.is_terminal) as live,
            suppress(KeyboardInterrupt),
        ):
            while True:
                time.sleep(1.0)
                try:
                    page = _page(ask_registry(token, address), console.width)
                except ExchangeError as error:  # it may come back
                    page = Text(str(error))
                live.update(page)
        if console.is_terminal:
            # Its screen is gone, and what was last there with it.
            console.print(page)


def _page(reply: RegistryReply, width: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [Text(_headline(reply)), _table(reply, width)]
    if reply.contributions:
        shown.append(_contributions(reply))
    if width < _WIDE:
        shown.append(Text(f"a terminal of {_WIDE} columns shows {', '.join(_ONLY_WIDE)}, too"))
    return Group(*shown)


def _table(reply: RegistryReply, width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    is_wide = width >= _WIDE
    names = [name for name in ("address", *_NUMBERS) if is_wide or name not in _ONLY_WIDE]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Names are cut before anything else is.
    table.add_column("worker", no_wrap=True, max_width=None if is_wide else max(10, width - _REST))
    for name in names:
        justify = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=True, min_width=_NUMBERS.get(name))
    table.add_column("state", min_width=14)
    for member in sorted(reply.peers, key=lambda member: member.identity):
        row = _row(member, reply)
        table.add_row(*(Text(row[name]) for name in ("worker", *names, "state")))
    return table


def _contributions(reply: RegistryReply) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from thinwire.contributions import CLIPPED

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contributions of", no_wrap=True)
    table.add_column("rejected", justify="right")
    table.add_column("clipped", justify="right")
    table.add_column("why")
    for identity, found in reply.contributions.items():
        rejected = {kind: count for kind, count in found.items() if kind != CLIPPED}
        why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
        counts = (str(sum(rejected.values())), str(found.get(CLIPPED, 0)))
        table.add_row(*map(Text, (identity, *counts, why)))
    return table


def _record(reply: RegistryReply) -> dict[str, Any]:
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
            for member in sorted(reply.peers, key=lambda member: member.identity)
        ],
        "contributions": reply.contributions,
    }


def _row(member: Member, reply: RegistryReply) -> Mapping[str, str]:
    from thinwire.membership import WorkerMetrics

    metrics = reply.metrics.get(member.identity, WorkerMetrics())
    return {
        "worker": member.identity,
        "address": member.address,
        "outer": str(member.position.version),
        "inner": str(member.position.step),
        "loss": _cell(metrics.loss, "{:.5g}".format),
        "tokens/s": _cell(metrics.tokens_per_s, count_text),
        "sent": _cell(metrics.sent_bytes, nbytes_text),
        "received": _cell(metrics.received_bytes, nbytes_text),
        "waited": _cell(metrics.wait_s, duration_text),
        "state": _state(member, reply),
    }


def _cell(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)


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
