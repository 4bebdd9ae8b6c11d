"""Why what a worker sent is not used, as a code that fits into a vote and a text for people."""

from dataclasses import dataclass
from enum import IntEnum
from typing import final

__all__ = ["RejectReason", "Rejection"]


@final
class RejectReason(IntEnum):
    """The code; its place in the list is part of the wire format."""

    NONE = 0
    NOTHING = 1
    DAMAGED = 2
    DRIFTED = 3
    NOT_FINITE = 4
    OUTSIZED = 5


_TEXTS = {
    RejectReason.NONE: "nothing is wrong",
    RejectReason.NOTHING: "it has just come and has nothing to contribute",
    RejectReason.DAMAGED: "its message did not arrive as it was sent",
    RejectReason.DRIFTED: "its outer parameters are others",
    RejectReason.NOT_FINITE: "what it sent is not finite",
    RejectReason.OUTSIZED: "what it sent is far longer than what the others did",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Why one worker's contribution is left out.

    Args:
        fault: the code.
        detail: what this worker saw of it, if it did.

    >>> str(Rejection(fault=RejectReason.DAMAGED, detail="its body does not match its checksum"))
    'its message did not arrive as it was sent (its body does not match its checksum)'
    """

    fault: RejectReason
    detail: str = ""

    @property
    def keeps_work(self) -> bool:
        """Whether the sender may contribute the same again: nothing is wrong with it itself."""
        return self.fault is RejectReason.DAMAGED

    @property
    def is_final(self) -> bool:
        """Whether the sender must not contribute it again: something is wrong with it itself."""
        return self.fault not in (RejectReason.NOTHING, RejectReason.DAMAGED)

    def __str__(self) -> str:
        return _TEXTS[self.fault] + (f" ({self.detail})" if self.detail else "")
