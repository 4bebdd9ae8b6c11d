"""The Pareto front: variants that no other beats in both loss and bytes."""

import math
from collections.abc import Sequence
from typing import Final

from thinwire.runs.variants import Variant

_MANY: Final = 12
_BASELINES: Final = ("ddp", "diloco")


def senders(variants: Sequence[Variant]) -> list[Variant]:
    """The variants that send bytes, which a lone worker does not; all if none does.

    Args:
        variants: all.
    """
    return [variant for variant in variants if variant.sent_bytes] or list(variants)


def front_of(variants: Sequence[Variant]) -> list[Variant]:
    """The Pareto front of loss and bytes among the senders, by rising bytes."""
    sending = senders(variants)
    front = pareto_front([(variant.sent_bytes, variant.loss.mean) for variant in sending])
    return [sending[index] for index in front]


def first_shown(variants: Sequence[Variant]) -> list[int]:
    """Indices of the variants that a page shows first: of many, the front and the baselines."""
    front = front_of(variants)
    return [
        index
        for index, variant in enumerate(variants)
        if len(variants) <= _MANY or variant in front or variant.config.method in _BASELINES
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point is as good as in both and better in one.

    Args:
        points: both of their numbers are better if they are smaller.

    Returns:
        By the rising first number.

    >>> pareto_front([(1, 5), (2, 5), (3, 1), (2, 7)])
    [0, 2]
    """
    front: list[int] = []
    best = math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        x, y = points[index]
        if y < best or (front and points[front[-1]] == (x, y)):
            front.append(index)
            best = y
    return front
