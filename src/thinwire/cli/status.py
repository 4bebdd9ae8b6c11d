"""`thinwire status`."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import Option, StoreFlags, Switch, read_address
from thinwire.cli.output import say
from thinwire.errors import ExchangeError, check
from thinwire.security.token import optional_token

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.cli.status_page import StatusPage

_INTERVAL_S = 5.0  # a store charges for requests


@dataclass(frozen=True, kw_only=True)
class StatusCommand(StoreFlags):
    """Show the workers of an elastic or asynchronous run, and their progress.

    $ thinwire status s3://my-bucket/first --watch
    $ thinwire status s3://my-bucket/first --metrics 29420
    """

    watch: Switch = False
    """Repeat every 5 s, until Ctrl-C."""
    json: Switch = False
    """Print JSON."""
    metrics: Annotated[Option[str], tyro.conf.arg(metavar="[HOST:]PORT")] = None
    """Serve Prometheus at this port, of 127.0.0.1 without a host, until Ctrl-C."""

    def main(self, console: Console) -> None:
        """Run the command."""
        given = [name for name in ("json", "watch", "metrics") if getattr(self, name)]
        check(
            len(given) <= 1,
            f"use {' and '.join(f'--{name}' for name in given)}",
            because="each shows the run in a way of its own",
            do="leave all but one out",
        )
        address = read_address(self.at)
        store, name = address.place, address.run
        from rich.live import Live
        from rich.text import Text

        from thinwire.asynchronous.objects import read_status
        from thinwire.cli.status_page import asynchronous_page, bucket_page
        from thinwire.elastic.watch import BucketWatch

        token = optional_token(self.token_file)
        watch, title = BucketWatch(store, run=name, token=token), f"run {name} in {store}"
        is_asynchronous = read_status(store, run=name, token=token) is not None

        def look() -> StatusPage:
            status = read_status(store, run=name, token=token) if is_asynchronous else None
            if status is None:
                return bucket_page(watch.look(), title)
            return asynchronous_page(status, title, time.time())

        # Before taking over the screen, because a wrong address or token stays wrong.
        first = look()
        if self.json:
            say(console, json.dumps(first.record, indent=2))
            return
        if self.metrics is not None:
            from thinwire.elastic.metrics import serve_metrics

            metrics = serve_metrics(lambda: look().record, self.metrics)
            with metrics as url, suppress(KeyboardInterrupt):
                say(console, f"metrics of run {name} at {url}")
                while True:
                    time.sleep(_INTERVAL_S)
            return
        if not (self.watch and console.is_terminal):
            console.print(first)
        if not self.watch:
            return
        live = Live(first, console=console) if console.is_terminal else None
        show = console.print if live is None else live.update
        with live or nullcontext(), suppress(KeyboardInterrupt):
            while True:
                time.sleep(_INTERVAL_S)
                try:
                    show(look())
                except ExchangeError as error:  # the store may come back
                    show(Text(str(error)))
