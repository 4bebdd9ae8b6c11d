"""How a worker that is behind becomes equal to the others: by their last rounds, or their state."""

from dataclasses import dataclass
from typing import final

from thinwire.elastic.healing import fetch_position, fetch_records, fetch_snapshot
from thinwire.elastic.shared_state import Progress, SharedState
from thinwire.elastic.token import Token
from thinwire.errors import ExchangeError, MismatchError, ThinwireError

__all__ = ["Recovery"]

_HEADROOM_BYTES = 64 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Takes what a worker lacks from others.

    Args:
        token: of the run.
        ward: the worker.
        who: its identity.
        timeout_s: without a byte, after which another source is tried.
    """

    token: Token
    ward: SharedState
    who: str
    timeout_s: float

    def reach(self, address: str) -> str:
        """Take over the state of the worker whose healing server is at `address`.

        Returns:
            What was done, for people.

        Raises:
            ExchangeError: it is gone. MismatchError: its state does not fit.
        """
        there = self.look(address)
        if self._is_at(there):
            return "it had the same state"
        if self.ward.position().version and self.replay(address, there):
            return f"by the rounds up to {self.ward.position().version}"
        snapshot = fetch_snapshot(
            self.token,
            address,
            who=self.who,
            largest=2 * self.ward.shared_nbytes() + _HEADROOM_BYTES,
            timeout_s=self.timeout_s,
        )
        self.ward.adopt(snapshot)
        return f"by the state after round {self.ward.position().version}"

    def look(self, address: str) -> Progress:
        """Where the worker stands whose healing server is at `address`.

        Raises:
            ExchangeError: it is gone.
        """
        return fetch_position(self.token, address, who=self.who, timeout_s=self.timeout_s)

    def replay(self, address: str, there: Progress) -> bool:
        """Replay the rounds that lead to `there`; whether that worked."""
        largest = 4 * self.ward.shared_nbytes() + _HEADROOM_BYTES
        after = self.ward.position().version
        try:
            records = fetch_records(
                self.token, address, after, who=self.who, largest=largest, timeout_s=self.timeout_s
            )
        except (ExchangeError, MismatchError):
            return False
        try:
            for record in records or ():
                self.ward.replay(record)
        except (ThinwireError, KeyError, IndexError, TypeError, ValueError):
            # Rounds that do not follow from this worker's state: it has drifted from the others'.
            self.ward.drop_work()
            return False
        here = self.ward.position()
        if here.version == there.version and here.digest != there.digest:
            self.ward.drop_work()
            return False
        return here.version >= there.version

    def _is_at(self, there: Progress) -> bool:
        here = self.ward.position()
        return (here.version, here.digest) == (there.version, there.digest)
