"""Aggregation: one pseudo-gradient from those of all workers."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire.blocks import (
    DenseVector,
    StreamedVector,
    VectorPart,
    all_finite,
    block_numel,
    pieces_of,
    spans,
)
from thinwire.codecs import BoundCodec
from thinwire.codecs.base import squared_norm_of
from thinwire.errors import NonFiniteError, check_range, check_whole
from thinwire.fragments.layout import Layout
from thinwire.rejection import Rejection, RejectReason

_FEWEST_FOR_A_MEDIAN = 3
# Bits of a factor that scales a contribution down.
_FACTOR_BITS = 12
_SMALLEST_NORMAL = 2.0**-126
# Means and transforms of numbers below this stay in the range of fp32.
_FAR = 1e36


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """The payloads of all workers in one round, still encoded.

    Args:
        coder: decodes them.
        payloads: one per worker, in rank order.
        round: number of the exchange in which they were encoded.
        scales: factors of each worker's tensors, fp32 [workers, tensors]; None for factors of 1.
        sizes: sizes of these tensors, in order.
        room: memory for `zeros`, of [numel] or more; allocated by default.
    """

    coder: BoundCodec
    payloads: Sequence[Tensor]
    round: int = 0
    scales: Tensor | None = None
    sizes: Sequence[int] = ()
    room: Tensor | None = None

    @property
    def workers(self) -> int:
        """K."""
        return len(self.payloads)

    @property
    def numel(self) -> int:
        """Size of a vector."""
        return self.coder.layout.numel

    def zeros(self) -> Tensor:
        """Zeros to add to, fp32 [numel]; with `room`, one vector at a time."""
        if self.room is not None:
            return self.room[: self.numel].zero_()
        return torch.zeros(self.numel, dtype=torch.float32, device=self.payloads[0].device)

    def coefficients(self, worker: int) -> Tensor:
        """The decoded payload of one worker, before the transform is inverted; read-only."""
        numbers = self.coder.coefficients(self.payloads[worker], self.round)
        if self.scales is None:
            return numbers
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device=numbers.device)
        scales = self.scales[worker].to(numbers.device)
        return numbers * scales.repeat_interleave(sizes, output_size=self.numel)

    def to_vector(self, coefficients: Tensor) -> Tensor:
        """Invert the transform of a sum of coefficients, in place: once, not K times."""
        return self.coder.to_vector(coefficients)

    def add_to(self, out: Tensor, *, weight: float) -> None:
        """out += weight * coefficients, in rank order; `out` is fp32 [numel]."""
        if self.scales is None:
            self.coder.add_to(out, self.payloads, weight=weight, round=self.round)
            return
        for worker in range(self.workers):
            out += self.coefficients(worker) * weight

    def add_and_count(self, out: Tensor, counts: Tensor, *, weight: float) -> None:
        """`add_to`, and counts += 1 for each worker whose coefficient is not zero."""
        if self.scales is None:
            self.coder.add_and_count(out, counts, self.payloads, weight, self.round)
            return
        for worker in range(self.workers):
            numbers = self.coefficients(worker)
            out += numbers * weight
            counts += numbers != 0

    def pieces(self, device: torch.device) -> Iterator[tuple[VectorPart, Payloads]]:
        """The payloads of each part of the vector in turn, on `device`."""
        pieces = self.coder.pieces
        room = torch.empty(
            max((p.part.numel for p in pieces), default=0), dtype=torch.float32, device=device
        )
        # A copy to CUDA has read unpinned memory when the call returns; one from CUDA may not.
        is_up = device.type == "cuda"
        for piece in pieces:
            sent = [p[piece.where].to(device, non_blocking=is_up) for p in self.payloads]
            one = Payloads(coder=piece.codec, payloads=sent, round=self.round, room=room)
            if self.scales is not None:
                runs = _runs(piece.part, self.coder.layout)
                scales = self.scales[:, [place for place, _ in runs]].to(device)
                one = dataclasses.replace(one, scales=scales, sizes=[count for _, count in runs])
            yield piece.part, one

    def is_finite(self, worker: int) -> bool:
        """True if all numbers of `worker` are finite."""
        pieces = self._only([worker]).pieces(self.payloads[worker].device)
        return all(all_finite(p.to_vector(p.coefficients(0))) for _, p in pieces)

    def largest(self, *, but: int | None = None) -> float:
        """A bound on the magnitude of all numbers; inf or NaN if one is not finite.

        Args:
            but: place of a worker whose numbers are known to be finite, and not examined.
        """
        others = [payload for place, payload in enumerate(self.payloads) if place != but]
        if not others:
            return 0.0
        return float(torch.stack([self.coder.largest(p, self.round) for p in others]).amax())

    @cached_property
    def norms(self) -> Tensor:
        """||Delta_k|| of every worker, before a transform is inverted, fp64 [workers]."""
        # Cached: several rules ask for norms, and computing them reads every payload.
        if self.scales is not None:
            return self.segment_norms(self.payloads[0].device).square().sum(1).sqrt()
        return torch.stack([self.coder.squared_norm(p, self.round) for p in self.payloads]).sqrt()

    def segment_norms(self, device: torch.device) -> Tensor:
        """The norms of each worker's tensors, fp64 [workers, segments of the layout].

        Squares overflow fp32 before the numbers do, hence fp64.
        """
        segments = len(self.coder.layout.segments)
        squares = torch.zeros(self.workers, segments, dtype=torch.float64, device=device)
        for part, sent in self.pieces(device):
            runs = _runs(part, self.coder.layout)
            for worker in range(self.workers):
                numbers = sent.coefficients(worker).split([count for _, count in runs])
                for (segment, _), values in zip(runs, numbers, strict=True):
                    squares[worker, segment] += squared_norm_of(values)
        return squares.sqrt()

    def scaled(self, scales: Tensor) -> Payloads:
        """These payloads, with every worker's tensors also multiplied by `scales`."""
        both = scales if self.scales is None else self.scales * scales
        sizes = [segment.numel for segment in self.coder.layout.segments]
        return dataclasses.replace(self, scales=both, sizes=sizes)

    def without(self, left_out: Collection[int]) -> Payloads:
        """These payloads, without the places in `left_out`."""
        return self._only([place for place in range(self.workers) if place not in left_out])

    def _only(self, kept: list[int]) -> Payloads:
        payloads = [self.payloads[place] for place in kept]
        scales = None if self.scales is None else self.scales[kept]
        return dataclasses.replace(self, payloads=payloads, scales=scales)


