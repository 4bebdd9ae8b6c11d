"""`thinwire status`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.elastic.quorum import Member
from thinwire.elastic.registry_server import RegistryReply, ask_registry
from thinwire.elastic.token import find_token
from thinwire.errors import ExchangeError
from thinwire.membership import Progress
from thinwire.plan.units import duration_text

__all__ = ["StatusCommand"]


@final
@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in an elastic run, how far each is, and who waits."""

    address: Annotated[str, tyro.conf.Positional]
    """HOST:PORT that thinwire lighthouse printed."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Show it anew every second, until Ctrl-C."""
    token_file: Path | None = None
    """Holds the run's token; default is THINWIRE_TOKEN."""

    def main(self, console: Console) -> None:
        """Run the command."""
        token = find_token(self.token_file)
        console.print(_page(ask_registry(token, self.address)))
        if not self.watch:
            return
        with Live(console=console, screen=console.is_terminal) as live:
            while True:
                try:
                    live.update(_page(ask_registry(token, self.address)))
                except ExchangeError as error:  # it may come back
                    live.update(Text(str(error)))
                time.sleep(1.0)


def _page(reply: RegistryReply) -> Group:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("worker", "address"):
        table.add_column(name, no_wrap=True)
    for name in ("outer step", "inner step"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for member in sorted(reply.peers, key=lambda member: member.identity):
        at = member.position
        cells = (member.identity, member.address, str(at.version), str(at.step))
        table.add_row(*map(Text, cells), Text(_state(member, reply.run)))
    return Group(Text(_headline(reply)), table)


def _headline(reply: RegistryReply) -> str:
    run, count = reply.run, len(reply.peers)
    workers = "1 worker" if count == 1 else f"{count} workers"
    age = duration_text(reply.age_s)
    if run.version == 0:
        return f"lighthouse up for {age}; {workers}; no outer step yet"
    state = "over" if run.over else "under way"
    return (
        f"lighthouse up for {age}; {workers}; the run is {state}: outer step {run.version}, "
        f"inner step {run.step}, {run.dealt} data shares dealt, digest {run.digest}"
    )


def _state(member: Member, run: Progress) -> str:
    behind = run.version - member.position.version
    found = []
    if member.finished:
        found.append("finished")
    if behind > 0:
        found.append(f"{behind} outer steps behind" if behind > 1 else "1 outer step behind")
    elif behind == 0 and run.version and member.position.digest != run.digest:
        found.append(f"another state: digest {member.position.digest}")
    if member.waiting_s > 0:
        found.append(f"waits for others, {member.waiting_s:.0f} s")
    return ", ".join(found) or "trains"
