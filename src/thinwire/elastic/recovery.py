"""How a worker that is behind becomes equal to the others: by their last rounds, or their state."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.elastic.dialer import Dialer
from thinwire.elastic.healing import fetch_position, fetch_records, fetch_snapshot
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import Answer, Load, Progress, Replay, SharedState

_HEADROOM_BYTES = 64 << 20

Steps: TypeAlias = Generator[Answer, None, str]
"""What the loop has to do, and in the end what it came to, for people; "" if it did not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Fetches what a worker lacks from another one.

    Args:
        dialer: connects, with the run's token.
        state: this worker's.
        identity: this worker's.
        timeout_s: without a byte, after which another source is tried.
    """

    dialer: Dialer
    state: SharedState
    identity: str
    timeout_s: float

    def catch_up(self, address: str) -> Steps:
        """Take over the state of the worker whose healing server is at `address`.

        Raises:
            ExchangeError: it is gone. MismatchError: its state does not fit.
        """
        there = self.look(address)
        here = self.state.progress()
        if (here.version, here.digest) == (there.version, there.digest):
            return "it had the same state"
        if here.version and (yield from self.replay(address, there)):
            return f"by the rounds up to {self.state.progress().version}"
        snapshot = fetch_snapshot(
            self.dialer,
            address,
            who=self.identity,
            largest=2 * self.state.shared_nbytes() + _HEADROOM_BYTES,
            timeout_s=self.timeout_s,
        )
        yield Load(snapshot)
        return f"by the state after round {self.state.progress().version}"

    def look(self, address: str) -> Progress:
        """How far the worker has come whose healing server is at `address`.

        Raises:
            ExchangeError: it is gone.
        """
        return fetch_position(self.dialer, address, who=self.identity, timeout_s=self.timeout_s)

    def replay(self, address: str, there: Progress) -> Steps:
        """Replay the rounds that lead to `there`."""
        largest = 4 * self.state.shared_nbytes() + _HEADROOM_BYTES
        after = self.state.progress().version
        try:
            records = fetch_records(
                self.dialer,
                address,
                after,
                who=self.identity,
                largest=largest,
                timeout_s=self.timeout_s,
            )
        except (ExchangeError, MismatchError):
            return ""
        if records is None:
            return ""
        try:
            yield Replay(records, there)
        except (ThinwireError, KeyError, IndexError, TypeError, ValueError):
            # The rounds do not follow on this worker's state: it has drifted from the others'.
            return ""
        reached = self.state.progress().version
        return f"by the rounds up to {reached}" if reached >= there.version else ""