def _runs(part: VectorPart, layout: Layout) -> list[tuple[int, int]]:
    """The segments that a part runs over, in order, and how many of its numbers are in each."""
    starts = [segment.start for segment in layout.segments]
    return [(place, of_it.numel) for place, of_it in pieces_of(part, [*starts, layout.numel])]


class Aggregate(ABC):
    """A rule that combines the workers' vectors into one."""

    elementwise: bool
    """True if each coordinate of the result depends on the same coordinate of the payloads alone
    (or coefficient, with a transform). Then shards of a vector can be combined separately."""

    @abstractmethod
    def combine(self, received: Payloads) -> Tensor:
        """Combine all payloads into a new vector, fp32 [numel], in rank order.

        An elementwise rule is called once per part of the vector.
        """

    @property
    def allows_shards(self) -> bool:
        """True if the owner of a shard may combine it by this rule, without the other shards.

        By default true if the rule is elementwise. Results may differ from those of whole vectors.
        """
        return self.elementwise

    needs_all_numbers: bool = False
    """True if a number that was not sent must not count as zero; by default False."""

    def by_parts(self, received: Payloads) -> tuple[Aggregate, Payloads]:
        """A rule and payloads with the same result, where the rule takes the payloads unchanged.

        By default this rule and `received`. An elementwise rule is evaluated part by part.
        """
        return self, received

    def outliers(self, received: Payloads) -> dict[int, Rejection]:
        """The payloads to leave out before `combine`, by their place; by default none."""
        return {}

    def clipped(self, received: Payloads) -> dict[int, float]:
        """Factors below 1 by which `combine` scales contributions, by place; by default none.

        Args:
            received: without outliers.
        """
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanOverWorkers(Aggregate):
    """Delta = sum_k (1/K) Delta_k: the mean of DiLoCo (arXiv 2311.08105, Algorithm 1).

    Each term is scaled and rounded before it is added, in rank order, so that a fused multiply-add,
    which only some machines would use, cannot make the workers' bits differ.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.ones(2)), coder.encode(torch.zeros(2))]
    >>> MeanOverWorkers().combine(Payloads(coder=coder, payloads=sent))
    tensor([0.5000, 0.5000])
    """

    elementwise = True

    def combine(self, received: Payloads) -> Tensor:
        """The mean, summed in rank order."""
        out = received.zeros()
        received.add_to(out, weight=1.0 / received.workers)
        return received.to_vector(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanOverSenders(Aggregate):
    """Delta_i = (sum_k Delta_ki) / (number of workers with Delta_ki != 0).

    A coordinate that one of eight workers sent is not divided by eight. With dense codecs it is the
    mean over all workers. If the codec has a transform, coefficients are counted and divided, and
    the result is transformed back.

    Source: SparseLoCo's released code; its paper (arXiv 2508.15706) divides by K. Differs: a value
    that was sent and decodes to zero counts as not sent.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.tensor([4.0, 0.0])), coder.encode(torch.tensor([2.0, 6.0]))]
    >>> MeanOverSenders().combine(Payloads(coder=coder, payloads=sent))
    tensor([3., 6.])
    """

    elementwise = True

    def combine(self, received: Payloads) -> Tensor:
        """The sum over the count, in rank order."""
        workers, total = received.workers, received.zeros()
        senders = torch.zeros_like(total)
        # Divided by K before summing: a plain sum may leave the range of fp32.
        received.add_and_count(total, senders, weight=1.0 / workers)
        total.mul_(senders.clamp_(min=1).reciprocal_().mul_(workers))
        return received.to_vector(total)


class _Around(Aggregate):
    """A rule that changes the payloads and lets another rule combine them."""

    aggregate: Aggregate

    def _changed(self, received: Payloads) -> Payloads:
        """The payloads for `aggregate`; by default unchanged."""
        return received

    def combine(self, received: Payloads) -> Tensor:
        """Combine the changed payloads by `aggregate`."""
        return self.aggregate.combine(self._changed(received))

    def by_parts(self, received: Payloads) -> tuple[Aggregate, Payloads]:
        """Those of `aggregate`, for the changed payloads."""
        return self.aggregate.by_parts(self._changed(received))

    @property
    def allows_shards(self) -> bool:
        """Equal to that of `aggregate`."""
        return self.aggregate.allows_shards

    @property
    def needs_all_numbers(self) -> bool:
        """Equal to that of `aggregate`."""
        return self.aggregate.needs_all_numbers

    def outliers(self, received: Payloads) -> dict[int, Rejection]:
        """Those of `aggregate`."""
        return self.aggregate.outliers(received)

    def clipped(self, received: Payloads) -> dict[int, float]:
        """Those of `aggregate`."""
        return self.aggregate.clipped(self._changed(received))


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianNormClip(_Around):
    """Scales every worker's tensors down to the median norm, then combines them.

    Delta_k -> min(1, median_j ||Delta_j|| / ||Delta_k||) Delta_k, tensor by tensor

    A worker's tensor is never scaled up. The median of an even number of norms is the lower of the
    two in the middle. Methods with an explicit reduce-scatter refuse it. If the codec has a
    transform, norms are those of coefficients: the tensor's own if it is made of whole blocks.

    `MedianNormClip()` divides by the number of workers, as Covenant-72B's paper does.
    `MedianNormClip(aggregate=MeanOverSenders())` is what its deployed code (templar) computes: a
    number is divided by the count of workers that sent it. If few workers send the same places, the
    two differ by up to a factor of K.

    Args:
        aggregate: combines the clipped contributions; its outliers are judged before clipping.

    Source: SparseLoCo for Covenant-72B (arXiv 2603.08163), and templar's released code. Differs: a
    value that was sent and decodes to zero counts as not sent.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.tensor([x, 0.0])) for x in (1.0, 1.0, 100.0)]
    >>> sent.append(coder.encode(torch.tensor([0.0, 1.0])))
    >>> MedianNormClip().combine(Payloads(coder=coder, payloads=sent))
    tensor([0.7500, 0.2500])
    >>> MedianNormClip(aggregate=MeanOverSenders()).combine(Payloads(coder=coder, payloads=sent))
    tensor([1., 1.])
    """

    aggregate: Aggregate = field(default_factory=MeanOverWorkers)

    elementwise = False
    allows_shards = Aggregate.allows_shards

    # Most workers have a tensor above its median, so `clipped` does not list them.
    def _changed(self, received: Payloads) -> Payloads:
        norms = received.segment_norms(received.payloads[0].device)
        # Not median(), which torch.use_deterministic_algorithms() refuses on a GPU.
        median = norms.sort(0).values[(len(norms) - 1) // 2]
        scales = torch.where(norms > median, median / norms, torch.ones_like(norms))
        return received.scaled(scales.float())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimmedMean(Aggregate):
    """The mean over workers of each number, without the `trim` highest and the `trim` lowest.

    Delta_i = (1/(K - 2b)) sum of Delta_(b+1)i ... Delta_(K-b)i, which are the Delta_ki sorted,
    with b = min(trim, (K - 1) // 2)

    While at most b of K workers are dishonest, each number of the result lies between the lowest
    and the highest that an honest worker sent, whatever the dishonest ones send. With two workers
    nothing can be trimmed, and the result is their mean. With K = 2 b + 1 it is the median.

    It needs every number of every worker: a codec that leaves numbers out is refused, since mostly
    zeros would be kept. If the codec has a transform, coefficients are trimmed. One block of every
    worker is decoded at a time, which takes K blocks of memory. The rule discards what honest
    workers agree on least; docs/security.md shows what that costs.

    Args:
        trim: b, from 1.

    Raises:
        ConfigurationError: `trim` is no whole number from 1.

    Source: Yin et al. (arXiv 1803.01498), Definition 2. Differs: b is a count, and smaller if there
    are few workers.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(2))
    >>> sent = [coder.encode(torch.tensor(x)) for x in ([1.0, 2.0], [3.0, 4.0], [-99.0, 99.0])]
    >>> TrimmedMean().combine(Payloads(coder=coder, payloads=sent))
    tensor([1., 4.])
    """

    trim: int = 1

    def __post_init__(self) -> None:
        check_whole("trim of TrimmedMean", self.trim)

    elementwise = True

    needs_all_numbers = True

    def combine(self, received: Payloads) -> Tensor:
        """The trimmed mean; a place's numbers are added in an order that depends on them alone."""
        workers = received.workers
        trim = min(self.trim, (workers - 1) // 2)
        if trim == 0:
            return MeanOverWorkers().combine(received)
        rows, out = [received.coefficients(worker) for worker in range(workers)], received.zeros()
        # Comparisons copy, so they take no more than a block of all rows at a time.
        for part in spans(0, len(out), max(1, block_numel(out.device) // workers)):
            kept, total = [part.read(row) for row in rows], part.read(out)
            for _ in range(trim):
                kept = _without_extremes(kept)
            for row in kept:
                total += row * (1.0 / len(kept))
        return received.to_vector(out)


def _without_extremes(rows: Sequence[Tensor]) -> list[Tensor]:
    """`rows` without the lowest and the highest number of each place.

    Comparing row with row is several times faster than sorting places of a few numbers each.

    >>> _without_extremes([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0]), torch.zeros(2)])
    [tensor([1., 1.])]
    """
    lowest, *others = rows
    higher: list[Tensor] = []
    for row in others:
        higher.append(torch.maximum(lowest, row))
        lowest = torch.minimum(lowest, row)
    highest, *others = higher
    between: list[Tensor] = []
    for row in others:
        between.append(torch.minimum(highest, row))
        highest = torch.maximum(highest, row)
    return between


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipNorms(_Around):
    """Scales contributions longer than `limit` times the median down to that, then combines.

    m = median_j ||Delta_j||;  s_k = min(1, limit m / ||Delta_k||);  Delta_k -> s_k Delta_k

    In a mean over K workers no contribution then weighs more than the bound

        || (1/K) s_k Delta_k || <= limit m / K

    whatever worker k sent, for any K and in every round. The median is over the contributions that
    are not 0, and of an even number it is the lower of the two in the middle: while at most half of
    them are dishonest, m is at most the norm of the longest honest one. Of two workers the longer
    is scaled to `limit` times the shorter, so one can hold the other back, but not pull harder. It
    bounds how far a member pulls, not in which direction. If none exceeds the limit, the result is
    that of `aggregate`, bit for bit.

    A norm covers one exchange: one fragment, if there are several, and one rank's part, if a
    worker's parameters are sharded. With a transform it is the norm of the coefficients, which is
    the same. Factors are rounded down to 12 bits, so that machines that add squares in another
    order get the same factors.

    Under an explicit reduce-scatter the owner of a shard s sees only that shard, and the bound is
    limit (sum_s m_s^2)^(1/2) / K. It then holds only for what members send to honest owners: an
    owner can return any shard. `Automatic` gathers.

    Args:
        limit: largest norm, as a multiple of the median norm; inf clips nothing.
        aggregate: combines the contributions; its outliers are judged before they are scaled.

    Raises:
        ConfigurationError: the limit is below 1 or not a number.

    Source: norm clipping of Sun et al. (arXiv 1911.07963) and Karimireddy et al. (arXiv 2012.10333,
    around 0). Differs: the threshold follows the round's median, as in Covenant-72B (arXiv
    2603.08163), there tensor by tensor with a limit of 1.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(1))
    >>> sent = [coder.encode(torch.tensor([x])) for x in (1.0, 1.0, 64.0)]
    >>> ClipNorms(limit=2.0).combine(Payloads(coder=coder, payloads=sent))
    tensor([1.3333])
    """

    limit: float = 2.0
    aggregate: Aggregate = field(default_factory=MeanOverWorkers)

    def __post_init__(self) -> None:
        # Below 1 even the median contribution would be scaled down.
        check_range("limit of ClipNorms", self.limit, least=1, most=math.inf)

    elementwise = False  # a shard would be clipped by its own norms

    def clipped(self, received: Payloads) -> dict[int, float]:
        """Factors below 1, those of `aggregate` included."""
        own = self._factors(received)
        inner = self.aggregate.clipped(self._changed(received))
        return {k: own.get(k, 1.0) * inner.get(k, 1.0) for k in sorted({*own, *inner})}

    def _factors(self, received: Payloads) -> dict[int, float]:
        norms: list[float] = received.norms.tolist()
        counted = sorted(norm for norm in norms if math.isfinite(norm) and norm > 0)
        if not counted:
            return {}
        longest = self.limit * counted[(len(counted) - 1) // 2]
        return {
            worker: _rounded_down(longest / norm)
            for worker, norm in enumerate(norms)
            if math.isfinite(norm) and norm > longest
        }

    def _changed(self, received: Payloads) -> Payloads:
        factors = self._factors(received)
        if not factors:
            return received
        tensors = len(received.coder.layout.segments)
        scales = [[factors.get(worker, 1.0)] * tensors for worker in range(received.workers)]
        return received.scaled(
            torch.tensor(scales, dtype=torch.float32, device=received.payloads[0].device)
        )


def _rounded_down(factor: float) -> float:
    """Round down to 12 significant bits, and to 0 where fp32 has fewer bits.

    >>> _rounded_down(0.75), _rounded_down(1 / 3) * 3, _rounded_down(1e-40)
    (0.75, 0.999755859375, 0.0)
    """
    if factor < _SMALLEST_NORMAL:
        return 0.0
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(math.floor(math.ldexp(mantissa, _FACTOR_BITS)), exponent - _FACTOR_BITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DropOutliers(_Around):
    """Leaves out contributions longer than `limit` times the median, then combines the rest.

    Worker k is left out if ||Delta_k|| > limit * median_j ||Delta_j|| and three or more take part.
    The median of an even number of norms is the lower of the two in the middle. Under
    reduce-scatter the owner of a shard sees only that shard, and judges it alone.

    Args:
        limit: largest norm, as a multiple of the median norm.
        aggregate: combines the rest.

    Raises:
        ConfigurationError: the limit is not finite or below 1.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.fragments.layout import Layout
    >>> coder = Identity().bind(Layout.vector(1))
    >>> sent = [coder.encode(torch.tensor([x])) for x in (1.0, 2.0, 100.0)]
    >>> mean, left_out = aggregate_valid(DropOutliers(), Payloads(coder=coder, payloads=sent))
    >>> mean.whole(), list(left_out)
    (tensor([1.5000]), [2])
    """

    limit: float = 10.0
    aggregate: Aggregate = field(default_factory=MeanOverWorkers)

    def __post_init__(self) -> None:
        # Below 1 even the median contribution would be dropped.
        check_range("limit of DropOutliers", self.limit, least=1)

    @property
    def elementwise(self) -> bool:
        """Equal to that of `aggregate`."""
        return self.aggregate.elementwise

    def outliers(self, received: Payloads) -> dict[int, Rejection]:
        """Payloads beyond the limit, and outliers of the inner aggregate."""
        found = self.aggregate.outliers(received)
        if received.workers < _FEWEST_FOR_A_MEDIAN:
            return found
        norms: list[float] = received.norms.tolist()
        median = sorted(n if math.isfinite(n) else math.inf for n in norms)[(len(norms) - 1) // 2]
        # A median of 0 means that most sent zeros; any other norm would then be an outlier.
        return found | {
            worker: Rejection(
                reason=RejectReason.OUTLIER, detail=f"{norm:.3g}, and the median is {median:.3g}"
            )
            for worker, norm in enumerate(norms)
            if math.isfinite(norm) and norm > self.limit * median > 0
        }


def aggregate_valid(
    aggregate: Aggregate,
    received: Payloads,
    device: torch.device | None = None,
    *,
    mine: int | None = None,
) -> tuple[StreamedVector, dict[int, Rejection]]:
    """Combine the payloads that are finite and not outliers by the rule of `aggregate`.

    Args:
        aggregate: the rule.
        received: payloads on any device.
        device: device of the result; default the CPU.
        mine: place of this worker's payload, if it was checked before it was sent.

    Returns:
        The combined vector, and the rejections of payloads that are not in it, by place.

    Raises:
        ExchangeError: a payload is not the codec's.
        NonFiniteError: no payload is finite, or their sum overflows fp32.
    """
    device = device or torch.device("cpu")
    rejected = aggregate.outliers(received)
    kept = received.without(rejected) if rejected else received
    # Neither a mean nor an orthonormal transform of such numbers overflows.
    if kept.largest(but=None if rejected else mine) < _FAR:
        return combined(aggregate, kept, device), rejected
    sent = [w for w in range(received.workers) if w not in rejected]
    # Checked first: a rule that trims the highest numbers could hide one that is not finite.
    bad = [w for w in sent if not received.is_finite(w)]
    if not bad:
        vector = combined(aggregate, kept, device).whole()
        if bool(vector.isfinite().all()):
            return DenseVector(vector), rejected
    rejected |= {w: Rejection(reason=RejectReason.NOT_FINITE) for w in bad}
    if not bad or len(rejected) == received.workers:
        raise NonFiniteError(
            "combine what the workers sent",
            because="none of it is finite" if bad else "the sum leaves the range of fp32",
            do="resume from the last checkpoint with a lower inner learning rate",
        )
    return combined(aggregate, received.without(rejected), device), rejected


def clipped_of(
    aggregate: Aggregate, received: Payloads, rejected: Collection[int]
) -> dict[int, float]:
    """Factors by which `aggregate_valid` scaled contributions down, by place in `received`.

    Args:
        aggregate: the rule.
        received: the argument of `aggregate_valid`.
        rejected: the places that `aggregate_valid` left out.
    """
    kept = [place for place in range(received.workers) if place not in rejected]
    left = received.without(rejected) if rejected else received
    return {kept[place]: factor for place, factor in aggregate.clipped(left).items()}


def combined(aggregate: Aggregate, received: Payloads, device: torch.device) -> StreamedVector:
    """Combine `received` by `aggregate`, part by part if the rule is elementwise."""
    rule, sent = aggregate.by_parts(received)
    if not rule.elementwise:
        payloads = [payload.to(device) for payload in sent.payloads]
        return DenseVector(rule.combine(dataclasses.replace(sent, payloads=payloads)))

    def blocks() -> Iterator[tuple[VectorPart, Tensor]]:
        for part, piece in sent.pieces(device):
            yield part, rule.combine(piece)

    return StreamedVector(received.numel, device, blocks)
