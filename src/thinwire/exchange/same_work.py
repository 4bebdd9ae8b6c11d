"""Warns if all workers send the same: then they do not train apart."""

import warnings

import torch

from thinwire.aggregate import Payloads
from thinwire.errors import SameWorkWarning


def is_same_work(payloads: Payloads) -> bool:
    """True if the payloads of several workers are equal and not all 0.

    Data parallelism around the workers averages their gradients at every step, and workers with the
    same data compute the same. Rounds, bytes and losses of such a run look right, but it is a run
    of one worker.
    """
    # This worker's own may be on its device, and those of the others in the host's memory.
    first, *others = (payload.cpu() for payload in payloads.payloads)
    is_same = all(torch.equal(first, other) for other in others)
    return is_same and bool(payloads.coefficients(0).any())


def warn_of_same_work() -> None:
    """Warn, in the thread of the caller.

    Where warnings are errors, a transport's own thread may take one for a fault of the link.
    """
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
