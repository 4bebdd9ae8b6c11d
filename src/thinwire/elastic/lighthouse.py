"""What the workers of an elastic run connect to: the registry, the relay, torchft's lighthouse."""

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from thinwire.elastic import torchft
from thinwire.elastic.registry_server import RegistryServer, RegistryStatus
from thinwire.errors import ConfigurationError
from thinwire.security.token import Token
from thinwire.transport.address import address_text

_TICK_MS = 50
_MOST_WORKERS = 10**6
_FREE_S = 2.0
_LOOPBACK = "127.0.0.1"


class LighthouseServer:
    """One port that all workers connect to, until it is closed.

    The registry and the relay answer there within the run's TLS. torchft's lighthouse, which checks
    no token, listens on loopback; workers reach it through that port.

    Args:
        token: of the run.
        host: address to listen on.
        port: 0 takes one that is free.
        min_workers: a round needs this many.
        heartbeat_timeout_s: without a heartbeat, after which a worker is gone.
        join_timeout_s: how long torchft lets workers that are ready wait for those that are not.
        allow_fork: whether a round may begin from an older version than the run's.
        on_event: gets a line for each worker that joined, left or was refused, and why; called
            from any thread.

    Raises:
        ConfigurationError: torchft is not installed, a port is taken, or a number is out of range.
    """

    def __init__(
        self,
        token: Token,
        *,
        host: str,
        port: int,
        min_workers: int = 1,
        heartbeat_timeout_s: float = 5.0,
        join_timeout_s: float = 60.0,
        allow_fork: bool = False,
        on_event: Callable[[str], None],
    ) -> None:
        _check(port, min_workers, heartbeat_timeout_s, join_timeout_s)
        new_server = torchft.load("coordination", to="start a lighthouse").LighthouseServer
        self._inner_port = _free_port()
        self._server: Any = new_server(
            bind=address_text(_LOOPBACK, self._inner_port),
            min_replicas=min_workers,
            join_timeout_ms=round(join_timeout_s * 1000),
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
        )
        try:
            self._registry = RegistryServer(
                token,
                host=host,
                port=port,
                lighthouse_port=self._inner_port,
                heartbeat_timeout_s=heartbeat_timeout_s,
                allow_fork=allow_fork,
                on_event=on_event,
            )
        except OSError as error:
            self._server.shutdown()
            raise _taken(host, port, error) from error
        self.port = self._registry.port

    def status(self) -> RegistryStatus:
        """What the registry knows now; may be called from any thread."""
        return self._registry.status()

    def close(self) -> None:
        """Stop answering; its ports are free again."""
        self._registry.close()
        self._server.shutdown()
        # A server that had hardly started listens for as long as it exists, and others free their
        # port some time after the call.
        self._server = None
        until_s = time.monotonic() + _FREE_S
        while not _is_free(self._inner_port) and time.monotonic() < until_s:
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check(port: int, min_workers: int, heartbeat_timeout_s: float, join_timeout_s: float) -> None:
    wrong = {
        f"port={port}": not 0 <= port < 65536,
        f"min_workers={min_workers}": not 1 <= min_workers <= _MOST_WORKERS,
        f"heartbeat_timeout_s={heartbeat_timeout_s:g}": not 0.1 <= heartbeat_timeout_s <= 3600,
        f"join_timeout_s={join_timeout_s:g}": not 0.1 <= join_timeout_s <= 86400,
    }
    for value, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigurationError(
                f"start a lighthouse with {value}",
                because="it takes a port up to 65535, 1 to a million workers, and timeouts from "
                "0.1 s to an hour for heartbeats or a day for joining",
                do="pass a value within these bounds",
            )


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind((_LOOPBACK, 0))
        port: int = trial.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((_LOOPBACK, port))
        except OSError:
            return False
    return True


def _taken(host: str, port: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"listen on {address_text(host, port)}",
        because=str(error),
        do="end the program that listens there, or choose an address of this machine and a port "
        "that is free",
    )
