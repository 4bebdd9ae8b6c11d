"""`thinwire lighthouse`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.flags import Option, Switch
from thinwire.cli.output import noted_signals, say
from thinwire.security.ticket import Ticket
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.elastic.lighthouse import LighthouseServer

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LighthouseCommand:
    """Start the server that the workers of an elastic run meet at; prints joins and losses.

    All that workers need goes through this one port, which they only connect to.

    $ thinwire lighthouse --public HOST
    """

    bind: str = "0.0.0.0:29400"
    """HOST:PORT to listen on; port 0 takes one that is free."""
    public: Option[str] = None
    """Host by which workers reach this machine, for the ticket; default its address."""
    min_workers: int = 1
    """A round needs this many workers."""
    heartbeat_timeout_s: float = 5.0
    """Seconds of silence after which a worker is gone."""
    join_timeout_s: float = 60.0
    """Seconds that workers which are ready for a round wait for the others."""
    allow_fork: Switch = False
    """Let workers go on from an older version of the run than is known; what is newer is lost."""
    metrics: Option[str] = None
    """HOST:PORT at which to serve the run's metrics to Prometheus; all that reach it can read."""
    token_file: Option[Path] = None
    """Holds the run's token; default is THINWIRE_TOKEN, and without it a new one is made."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.transport.address import address_text, split_address

        host, port = split_address(self.bind)
        token, made = self._token()
        # Read by torchft when it is imported: its own lines say little that ours do not.
        os.environ.setdefault("RUST_LOG", "warn")
        from thinwire.elastic.lighthouse import LighthouseServer

        with (
            noted_signals(signal.SIGINT, signal.SIGTERM) as stop,
            LighthouseServer(
                token,
                host=host,
                port=port,
                min_workers=self.min_workers,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
                join_timeout_s=self.join_timeout_s,
                allow_fork=self.allow_fork,
                on_event=partial(say, console),
            ) as server,
            self._metrics(server) as metrics,
        ):
            address = address_text(self.public or _reachable_host(host), server.port)
            if made:
                say(console, f"export {TOKEN_VARIABLE}={made}")
                ticket = Ticket(address=address, secret=made)
                say(console, f"ready; on every machine: thinwire join '{ticket}' --out runs/here")
            else:
                if self.token_file is None:
                    say(console, f"the token is that of {TOKEN_VARIABLE}; unset it for a new one")
                say(console, f"ready; workers: thinwire join {address}")
            if metrics:
                say(console, f"metrics: {metrics}")
            while not stop:
                time.sleep(_POLL_S)
        say(console, "stopped")

    @contextmanager
    def _metrics(self, server: LighthouseServer) -> Generator[str]:
        """Inside, metrics are served at this URL; "" where none were asked for."""
        if self.metrics is None:
            yield ""
            return
        from thinwire.elastic.metrics import METRICS_PATH, serve_metrics
        from thinwire.transport.address import address_text, split_address

        host, port = split_address(self.metrics)
        with serve_metrics(server.status, host=host, port=port) as port:
            yield f"http://{address_text(_reachable_host(host), port)}{METRICS_PATH}"

    def _token(self) -> tuple[Token, str]:
        if self.token_file is not None or os.environ.get(TOKEN_VARIABLE):
            return find_token(self.token_file), ""
        made = secrets.token_hex(16)
        return Token(made), made


def _reachable_host(host: str) -> str:
    from thinwire.transport.address import interface_addresses, local_address

    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return local_address()
    except OSError:  # no route leads out of the networks that this machine is on
        addresses = sorted(interface_addresses().values(), key=lambda a: a.startswith("127."))
        return addresses[0] if addresses else socket.gethostname()
