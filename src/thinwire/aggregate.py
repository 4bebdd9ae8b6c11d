"""Aggregation: one pseudo-gradient from those of all workers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.codecs import BoundCodec
from thinwire.errors import NonFiniteError
from thinwire.rejection import Rejection, RejectReason

__all__ = [
    "Aggregate",
    "MeanOverSenders",
    "MeanOverWorkers",
    "MedianNormClip",
    "Payloads",
    "aggregate_valid",
]

_FEWEST_FOR_A_MEDIAN = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Payloads:
    """What the workers sent, still encoded.

    Args:
        coder: that decodes it.
        payloads: one per worker, in rank order, all on one device.
    """

    coder: BoundCodec
    payloads: Sequence[Tensor]

    @property
    def workers(self) -> int:
        """K."""
        return len(self.payloads)

    def zeros(self) -> Tensor:
        """A vector to add to: fp32 [numel]."""
        return torch.zeros(self.coder.layout.numel, device=self.payloads[0].device)

    def decode(self, worker: int) -> Tensor:
        """What one worker sent, fp32 [numel]; not to be changed."""
        return self.coder.decode(self.payloads[worker])


class Aggregate(ABC):
    """A rule for combining what the workers sent."""

    @abstractmethod
    def combine(self, received: Payloads) -> Tensor:
        """One new vector [numel] (fp32) from all payloads, in rank order."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MeanOverWorkers(Aggregate):
    """Delta = sum_k (1/K) Delta_k: the mean of DiLoCo (arXiv 2311.08105, Algorithm 1).

    Each term is scaled first and then only added, in rank order: no fused multiply-add can be
    chosen on one machine and not on another, so replicas stay bit-identical.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.ones(2)), coder.encode(torch.zeros(2))]
    >>> MeanOverWorkers().combine(Payloads(coder=coder, payloads=sent))
    tensor([0.5000, 0.5000])
    """

    def combine(self, received: Payloads) -> Tensor:
        """The mean, summed in rank order."""
        out = received.zeros()
        received.coder.add_to(out, received.payloads, weight=1.0 / received.workers)
        return out


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MeanOverSenders(Aggregate):
    """Delta_i = (sum_k Delta_ki) / (number of workers with Delta_ki != 0).

    A coordinate that one of eight workers sent is not divided by eight. With dense codecs it is the
    mean over all workers.

    Source: SparseLoCo's released code; its paper (arXiv 2508.15706) divides by K. Differs: a value
    that was sent and decodes to zero counts as not sent.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.tensor([4.0, 0.0])), coder.encode(torch.tensor([2.0, 6.0]))]
    >>> MeanOverSenders().combine(Payloads(coder=coder, payloads=sent))
    tensor([3., 6.])
    """

    def combine(self, received: Payloads) -> Tensor:
        """The sum over the count, in rank order."""
        workers = received.workers
        total, senders = received.zeros(), received.zeros()
        for worker in range(workers):
            values = received.decode(worker)
            total += values * (1.0 / workers)
            senders += values != 0
        # A sum of terms over K, times K over the senders: the sum itself may leave the range.
        return total * (workers / senders.clamp_(min=1))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MedianNormClip(Aggregate):
    """Delta = sum_k (1/K) min(1, median_j ||Delta_j|| / ||Delta_k||) Delta_k, tensor by tensor.

    A worker's tensor is only ever scaled down. The median of an even number of norms is the lower
    of the two in the middle.

    Source: SparseLoCo as deployed for Covenant-72B (arXiv 2603.08163).

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(1))
    >>> sent = [coder.encode(torch.tensor([x])) for x in (1.0, 1.0, 100.0)]
    >>> MedianNormClip().combine(Payloads(coder=coder, payloads=sent))
    tensor([1.])
    """

    def combine(self, received: Payloads) -> Tensor:
        """The mean of the clipped vectors, in rank order."""
        norms = torch.stack([self._norms(received, w) for w in range(received.workers)])
        median = norms.median(0).values
        scales = torch.where(norms > median, median / norms, torch.ones_like(norms))
        out = received.zeros()
        for worker in range(received.workers):
            values = received.decode(worker)
            for s, scale in zip(received.coder.layout.segments, scales[worker], strict=True):
                part = values[s.start : s.stop] * scale.float()
                out[s.start : s.stop] += part * (1.0 / received.workers)
        return out

    def _norms(self, received: Payloads, worker: int) -> Tensor:
        """Of every tensor, in fp64: squares leave the range of fp32 long before numbers do."""
        values = received.decode(worker)
        norms = values.new_zeros(len(received.coder.layout.segments), dtype=torch.float64)
        for i, s in enumerate(received.coder.layout.segments):
            norms[i] = torch.linalg.vector_norm(values[s.start : s.stop], dtype=torch.float64)
        return norms


def aggregate_valid(
    aggregate: Aggregate, received: Payloads, *, norm_limit: float = math.inf
) -> tuple[Tensor, dict[int, Rejection]]:
    """Combine what is finite and of a usual length; returns it and whom that leaves out, by place.

    Args:
        aggregate: the rule.
        received: what the workers sent.
        norm_limit: a contribution longer than this many times the median is left out, if there are
            three or more; the median of an even number is the lower of the two in the middle.

    Raises:
        NonFiniteError: no worker's payload is finite.
    """
    flaws = _outsized(received, norm_limit)
    combined = aggregate.combine(_without(received, flaws))
    # One sum costs little, and a finite sum proves every term finite.
    if bool(torch.isfinite(combined.sum())) or bool(torch.isfinite(combined).all()):
        return combined, flaws
    sent = range(received.workers)
    bad = [w for w in sent if w not in flaws and not _is_finite(received.decode(w))]
    flaws |= {w: Rejection(fault=RejectReason.NOT_FINITE) for w in bad}
    if not bad or len(flaws) == received.workers:
        raise NonFiniteError(
            "combine what the workers sent",
            because="finite terms have no finite sum" if not bad else "none of it is finite",
            do="resume from the last checkpoint with a lower inner learning rate",
        )
    return aggregate.combine(_without(received, flaws)), flaws


def _outsized(received: Payloads, limit: float) -> dict[int, Rejection]:
    if limit == math.inf or received.workers < _FEWEST_FOR_A_MEDIAN:
        return {}
    vectors = (received.decode(w) for w in range(received.workers))
    norms = [float(torch.linalg.vector_norm(v, dtype=torch.float64)) for v in vectors]
    median = sorted(n if math.isfinite(n) else math.inf for n in norms)[(len(norms) - 1) // 2]
    return {
        w: Rejection(
            fault=RejectReason.OUTSIZED, detail=f"{norm:.3g}, and the median is {median:.3g}"
        )
        for w, norm in enumerate(norms)
        # Where most sent zeros, nobody can say what is usual.
        if math.isfinite(norm) and norm > limit * median > 0
    }


def _without(received: Payloads, flaws: Mapping[int, Rejection]) -> Payloads:
    if not flaws:
        return received
    kept = [p for w, p in enumerate(received.payloads) if w not in flaws]
    return Payloads(coder=received.coder, payloads=kept)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
