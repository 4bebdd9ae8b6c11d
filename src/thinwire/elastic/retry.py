"""How often and how long a worker tries again."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from thinwire.elastic.registry_server import RefusedError
from thinwire.errors import ExchangeError, ThinwireError

T = TypeVar("T")

_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_FAILURES_OF_A_NEWCOMER = 4  # each costs the workers that train a round


def with_retry(
    ask: Callable[[], T],
    *,
    silence: tuple[type[ThinwireError], ...],
    give_up_s: float,
    tell: Callable[[str], None],
) -> T:
    """What `ask` returns; asks again, with growing pauses, while the registry does not answer.

    Args:
        ask: asks the registry of the run.
        silence: errors that are taken for no answer.
        give_up_s: seconds without an answer, after which the error is raised.
        tell: called once, with the reason of the first failure.

    Raises:
        ExchangeError: the registry did not answer. MismatchError: it refuses this worker, or what
            answers is not the registry.
    """
    pause_s, began_s = _PAUSE_S, time.monotonic()
    while True:
        try:
            return ask()
        except RefusedError:
            raise
        except silence as error:
            left_s = began_s + give_up_s - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == _PAUSE_S:
                tell(error.because)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class RetryBudget:
    """Counts failures in a row, and gives up after too many of them or too long a time.

    A worker that cannot reach the others would otherwise try for as long as it lives, while they
    train on without it.

    Args:
        host: at which others should reach this worker.
        give_up_s: seconds from the first failure since the last success.

    >>> tries = RetryBudget("10.0.0.1", give_up_s=300)
    >>> tries.failed("connect", because="the connection was refused")
    >>> tries.worked()
    """

    def __init__(self, host: str, give_up_s: float) -> None:
        self._host, self._give_up_s = host, give_up_s
        self.worked()

    def worked(self) -> None:
        """Forget the failures: the last try succeeded."""
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
        """Count a failure of a worker that has no round yet: each try costs the others a round, so
        it has only a few.

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
