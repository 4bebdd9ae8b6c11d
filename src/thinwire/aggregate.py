"""Aggregation: one pseudo-gradient from those of all workers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch import Tensor

__all__ = ["Aggregate", "MeanOverWorkers", "mean_in_rank_order"]


def mean_in_rank_order(contributions: Iterable[Tensor], *, workers: int) -> Tensor:
    """Delta = sum_k (1/K) Delta_k, added in the order given.

    Each term is scaled first and then only added: no fused multiply-add can be chosen on one
    machine and not on another, so replicas stay bit-identical.

    Args:
        contributions: K fp32 vectors [numel] in rank order; not modified.
        workers: K.

    >>> import torch
    >>> mean_in_rank_order([torch.tensor([1.0]), torch.tensor([3.0])], workers=2)
    tensor([2.])
    """
    terms = iter(contributions)
    total = next(terms) * (1.0 / workers)
    for term in terms:
        total += term * (1.0 / workers)
    return total


class Aggregate(ABC):
    """A rule for combining what the workers sent."""

    @abstractmethod
    def combine(self, contributions: Iterable[Tensor], *, workers: int) -> Tensor:
        """Combine `workers` decoded vectors [numel] (fp32, rank order) into a new one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MeanOverWorkers(Aggregate):
    """Delta = (1/K) sum_k Delta_k, the mean of DiLoCo (arXiv 2311.08105, Algorithm 1).

    >>> import torch
    >>> MeanOverWorkers().combine([torch.ones(2), torch.zeros(2)], workers=2)
    tensor([0.5000, 0.5000])
    """

    def combine(self, contributions: Iterable[Tensor], *, workers: int) -> Tensor:
        """The mean, summed in rank order."""
        return mean_in_rank_order(contributions, workers=workers)
