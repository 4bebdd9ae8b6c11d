"""torchft's lighthouse, as a worker sees it: heartbeats, and a quorum when all are there."""

import datetime
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any, final

from thinwire.elastic import torchft
from thinwire.elastic.quorum import Member
from thinwire.elastic.token import Token
from thinwire.errors import ExchangeError

__all__ = ["LighthouseClient"]

_SLICE_S = 20.0
_LOOK_S = 0.05
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


@final
class _Call:
    """A call in a thread of its own, which can be left to itself."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        threading.Thread(target=self._run, name="thinwire-quorum", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # whoever waits must hear of it, a panic of torchft's too
            self.error = error
        finally:
            self.done.set()


@final
class LighthouseClient:
    """A connection that outlives the lighthouse it leads to.

    Args:
        address: HOST:PORT of torchft's lighthouse.
        name: of this process.
        heartbeat_timeout_s: after which the lighthouse takes it for gone.
        give_up_s: without an answer, after which a quorum is not waited for any longer.
        tell: told when the lighthouse is lost, with why, and when it is found again, with "".

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
        tell: Callable[[str], None],
    ) -> None:
        self._new: Any = torchft.load("coordination").LighthouseClient
        self._address, self._name, self._tell = address, name, tell
        self._timeout_s, self._give_up_s = heartbeat_timeout_s, give_up_s
        self._beats = threading.Event()  # set while this worker wants to be waited for: not yet
        self._closed = threading.Event()
        self._held_since = 0.0
        self._lost_since: float | None = None
        self._found_s = -math.inf
        self._finds = 0
        self._client: Any = None
        self._pulse = threading.Thread(target=self._beat, name="thinwire-pulse", daemon=True)
        self._pulse.start()

    def hold_back(self) -> None:
        """Send no heartbeats: others shall not wait for this worker."""
        if self._beats.is_set():
            self._held_since = time.monotonic()
            self._beats.clear()

    def held_s(self) -> float:
        """For how many seconds none were sent, since there were any."""
        return time.monotonic() - self._held_since if self._held_since else 0.0

    def beat_on(self) -> None:
        """Send them."""
        self._held_since = 0.0
        self._beats.set()

    def is_new(self) -> bool:
        """Whether it was lost, and others may not have found it again yet."""
        lost = self._lost_since is not None
        return lost or time.monotonic() - self._found_s < self._timeout_s

    def close(self) -> None:
        """End the heartbeats."""
        self._closed.set()
        self._pulse.join(self._timeout_s)

    def quorum(
        self, standing: Callable[[], Member], token: Token, *, check: Callable[[], None]
    ) -> list[Member]:
        """Everybody who convenes, once all who have a heartbeat do.

        Args:
            standing: this worker's; called whenever the lighthouse is asked.
            token: of the run.
            check: called while it is waited for; what it raises ends that.

        Raises:
            ExchangeError: no lighthouse could be reached for too long.
        """
        pause_s, heard_s = _FIRST_PAUSE_S, time.monotonic()
        while True:
            # What is asked while it is lost fails, or reaches the one that is about to be found: to
            # ask that one again then may be to ask after it has answered everybody else.
            finds = self._finds + (self._lost_since is not None)
            call = _Call(lambda: self._ask(standing(), token))
            while not call.done.wait(_LOOK_S):
                # One that was asked of a lighthouse that is gone may wait for it for ever.
                if self._finds > finds:
                    break
                if self._lost_since is None:
                    heard_s = time.monotonic()
                self._check_patience(heard_s)
                check()
            if call.done.is_set() and call.error is None:
                return self._read(call.result, token)
            if call.error is not None:
                # Whatever answers next may be a new one, which has not heard of the others yet.
                self._found_s = time.monotonic()
            if self._lost_since is not None or call.error is not None:
                self._check_patience(heard_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, standing: Member, token: Token) -> Any:
        # Taken along and not shared: a call that is left to itself keeps its client.
        client, self._client = self._client or self._connect(), None
        found = client.quorum(
            self._name,
            datetime.timedelta(seconds=_SLICE_S),
            address=standing.address,
            store_address=standing.store,
            step=standing.position.version,
            world_size=1,
            data=standing.signed(token),
        )
        self._client = client
        return found

    def _read(self, quorum: Any, token: Token) -> list[Member]:
        found = (Member.read(member.data, token) for member in quorum.participants)
        return [standing for standing in found if standing is not None]

    def _check_patience(self, heard_s: float) -> None:
        silent_s = time.monotonic() - heard_s
        if silent_s >= self._give_up_s:
            raise ExchangeError(
                f"reach the lighthouse at {self._address}",
                because=f"it has not answered for {silent_s:.0f} s",
                do="start thinwire lighthouse there again",
            )

    def _connect(self) -> Any:
        return self._new(f"http://{self._address}", datetime.timedelta(seconds=self._timeout_s))

    def _beat(self) -> None:
        client = None
        pause_s = min(1.0, self._timeout_s / 5)
        while not self._closed.wait(pause_s):
            if not self._beats.is_set():
                continue
            try:
                client = client or self._connect()
                client.heartbeat(self._name, datetime.timedelta(seconds=self._timeout_s))
                self._found()
            except Exception as error:  # whatever it is: without a pulse this worker is gone
                client = None
                self._lose(error)

    def _found(self) -> None:
        if self._lost_since is not None:
            self._lost_since, self._found_s = None, time.monotonic()
            self._finds += 1
            self._tell("")

    def _lose(self, error: Exception) -> None:
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            self._tell(_said(error))


def _said(error: Exception) -> str:
    """The message in what torchft's client raises."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    quoted = re.search(r'message: "([^"]*)"', text)
    return quoted[1] if quoted else text
