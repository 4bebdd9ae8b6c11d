"""What the workers of an elastic run connect to: the registry, and torchft's lighthouse."""

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

from thinwire.elastic import torchft
from thinwire.elastic.registry_server import RegistryServer, RegistryStatus
from thinwire.elastic.token import Token
from thinwire.errors import ConfigurationError
from thinwire.transport.address import address_text

__all__ = ["LighthouseServer"]

_TICK_MS = 50
_MOST_WORKERS = 10**6
_TRIES = 20
_FREE_S = 2.0


@final
class LighthouseServer:
    """The registry on `port` and torchft's lighthouse on `port` + 1, until it is closed.

    Args:
        token: of the run.
        host: address to listen on.
        port: 0 takes two neighbouring ports that are free.
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
        self._host, self.port = host, port or _free_pair(host)
        upper = self.port + 1
        try:
            self._registry = RegistryServer(
                token,
                host=host,
                port=self.port,
                lighthouse_port=upper,
                heartbeat_timeout_s=heartbeat_timeout_s,
                allow_fork=allow_fork,
                on_event=on_event,
            )
        except OSError as error:
            raise _taken(host, self.port, error) from error
        try:
            self._server: Any = new_server(
                bind=address_text(host, upper),
                min_replicas=min_workers,
                join_timeout_ms=round(join_timeout_s * 1000),
                quorum_tick_ms=_TICK_MS,
                heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
            )
        except RuntimeError as error:
            self._registry.close()
            raise _taken(host, upper, error) from error

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
        while not _is_free(self._host, self.port + 1) and time.monotonic() < until_s:
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
        f"port={port}": not 0 <= port < 65535,
        f"min_workers={min_workers}": not 1 <= min_workers <= _MOST_WORKERS,
        f"heartbeat_timeout_s={heartbeat_timeout_s:g}": not 0.1 <= heartbeat_timeout_s <= 3600,
        f"join_timeout_s={join_timeout_s:g}": not 0.1 <= join_timeout_s <= 86400,
    }
    for value, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigurationError(
                f"start a lighthouse with {value}",
                because="it takes two ports up to 65535, 1 to a million workers, and timeouts from "
                "0.1 s to an hour for heartbeats or a day for joining",
                do="pass a value within these bounds",
            )


def _free_pair(host: str) -> int:
    for _ in range(_TRIES):
        with socket.socket() as lower:
            try:
                lower.bind((host, 0))
            except OSError as error:
                raise _taken(host, 0, error) from error
            port: int = lower.getsockname()[1]
            if port < 65535 and _is_free(host, port + 1):
                return port
    raise ConfigurationError(
        f"find two neighbouring free ports at {host}",
        because=f"{_TRIES} pairs were taken",
        do="pass a port that is free and whose upper neighbour is, too",
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def _taken(host: str, port: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"listen on {address_text(host, port)}",
        because=str(error),
        do="end the program that listens there, or choose an address of this machine with two "
        "neighbouring free ports: the registry's, and torchft's above it",
    )
