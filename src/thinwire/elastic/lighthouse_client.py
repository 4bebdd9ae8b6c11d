"""A worker's connection to torchft's lighthouse: heartbeats, and a quorum once all are ready."""

import datetime
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from thinwire.elastic import torchft
from thinwire.elastic.background_call import BackgroundCall
from thinwire.elastic.quorum import Member
from thinwire.errors import ExchangeError
from thinwire.security.token import Token

_REQUEST_S = 20.0
_LOOK_S = 0.05
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


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
        pause_s, heard_s = _FIRST_PAUSE_S, time.monotonic()
        while True:
            # What is asked while it is lost fails, or reaches the one that is about to be found: to
            # ask that one again then may be to ask after it has answered all others.
            finds = self._finds + (self._lost_since is not None)
            call = BackgroundCall(lambda: self._ask(member(), token), name="thinwire-quorum")
            while not call.done.wait(_LOOK_S):
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
            if call.done.is_set() and call.error is None:
                found = (Member.verified(p.data, token) for p in call.result().participants)
                return [worker for worker in found if worker is not None]
            if call.error is not None:
                # The next answer may be of a new lighthouse that has not heard of the others yet.
                self._found_s = time.monotonic()
            if self._lost_since is not None or call.error is not None:
                self._check_give_up(heard_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

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
        if silent_s >= self._give_up_s:
            raise ExchangeError(
                f"reach the lighthouse at {self._address}",
                because=f"it has not answered for {silent_s:.0f} s",
                do="start thinwire lighthouse there again",
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
                self._note_found()
            except Exception as error:  # of any kind: without heartbeats this worker is gone
                client = None
                self._note_lost(error)

    def _note_found(self) -> None:
        if self._lost_since is not None:
            self._lost_since, self._found_s = None, time.monotonic()
            self._finds += 1
            self._on_change("")

    def _note_lost(self, error: Exception) -> None:
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            self._on_change(_message_of(error))


def _message_of(error: Exception) -> str:
    """The message in what torchft's client raises."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    quoted = re.search(r'message: "([^"]*)"', text)
    return quoted[1] if quoted else text
