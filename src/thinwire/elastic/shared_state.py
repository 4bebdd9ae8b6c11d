"""What membership sees of a worker: where it stands, and the state that all workers share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from torch import Tensor

__all__ = ["Progress", "RoundRecord", "SharedState", "Snapshot"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a worker stands.

    Args:
        version: outer steps that its shared state has taken, each fragment's counted.
        step: inner steps of the schedule.
        digest: of the shared state, hexadecimal; equal versions have equal digests.
        dealt: data shares dealt so far.
        over: whether all steps are taken, and nothing is left to be exchanged.

    >>> Progress.read(Progress(version=1, step=10, digest="ab").describe()).step
    10
    """

    version: int
    step: int
    digest: str
    dealt: int = 0
    over: bool = False

    def describe(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """From what `describe` returned, perhaps elsewhere."""
        numbers = {name: int(data[name]) for name in ("version", "step", "dealt")}
        return cls(digest=str(data["digest"]), over=bool(data.get("over", False)), **numbers)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state that all workers share at one version: outer parameters, outer optimizer, schedule.

    Args:
        facts: numbers and texts, JSON-able; has `version`.
        tensors: copies, on the CPU.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """What a round left: enough to take its outer step again, elsewhere.

    Args:
        version: of the shared state after it.
        facts: which fragment and round, and whose messages, JSON-able.
        messages: uint8 [n] each, as they were exchanged.
    """

    version: int
    facts: Mapping[str, Any]
    messages: Sequence[Tensor]


class SharedState(ABC):
    """A worker's state as far as others share it."""

    @abstractmethod
    def position(self) -> Progress:
        """Where this worker stands; safe from any thread."""

    def glance(self) -> Progress:
        """As `position`, but soon, whatever this worker is doing: perhaps where it last stood."""
        return self.position()

    @abstractmethod
    def shared_nbytes(self) -> int:
        """Bytes of a snapshot's tensors."""

    @abstractmethod
    def capture(self) -> Snapshot:
        """A copy of the shared state between two rounds; safe from any thread."""

    @abstractmethod
    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a shared state; feedback stays this worker's own, and so does its local work.

        Work that already counts with the others is not kept.

        Raises:
            MismatchError: it is of another model or method.
        """

    @abstractmethod
    def drop_work(self) -> None:
        """Forget what this worker has done since its outer parameters last moved."""

    @abstractmethod
    def replay(self, record: RoundRecord) -> None:
        """Take the outer step of a round that this worker missed."""
