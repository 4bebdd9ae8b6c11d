"""Methods that no other beats in both loss and bytes."""

from collections.abc import Sequence

from thinwire.report.arms import Arm
from thinwire.report.seeds import Estimate, estimate, pareto_front

__all__ = ["final_loss", "front_of", "senders", "sent_bytes"]


def final_loss(arm: Arm) -> Estimate:
    """Validation loss at the end, over seeds."""
    return estimate([run.summary["val_loss"] for run in arm.runs])


def sent_bytes(arm: Arm) -> float:
    """By a worker in the whole run, in the mean over seeds."""
    return estimate([run.summary["sent_bytes_per_worker"] for run in arm.runs]).mean


def senders(arms: Sequence[Arm]) -> list[Arm]:
    """Those that send something: a lone worker has nobody to spare bytes for.

    Args:
        arms: all; if none of them sends, they are all alike.
    """
    return [arm for arm in arms if sent_bytes(arm)] or list(arms)


def front_of(arms: Sequence[Arm]) -> list[Arm]:
    """The Pareto front of loss and bytes among those that send something, by rising bytes."""
    sending = senders(arms)
    front = pareto_front([(sent_bytes(arm), final_loss(arm).mean) for arm in sending])
    return [sending[index] for index in front]
