"""What the workers of an elastic run connect to: the registry, the relay, torchft's lighthouse.

And a worker's connection to the last: heartbeats, and a quorum once all are ready.
"""

import concurrent.futures
import contextlib
import datetime
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from thinwire.elastic import torchft
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry_server import RegistryServer
from thinwire.elastic.timeouts import in_background, pauses
from thinwire.errors import ConfigurationError, ExchangeError, check
from thinwire.security.token import Token
from thinwire.transport.address import address_text

_TICK_MS = 50
_MOST_WORKERS = 10**6
_FREE_S = 2.0
_LOOPBACK = "127.0.0.1"
_REQUEST_S, _LOOK_S = 20.0, 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


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

    Attributes:
        port: that it listens on.
        status: returns what the registry knows now; may be called from any thread.

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
        wrong = {
            f"port={port}": not 0 <= port < 65536,
            f"min_workers={min_workers}": not 1 <= min_workers <= _MOST_WORKERS,
            f"heartbeat_timeout_s={heartbeat_timeout_s:g}": not 0.1 <= heartbeat_timeout_s <= 3600,
            f"join_timeout_s={join_timeout_s:g}": not 0.1 <= join_timeout_s <= 86400,
        }
        for value, is_wrong in wrong.items():
            check(
                not is_wrong,
                f"start a lighthouse with {value}",
                because="it takes a port up to 65535, 1 to a million workers, and timeouts from "
                "0.1 s to an hour for heartbeats or a day for joining",
                do="pass a value within these bounds",
            )
        new_server = torchft.load("coordination", to="start a lighthouse").LighthouseServer
        with socket.create_server((_LOOPBACK, 0)) as trial:
            self._inner_port: int = trial.getsockname()[1]
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
            raise ConfigurationError(
                f"listen on {address_text(host, port)}",
                because=str(error),
                do="end the program that listens there, or choose an address of this machine and "
                "a port that is free",
            ) from error
        self.port, self.status = self._registry.port, self._registry.status

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

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((_LOOPBACK, port)):
        return True
    return False


class LighthouseClient:
    """Goes on when the lighthouse is lost and found again.

    No heartbeats are sent before `resume`.

    Args:
        address: HOST:PORT where torchft's lighthouse is reached.
        name: of this process.
        heartbeat_timeout_s: after which the lighthouse takes a silent process for gone.
        give_up_s: without an answer, after which `quorum` raises.
        on_change: called with the reason when the lighthouse is lost, and with "" when it is found
            again.

    Raises:
        ConfigurationError: torchft is not installed.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        heartbeat_timeout_s: float,
        give_up_s: float,
        on_change: Callable[[str], None],
    ) -> None:
        self._new_client: Any = torchft.load("coordination").LighthouseClient
        self._address, self._name, self._on_change = address, name, on_change
        self._timeout_s, self._give_up_s = heartbeat_timeout_s, give_up_s
        self._sends = threading.Event()  # set while the others are to wait for this worker
        self._closed = threading.Event()
        self._paused_since = 0.0
        self._lost_since: float | None = None
        self._found_s = -math.inf
        self._finds = 0
        self._client: Any = None
        self._thread = threading.Thread(target=self._run, name="thinwire-lighthouse", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Send no heartbeats, so that others do not wait for this worker."""
        if self._sends.is_set():
            self._paused_since = time.monotonic()
            self._sends.clear()

    def paused_s(self) -> float:
        """Seconds since `pause`; 0 while heartbeats are sent, and before the first."""
        return time.monotonic() - self._paused_since if self._paused_since else 0.0

    def resume(self) -> None:
        """Send heartbeats."""
        self._paused_since = 0.0
        self._sends.set()

    def was_lost_lately(self) -> bool:
        """Whether others may not have found the lighthouse again yet."""
        lost = self._lost_since is not None
        return lost or time.monotonic() - self._found_s < self._timeout_s

    def close(self) -> None:
        """End the heartbeats."""
        self._closed.set()
        self._thread.join(self._timeout_s)

    def quorum(
        self, member: Callable[[], Member], token: Token, *, check: Callable[[], None]
    ) -> list[Member]:
        """All workers that are ready for a round, once all that send heartbeats are.

        Args:
            member: returns what this worker says of itself; called whenever the lighthouse is
                asked.
            token: of the run.
            check: called while waiting; what it raises ends the wait.

        Raises:
            ExchangeError: no lighthouse could be reached for too long.
        """
        growing, heard_s = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), time.monotonic()
        while True:
            # What is asked while it is lost fails, or reaches the one that is about to be found: to
            # ask that one again then may be to ask after it has answered all others.
            finds = self._finds + (self._lost_since is not None)
            call = in_background(lambda: self._ask(member(), token), name="thinwire-quorum")
            while not concurrent.futures.wait([call], _LOOK_S).done:
                # A call to a lighthouse that is gone may never return.
                if self._finds > finds:
                    break
                if self._lost_since is None:
                    heard_s = time.monotonic()
                self._check_give_up(heard_s)
                check()
                if self._closed.is_set():
                    raise ExchangeError(
                        "wait for a quorum",
                        because="this worker has left the run",
                        do="nothing; to take part again, join again",
                    )
            failed = call.done() and call.exception() is not None
            if call.done() and not failed:
                found = (Member.verified(p.data, token) for p in call.result().participants)
                return [worker for worker in found if worker is not None]
            if failed:
                # The next answer may be of a new lighthouse that has not heard of the others yet.
                self._found_s = time.monotonic()
            if self._lost_since is not None or failed:
                self._check_give_up(heard_s)
                time.sleep(next(growing))

    def _ask(self, member: Member, token: Token) -> Any:
        # Taken out and not shared: a call that is abandoned keeps its client.
        client, self._client = self._client or self._connect(), None
        found = client.quorum(
            self._name,
            datetime.timedelta(seconds=_REQUEST_S),
            address=member.address,
            store_address=member.address,
            step=member.position.version,
            world_size=1,
            data=member.signed(token),
        )
        self._client = client
        return found

    def _check_give_up(self, heard_s: float) -> None:
        silent_s = time.monotonic() - heard_s
        check(
            silent_s < self._give_up_s,
            f"reach the lighthouse at {self._address}",
            because=f"it has not answered for {silent_s:.0f} s",
            do="start thinwire lighthouse there again",
            kind=ExchangeError,
        )

    def _connect(self) -> Any:
        timeout = datetime.timedelta(seconds=self._timeout_s)
        return self._new_client(f"http://{self._address}", timeout)

    def _run(self) -> None:
        client = None
        pause_s = min(1.0, self._timeout_s / 5)
        while not self._closed.wait(pause_s):
            if not self._sends.is_set():
                continue
            try:
                client = client or self._connect()
                client.heartbeat(self._name, datetime.timedelta(seconds=self._timeout_s))
                if self._lost_since is not None:
                    self._lost_since, self._found_s = None, time.monotonic()
                    self._finds += 1
                    self._on_change("")
            except Exception as error:  # of any kind: without heartbeats this worker is gone
                client = None
                if self._lost_since is None:
                    self._lost_since = time.monotonic()
                    self._on_change(_message_of(error))


def _message_of(error: Exception) -> str:
    """The message in what torchft's client raises."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    quoted = re.search(r'message: "([^"]*)"', text)
    return quoted[1] if quoted else text
