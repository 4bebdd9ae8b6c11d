"""How far workers agree: norms of their pseudo-gradients, and the cosine between them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["mean_cosine", "mean_norm", "norm"]


def norm(parts: Iterable[Tensor]) -> float:
    """||x|| of a vector that lies in several parts, summed in fp64.

    Args:
        parts: of any shape; none have the norm 0.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    5.0
    """
    return sum(float(part.double().square().sum()) for part in parts) ** 0.5


def mean_norm(vectors: Sequence[Tensor]) -> float:
    """(1/K) sum_k ||d_k||.

    Args:
        vectors: d_k, K >= 1 of them.

    >>> mean_norm([torch.tensor([3.0, 4.0]), torch.zeros(2)])
    2.5
    """
    return sum(norm([vector]) for vector in vectors) / len(vectors)


def mean_cosine(vectors: Sequence[Tensor]) -> float | None:
    """The mean cosine between two different workers, from one sum instead of K (K - 1) / 2 pairs.

    (||sum_k d_k / ||d_k|| ||^2 - K) / (K (K - 1))

    Args:
        vectors: d_k, [n] each.

    Returns:
        None of fewer than two, or where one is zero or not finite and so has no direction.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    >>> round(mean_cosine(list(vectors)), 6)
    0.333333
    """
    workers, norms = len(vectors), [norm([vector]) for vector in vectors]
    if workers < 2 or not all(0 < length < float("inf") for length in norms):
        return None
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, length in zip(vectors, norms, strict=True):
        total += vector.double() / length
    pairs = workers * (workers - 1)
    return max(-1.0, min(1.0, (norm([total]) ** 2 - workers) / pairs))
