"""How workers agree on whose messages they use: a code for every sender, from every receiver."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.rejection import Rejection, RejectReason
from thinwire.transport import Post, Received, to_all


def agree(
    found: Mapping[int, Rejection], *, rank: int, workers: int
) -> Generator[Post, Received, dict[int, Rejection]]:
    """Whose messages no worker uses: those that any worker rejected.

    Args:
        found: what this worker rejected, by rank of the sender.
        rank: this worker's.
        workers: K.
    """
    mine = ballot(found, workers)
    ballots = {rank: mine, **(yield to_all(mine, rank, workers))}
    return tally([ballots[worker] for worker in range(workers)], found)


def ballot(found: Mapping[int, Rejection], workers: int) -> Tensor:
    """What a worker rejected, as uint8 [workers]: a `RejectReason` for every sender.

    >>> ballot({1: Rejection(reason=RejectReason.DAMAGED)}, 3).tolist()
    [0, 2, 0]
    """
    codes = torch.zeros(workers, dtype=torch.uint8)
    for sender, rejection in found.items():
        codes[sender] = int(rejection.reason)
    return codes


def tally(votes: Sequence[Tensor], found: Mapping[int, Rejection]) -> dict[int, Rejection]:
    """What is wrong with each sender by the worst that any worker found; equal on all workers.

    Args:
        votes: of all workers, in rank order.
        found: what this worker rejected, with details.

    >>> votes = [ballot({}, 2), ballot({0: Rejection(reason=RejectReason.DAMAGED)}, 2)]
    >>> str(tally(votes, {})[0])
    'its message did not arrive as it was sent (worker 1 found)'
    """
    table = torch.stack([vote.cpu() for vote in votes])
    agreed: dict[int, Rejection] = {}
    for sender, code in enumerate(table.max(0).values.tolist()):
        own = found.get(sender)
        if own is not None and own.reason == code:
            agreed[sender] = own
        elif code:
            finders = (table[:, sender] == code).nonzero().flatten().tolist()
            # A code of a later version is no reason to use the message.
            reason = RejectReason(code) if code in set(RejectReason) else RejectReason.DAMAGED
            detail = f"worker {', '.join(map(str, finders))} found"
            expected = reason is RejectReason.EMPTY
            agreed[sender] = Rejection(reason=reason, detail="" if expected else detail)
    return agreed
