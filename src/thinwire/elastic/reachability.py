"""Which workers a worker does not reach, though all of them reach the lighthouse."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from thinwire.elastic.quorum import Member
from thinwire.errors import ThinwireError

__all__ = ["Reachability"]


@final
class Reachability:
    """Looks for the others each time that workers could not connect to each other.

    Args:
        look: asks the healing server at an address; a `ThinwireError` says that it cannot.
    """

    def __init__(self, look: Callable[[str], object]) -> None:
        self._look = look
        self._missed: frozenset[str] = frozenset()
        self.unreachable: tuple[str, ...] = ()

    def connected(self) -> None:
        """Note that all workers of a round reach each other."""
        self._missed, self.unreachable = frozenset(), ()

    def not_connected(self, others: Sequence[Member]) -> None:
        """Note which of `others` do not answer; those that did not the last time are unreachable.

        Once is not enough: a worker that was killed does not answer, either.
        """
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            answers = list(pool.map(self._answers, others))
        missed = {m.name for m, answer in zip(others, answers, strict=True) if not answer}
        self.unreachable = tuple(sorted(missed & self._missed))
        self._missed = frozenset(missed)

    def _answers(self, member: Member) -> bool:
        try:
            self._look(member.address)
        except ThinwireError:
            return False
        return True
