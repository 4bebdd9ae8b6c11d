"""Did the workers train apart? If all of them send the same, something made them equal."""

from __future__ import annotations

import torch

from thinwire.aggregate import Payloads
from thinwire.errors import ConfigurationError


class SameWorkCheck:
    """Compares the payloads of an exchange's first round.

    Data parallelism around the workers averages their gradients at every step. Rounds, bytes and
    losses of such a run look right, and it is another method.

    Args:
        is_due: whether to compare at all.

    >>> SameWorkCheck(is_due=True).is_due
    True
    """

    def __init__(self, *, is_due: bool) -> None:
        self.is_due = is_due
        self._is_same = False

    def compare(self, payloads: Payloads) -> None:
        """Note whether all payloads are equal and hold a number other than 0; once.

        Args:
            payloads: of several workers.
        """
        if not self.is_due or payloads.workers < 2:
            return
        self.is_due = False
        first, *others = payloads.payloads
        is_same = all(torch.equal(first, other) for other in others)
        self._is_same = is_same and bool(payloads.coefficients(0).any())

    def refuse(self, what: object) -> None:
        """Raise `ConfigurationError` if they were equal.

        In the thread of the caller: one of a transport may take an error for a fault of the link.

        Args:
            what: was exchanged.
        """
        if not self._is_same:
            return
        raise ConfigurationError(
            f"use {what}",
            because="all workers did exactly the same work: something averages their gradients "
            "already (DDP or FSDP around them, a trainer that takes torchrun's processes for its "
            "own, an optimizer that reduces over the default group), or they read the same data",
            do="let each worker train by itself, without a process group that joins workers, and "
            "on its own data: outer.share numbers it",
        )
