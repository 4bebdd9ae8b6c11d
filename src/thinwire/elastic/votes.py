"""How workers agree on whose payloads they use: a code for every sender, from every receiver."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.rejection import Rejection, RejectReason

__all__ = ["tally", "vote"]


def vote(flaws: Mapping[int, Rejection], workers: int) -> Tensor:
    """What a worker found wrong, as uint8 [workers]: a `RejectReason` for every sender.

    >>> vote({1: Rejection(fault=RejectReason.DAMAGED)}, 3).tolist()
    [0, 2, 0]
    """
    codes = torch.zeros(workers, dtype=torch.uint8)
    for sender, flaw in flaws.items():
        codes[sender] = int(flaw.fault)
    return codes


def tally(votes: Sequence[Tensor], mine: Mapping[int, Rejection]) -> dict[int, Rejection]:
    """What is wrong with each sender by the worst that anybody found; equal on all workers.

    Args:
        votes: of all workers, in rank order.
        mine: what this worker found, with details.

    >>> ballots = [vote({}, 2), vote({0: Rejection(fault=RejectReason.DAMAGED)}, 2)]
    >>> str(tally(ballots, {})[0])
    'its message did not arrive as it was sent (worker 1 found)'
    """
    table = torch.stack([ballot.cpu() for ballot in votes])
    worst = table.max(0).values.tolist()
    agreed: dict[int, Rejection] = {}
    for sender, code in enumerate(worst):
        if code == RejectReason.NONE:
            continue
        own = mine.get(sender)
        finders = (table[:, sender] == code).nonzero().flatten().tolist()
        detail = f"worker {', '.join(map(str, finders))} found"
        known = own is not None and own.fault == code
        fault = RejectReason(code) if code in set(RejectReason) else RejectReason.DAMAGED
        quiet = fault is RejectReason.NOTHING
        agreed[sender] = (
            own if known and own else Rejection(fault=fault, detail="" if quiet else detail)
        )
    return agreed
