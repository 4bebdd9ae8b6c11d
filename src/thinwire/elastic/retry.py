"""How often and how long a worker tries again."""

import math
import time
from collections.abc import Callable
from typing import final

from thinwire.elastic.registry_server import JoinReply, RegistryClient
from thinwire.elastic.shared_state import Progress
from thinwire.errors import ExchangeError

__all__ = ["RetryBudget", "join_with_retry"]

_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_FAILURES_OF_A_NEWCOMER = 4


def join_with_retry(
    door: RegistryClient,
    position: Progress,
    address: str,
    *,
    give_up_s: float,
    tell: Callable[[str], None],
) -> JoinReply:
    """Come in, and keep knocking while nobody answers.

    Args:
        door: of the run.
        position: where this worker stands.
        address: of its healing server.
        give_up_s: without an answer, after which there will be none.
        tell: told once that nobody answers, and why.

    Raises:
        ExchangeError: nobody answered. MismatchError: the door refuses.
    """
    pause_s, began_s = _PAUSE_S, time.monotonic()
    while True:
        try:
            return door.join(position, address)
        except ExchangeError as error:
            left_s = began_s + give_up_s - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == _PAUSE_S:
                tell(f"does not answer: {error.because}")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@final
class RetryBudget:
    """Counts failures until there were too many, or for too long: others may be well meanwhile.

    Args:
        host: at which others should reach this worker.
        give_up_s: since the first failure without a success.

    >>> tries = RetryBudget("10.0.0.1", give_up_s=300)
    >>> tries.failed("connect", because="nobody answers")
    >>> tries.worked()
    """

    def __init__(self, host: str, give_up_s: float) -> None:
        self._host, self._give_up_s = host, give_up_s
        self.worked()

    def worked(self) -> None:
        """All is well again."""
        self._failures, self._since_s = 0, math.inf

    def failed(self, what: str, *, because: str) -> None:
        """Count a failure.

        Raises:
            ExchangeError: it was one too many.
        """
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s)
        self._failures += 1
        if now_s - self._since_s > self._give_up_s:
            self._give_up(what, because)

    def failed_newcomer(self, what: str, *, because: str) -> None:
        """As `failed`, of a worker whose tries cost the others rounds: it has a few.

        Raises:
            ExchangeError: it was one too many.
        """
        self.failed(what, because=because)
        if self._failures >= _FAILURES_OF_A_NEWCOMER:
            self._give_up(what, because)

    def _give_up(self, what: str, because: str) -> None:
        raise ExchangeError(
            what,
            because=f"it failed {self._failures} times: {because}",
            do=f"check that the others reach {self._host} and its ports, and this machine theirs "
            "(thinwire doctor)",
        )
