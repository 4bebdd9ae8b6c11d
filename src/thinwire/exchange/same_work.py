"""Did the workers train apart? If all of them send the same, something made them equal."""

from __future__ import annotations

import warnings

import torch

from thinwire.aggregate import Payloads
from thinwire.errors import SameWorkWarning


class SameWorkCheck:
    """Compares the payloads of an exchange's first round.

    Data parallelism around the workers averages their gradients at every step, and workers with the
    same data compute the same. Rounds, bytes and losses of such a run look right, and it is a run
    of one worker.

    Args:
        is_due: whether to compare at all.
    """

    def __init__(self, *, is_due: bool) -> None:
        self._is_due, self._is_same = is_due, False

    def compare(self, payloads: Payloads) -> None:
        """Note, once, whether the payloads of several workers are equal and hold a number but 0."""
        if not self._is_due or payloads.workers < 2:
            return
        self._is_due = False
        # This worker's own may be on its device, and those of the others in the host's memory.
        first, *others = (payload.cpu() for payload in payloads.payloads)
        is_same = all(torch.equal(first, other) for other in others)
        self._is_same = is_same and bool(payloads.coefficients(0).any())

    def warn(self) -> None:
        """Warn once if they were equal.

        In the thread of the caller: where warnings are errors, a transport's own may take one for a
        fault of the link.
        """
        if not self._is_same:
            return
        self._is_same = False
        warnings.warn(
            "all workers sent exactly the same in the first round; because they train on the same "
            "data, or something averages their gradients already (DDP or FSDP around them, a "
            "trainer that takes torchrun's processes for its own, an optimizer that reduces over "
            "the default group), so the exchange adds nothing and the run goes on as one worker's; "
            "do: pass each worker its own share of the data (outer.share numbers it), and let each "
            "train without a process group that joins workers",
            SameWorkWarning,
            stacklevel=1,  # one place: Python shows it once, however many fragments find the same
        )
