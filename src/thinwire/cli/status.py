"""`thinwire status`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import Option, Switch, address_in, check_run_name, is_store
from thinwire.cli.output import say
from thinwire.errors import ExchangeError
from thinwire.security.token import TOKEN_VARIABLE, find_token

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from thinwire.cli.status_page import StatusPage

_PERIOD_S, _STORE_PERIOD_S = 1.0, 5.0  # a store charges for requests


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in an elastic run, how far each is, what each measured and who waits.

    $ thinwire status 10.9.0.1:29400 --watch
    $ thinwire status s3://my-bucket/runs --run-name first
    """

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET|URL")]
    """The lighthouse's ticket, in quotes, or its HOST:PORT; or a store's URL, with --run-name."""
    watch: Switch = False
    """Show it again every second (of a store every 5 s), until Ctrl-C."""
    json: Switch = False
    """Print what is known as JSON, once."""
    run_name: Option[str] = None
    """Of the run in that store."""
    token_file: Option[Path] = None
    """Holds the run's token; default THINWIRE_TOKEN."""

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
        check_run_name(self.address, self.run_name)
        if self.run_name is not None:
            is_sealed = self.token_file is not None or os.environ.get(TOKEN_VARIABLE)
            token = find_token(self.token_file) if is_sealed else None
            from thinwire.cli.status_page import bucket_page
            from thinwire.elastic.bucket.watch import BucketWatch

            name, where = self.run_name, self.address
            watch = BucketWatch(where, run=name, token=token)
            return lambda: bucket_page(watch.look(), f"run {name} in {where}")
        address = address_in(self.address)
        token = find_token(self.token_file)
        from thinwire.cli.status_page import lighthouse_page
        from thinwire.elastic.registry_server import ask_registry
        from thinwire.transport.address import split_address

        split_address(address)
        return lambda: lighthouse_page(ask_registry(token, address))
