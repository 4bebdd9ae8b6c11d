"""Which workers a worker does not reach, though all of them reach the lighthouse."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from thinwire.elastic.quorum import Member
from thinwire.errors import ThinwireError


class Reachability:
    """Looks for the others once workers could not connect to each other twice in a row.

    Args:
        look: asks the healing server at an address; a `ThinwireError` says that it cannot.
        index: of this rank in its worker, which looks for the same rank of the others.
    """

    def __init__(self, look: Callable[[str], object], *, index: int = 0) -> None:
        self._look, self._index = look, index
        self._tried: frozenset[str] = frozenset()
        self.unreachable: tuple[str, ...] = ()

    def connected(self) -> None:
        """Note that all workers of a round reach each other."""
        self._tried, self.unreachable = frozenset(), ()

    def not_connected(self, others: Sequence[Member]) -> None:
        """Note that this worker could not connect to `others`, or they not to each other.

        Those that it tried the last time, too, and that do not answer are unreachable. Once is not
        enough: to look for a worker that was just stopped is to wait for it a second time.
        """
        again = [member for member in others if member.name in self._tried]
        with ThreadPoolExecutor(max(1, len(again))) as pool:
            answers = list(pool.map(self._answers, again))
        missed = (m.name for m, answer in zip(again, answers, strict=True) if not answer)
        self.unreachable = tuple(sorted(missed))
        self._tried = frozenset(member.name for member in others)

    def _answers(self, member: Member) -> bool:
        try:
            self._look(member.addresses[self._index])
        except ThinwireError:
            return False
        return True
