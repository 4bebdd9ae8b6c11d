"""Aggregation rules against loops over workers and elements."""

import itertools
import math
from dataclasses import replace
from statistics import median_low

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import exchanges
import thinwire as tw
from thinwire import codecs
from thinwire.aggregate import Payloads, aggregate_valid
from thinwire.blocks import DenseVector
from thinwire.exchange import ExchangeState
from thinwire.fragments.layout import Layout
from thinwire.rejection import RejectReason
from toy import same_bits

LAYOUT = Layout.of({"w": (6, 7), "b": (7,), "none": (0,), "one": ()})
RULES = [tw.MeanOverWorkers(), tw.MeanOverSenders(), tw.MedianNormClip()]
DEPLOYED = tw.MedianNormClip(aggregate=tw.MeanOverSenders())
ELEMENTWISE = [*RULES[:2], tw.DropOutliers()]
REDUCED = tw.ReduceScatter(owner_feedback=tw.ErrorFeedback())


def pairs(*workers: int) -> list[tuple[codecs.Codec, int]]:
    return list(zip(exchanges.CODECS, itertools.cycle(workers)))


def vectors(workers: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(workers, LAYOUT.numel, generator=torch.Generator().manual_seed(seed)))


def received(
    sent: list[Tensor], codec: codecs.Codec | None = None, layout: Layout = LAYOUT
) -> Payloads:
    coder = (codec or codecs.Identity()).bind(layout)
    return Payloads(coder=coder, payloads=[coder.encode(x) for x in sent])


def decoded(got: Payloads, worker: int) -> Tensor:
    return got.to_vector(got.coefficients(worker))


def reference_mean(sent: list[Tensor]) -> Tensor:
    out = torch.zeros(LAYOUT.numel)
    for x in sent:
        out = out + x * (1.0 / len(sent))
    return out


def reference_over_senders(sent: list[Tensor]) -> Tensor:
    out = torch.zeros_like(sent[0])
    for i in range(len(out)):
        values = [float(x[i]) for x in sent if float(x[i]) != 0.0]
        out[i] = sum(values) / len(values) if values else 0.0
    return out


def clipped(sent: list[Tensor]) -> list[Tensor]:
    """Tensor by tensor, in fp64: what is longer than the lower median is brought down to it."""
    out = [x.double() for x in sent]
    for s in LAYOUT.segments:
        parts = [x[s.start : s.stop] for x in out]
        norms = [float(part.norm()) for part in parts]
        for part, norm in zip(parts, norms, strict=True):
            part *= median_low(norms) / norm if norm > median_low(norms) else 1.0
    return out


def reference_clip(sent: list[Tensor]) -> Tensor:
    return reference_mean([x.float() for x in clipped(sent)])


REFERENCES = [reference_mean, reference_over_senders, reference_clip]


@pytest.mark.parametrize(("rule", "reference"), list(zip(RULES, REFERENCES, strict=True)))
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_rules_follow_their_loops(rule, reference, workers: int) -> None:
    sent = vectors(workers)
    for worker, x in enumerate(sent):
        x *= 3.0**worker
        x[torch.arange(len(x)) % (worker + 2) == 0] = 0.0
    expected = reference(sent)
    assert torch.allclose(rule.combine(received(sent)), expected, rtol=1e-5, atol=1e-5)
    for other in REFERENCES:
        if other is not reference and workers > 2:
            assert not torch.allclose(other(sent), expected, rtol=1e-3, atol=1e-3)


# -- over senders --------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "workers"), pairs(1, 2, 3, 8))
def test_senders_are_counted_as_in_dense_vectors_to_the_last_bit(codec, workers: int) -> None:
    layout = Layout.of({"w": (130, 70), "none": (0,), "b": (7,), "one": ()})
    coder, draws = codec.bind(layout), torch.Generator().manual_seed(workers)
    sent = torch.randn(workers, layout.numel, generator=draws)
    sent[0, ::2], sent[-1, 5] = 0.0, float("inf") if codec == codecs.Identity() else 1.0
    got = Payloads(coder=coder, payloads=[coder.encode(x) for x in sent], round=3)
    total, senders = torch.zeros(layout.numel), torch.zeros(layout.numel)
    for worker in range(workers):
        values = decoded(got, worker)
        total += values * (1.0 / workers)
        senders += values != 0
    combined = tw.MeanOverSenders().combine(got)
    assert torch.equal(combined, total * (workers / senders.clamp(min=1)))
    assert torch.equal(combined.signbit(), total.signbit())
    if workers > 1 and isinstance(codec, codecs.TopK):  # the control: places differ
        assert not torch.equal(combined, total)


SPARSE_DCT = codecs.TopK(k=512, values=codecs.F32(), transform=codecs.DCT())


def test_coefficients_are_clipped_and_counted_and_not_numbers() -> None:
    """As deployed, with a transform: scaled, counted and divided before it is transformed back."""
    got = received([x * (10.0 if k == 2 else 1.0) for k, x in enumerate(vectors(3))], SPARSE_DCT)
    coefficients = [got.coder.coefficients(payload) for payload in got.payloads]
    found = []
    for rule, sent in ((tw.MeanOverSenders(), coefficients), (DEPLOYED, clipped(coefficients))):
        found.append(rule.combine(got))
        expected = got.to_vector(reference_over_senders(sent).float())
        assert torch.allclose(found[-1], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(*found, atol=0.1)
    # Transformed back, every worker's vector is dense, and counting that divides by all of them.
    dense = reference_over_senders([decoded(got, worker) for worker in range(3)])
    assert not torch.allclose(found[0], dense, atol=0.1)


# -- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_zeros_and_norms_whose_squares_leave_fp32(scale: float) -> None:
    sent = [scale * x for x in vectors(3)]
    expected = scale * tw.MedianNormClip().combine(received(vectors(3)))
    assert torch.allclose(tw.MedianNormClip().combine(received(sent)), expected, rtol=1e-5, atol=0)
    alike = [sent[0]] * 4  # which are left as they are
    assert torch.equal(tw.MedianNormClip().combine(received(alike)), reference_mean(alike))


def test_scaled_payloads_stay_with_their_workers() -> None:
    got = received(vectors(3), codecs.TopK(k=512))
    scales = torch.rand(3, len(LAYOUT.segments), generator=torch.Generator().manual_seed(1))
    scaled = got.scaled(scales).scaled(2.0 * torch.ones_like(scales))
    for kept, worker in enumerate((0, 2)):
        expected = decoded(got, worker).clone()
        for s, scale in zip(LAYOUT.segments, scales[worker], strict=True):
            expected[s.start : s.stop] *= 2.0 * scale
        assert torch.equal(decoded(scaled.without([1]), kept), expected)
    assert not torch.equal(decoded(scaled, 1), decoded(got, 1))


@pytest.mark.parametrize("inner", [DEPLOYED, tw.ClipNorms(aggregate=tw.MeanOverSenders())])
def test_outliers_are_dropped_before_the_rest_is_clipped_and_divided_by_senders(inner) -> None:
    sent = vectors(4)
    sent[2], sent[3] = 3.0 * sent[2], 1000.0 * sent[3]
    got = received(sent, codecs.TopK(k=512))
    rule = tw.DropOutliers(limit=10.0, aggregate=inner)
    combined, left_out = aggregate_valid(rule, got)
    assert list(left_out) == [3]
    assert torch.equal(combined.whole(), inner.combine(got.without([3])))
    assert not torch.equal(combined.whole(), inner.aggregate.combine(got.without([3])))
    inside = replace(inner, aggregate=tw.DropOutliers(aggregate=tw.MeanOverSenders()))
    assert list(aggregate_valid(inside, got)[1]) == [3]


# -- a bound on each contribution ----------------------------------------------------------------

CLIPPED = tw.ClipNorms(limit=1.5, aggregate=tw.MeanOverSenders())
NORMS = st.one_of(
    st.floats(0.0, 2.0**100, allow_subnormal=False),
    st.sampled_from([0.0, 1e-30, 1.0, 1.0 + 2e-7, 3.0, 1e30]),
)


def bound_of(limit: float, norms: list[float]) -> float:
    """The bound of the docstring, times K: limit m."""
    counted = [norm for norm in norms if norm > 0]
    return limit * median_low(counted) if counted else 0.0


@given(
    norms=st.lists(NORMS, min_size=1, max_size=7),
    limit=st.floats(1.0, 20.0),
    seed=st.integers(0, 9),
)
def test_no_contribution_weighs_more_than_the_bound(norms, limit: float, seed: int) -> None:
    draws = torch.randn(len(norms), 11, generator=torch.Generator().manual_seed(seed))
    # In fp64: the squares of a tiny direction leave the range of fp32.
    sent = [(x.double() / x.double().norm() * n).float() for x, n in zip(draws, norms, strict=True)]
    got = received(sent, layout=Layout.vector(11))
    rule, lengths = tw.ClipNorms(limit=limit), [float(x.double().norm()) for x in sent]
    bound = bound_of(limit, lengths)
    whole = torch.zeros(11, dtype=torch.float64)
    factors = rule.clipped(got)
    for worker, x in enumerate(sent):
        share = x * factors.get(worker, 1.0)
        whole += share.double() / len(sent)
        # Each of eleven numbers is rounded once, and the smallest lose their last bits.
        assert float(share.double().norm()) <= bound * (1 + 1e-7) + 1e-44
        assert (worker in factors) == (lengths[worker] > bound)
        if factors.get(worker, 0.0) > 0.0:
            assert float(share.double().norm()) >= bound * (1 - 5e-4) - 1e-44
    scale = max(bound, 1e-30)
    assert torch.allclose(rule.combine(got).double(), whole, rtol=1e-5, atol=1e-6 * scale)


@given(
    honest=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    dishonest=st.lists(st.floats(0.001, 1e6), max_size=5),
)
def test_a_dishonest_half_cannot_raise_the_bound_above_the_longest_honest_one(
    honest, dishonest
) -> None:
    dishonest = dishonest[: len(honest)]
    got = of_norms(*dishonest, *honest)
    factors, norms = tw.ClipNorms(limit=2.0).clipped(got), got.norms.tolist()
    longest = 2.0 * max(norms[len(dishonest) :])
    assert all(norms[k] * factors.get(k, 1.0) <= longest for k in range(len(norms)))


@pytest.mark.parametrize("aggregate", [*RULES, tw.TrimmedMean(), tw.DropOutliers()])
@pytest.mark.parametrize(
    ("codec", "workers"),
    [(codecs.Identity(), 1), (codecs.Quantise(bits=2), 2), (codecs.CastBF16(), 5)],
)
def test_with_none_beyond_the_limit_the_result_is_that_of_the_inner_rule(
    aggregate, codec, workers: int
) -> None:
    sent = [x * 1.1**worker for worker, x in enumerate(vectors(workers))]
    got, plain = received(sent, codec), aggregate_valid(aggregate, received(sent, codec))
    for limit in (2.0, math.inf):
        rule = tw.ClipNorms(limit=limit, aggregate=aggregate)
        combined, left_out = aggregate_valid(rule, got)
        assert not left_out
        assert same_bits([combined.whole()], [plain[0].whole()])
        assert rule.clipped(got) == {}
    sent[-1] = sent[-1] * 1000.0
    loud, free = received(sent, codec), tw.ClipNorms(limit=math.inf, aggregate=aggregate)
    assert same_bits([free.combine(loud)], [aggregate.combine(loud)])
    assert bool(tw.ClipNorms(aggregate=aggregate).clipped(loud)) == (workers > 1)  # the control


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((100.0,), {}),
        ((1.0, 100.0), {1: 0.02}),  # of two, the longer is held to the shorter
        ((1.0, 2.0, 100.0), {2: 0.04}),
        ((1.0, 1.0, 4.0, 8.0), {2: 0.5, 3: 0.25}),  # the lower of the two in the middle
        ((0.0, 0.0, 1.0, 1.5), {}),  # one that has nothing to say holds no other back
        ((0.0, 0.0, 0.0, 5.0), {}),
        ((0.0, 0.0), {}),
        ((1.0, math.nan, 1.0, 8.0), {3: 0.25}),
        ((1.0, 1.0, math.inf, 8.0), {3: 0.25}),
    ],
)
def test_who_is_clipped_and_by_how_much(norms, expected) -> None:
    factors = tw.ClipNorms().clipped(of_norms(*norms))
    assert factors == {worker: pytest.approx(x, rel=3e-4) for worker, x in expected.items()}
    assert all(factors[worker] <= x * (1 + 1e-7) for worker, x in expected.items())
    twice = tw.ClipNorms(limit=3.0, aggregate=tw.ClipNorms())
    assert twice.clipped(of_norms(*norms)) == pytest.approx(factors, rel=1e-3)


def test_factors_are_the_same_where_squares_are_added_up_in_another_order() -> None:
    sent = of_norms(1.0, 1.0, 3.7)
    factors = tw.ClipNorms().clipped(sent)
    for error in (-1e-15, 1e-15):
        other = of_norms(1.0, 1.0, 3.7)
        wrong = torch.tensor([1.0, 1.0 + error, 1.0 - error], dtype=torch.float64)
        assert not torch.equal(sent.norms * wrong, sent.norms)
        vars(other)["norms"] = sent.norms * wrong
        assert tw.ClipNorms().clipped(other) == factors


@pytest.mark.parametrize(("codec", "workers"), pairs(2, 3, 4))
def test_norms_of_what_is_clipped_are_those_that_the_codec_tells(codec, workers: int) -> None:
    """And part by part it is what a loop over whole vectors makes."""
    sent = [x * (7.0 if worker == 1 else 1.0) for worker, x in enumerate(vectors(workers))]
    got, values = received(sent, codec), []
    for worker in range(workers):
        values.append(decoded(got, worker).clone())
    norms = [float(x.double().norm()) for x in values]
    longest = 2.0 * median_low(norms)
    rule = tw.ClipNorms(limit=2.0)
    assert list(rule.clipped(got)) == [k for k, norm in enumerate(norms) if norm > longest] == [1]
    expected = sum(
        x.double() * min(1.0, longest / norm) / workers
        for x, norm in zip(values, norms, strict=True)
    )
    combined = aggregate_valid(rule, got)[0].whole()
    assert float((combined - expected).norm()) <= 3e-4 * longest
    assert float((combined - reference_mean(values)).norm()) > 0.1 * longest  # the control


def test_what_is_clipped_whole_is_gathered_unless_a_reduce_scatter_is_asked_for() -> None:
    layout, codec = LAYOUT, codecs.CastBF16()
    automatic = tw.Automatic()
    assert isinstance(automatic.choose(codec, layout, tw.ClipNorms(), 16), tw.Gather)
    assert isinstance(automatic.choose(codec, layout, tw.MeanOverWorkers(), 16), tw.ReduceScatter)
    tw.presets.diloco(aggregate=tw.ClipNorms(), exchange=tw.ReduceScatter())


def test_under_a_reduce_scatter_each_shard_is_clipped_by_its_own_norms() -> None:
    """A contribution that is long in one shard only is scaled there alone."""
    pieces = exchanges.LAYOUT.cut(3)
    sent = [exchanges.delta_of(rank) for rank in range(3)]
    sent[2][pieces[1][0] :] *= 100.0
    rule, means = tw.ClipNorms(limit=1.0), []
    for exchange in (tw.ReduceScatter(), tw.Gather()):
        states = [exchanges.state_of(exchange, k, 3, aggregate=rule) for k in range(3)]

        def encode(rank: int, state: ExchangeState) -> dict[str, Tensor]:
            return state.encode(DenseVector(sent[rank]), exchanges.tag_of())

        results = exchanges.exchanged(states, tw.transport.in_process(3), encode=encode)
        means.append(results[0].mean.whole())
        told = [result.clipped for result in results]
        if isinstance(exchange, tw.Gather):
            assert told[0] == told[1] == told[2]
            assert 2 in told[0]
        else:  # each owner knows of its shard
            assert told[0].get(2, 1.0) > 0.9
            assert all(clipped[2] == pytest.approx(0.01, rel=0.1) for clipped in told[1:])
        assert all(torch.equal(result.mean.whole(), means[-1]) for result in results)
    for start, piece in pieces:
        parts = [x[start : start + piece.numel] for x in sent]
        expected = rule.combine(received(parts, layout=piece))
        assert torch.allclose(means[0][start : start + piece.numel], expected, atol=1e-6)
    first = pieces[1][0]  # the control: by whole norms the first shard is scaled, too
    assert not torch.allclose(means[0][:first], means[1][:first], rtol=0.1)


# -- a trimmed mean ------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "trim"), [(1, 1), (2, 1), (3, 1), (5, 1), (5, 2), (5, 9)])
def test_a_trimmed_mean_is_the_mean_of_what_is_left_of_the_sorted(workers, trim) -> None:
    sent, cut = vectors(workers), min(trim, (workers - 1) // 2)
    rows = torch.stack(sent).sort(0).values[cut : workers - cut]
    combined = tw.TrimmedMean(trim=trim).combine(received(sent))
    assert torch.allclose(combined, rows.mean(0), atol=1e-6)
    assert torch.equal(combined, reference_mean(sent)) == (workers < 3)
    if workers == 2 * cut + 1:
        assert torch.equal(combined, torch.stack(sent).median(0).values)


# -- in a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        *(*RULES, tw.TrimmedMean(), tw.ClipNorms(limit=1.0)),
        *(tw.DropOutliers(), tw.DropOutliers(aggregate=tw.MedianNormClip())),
    ],
)
@pytest.mark.parametrize(
    ("codec", "shapes"),
    [
        (codecs.Identity(), {"w": (192, 3), "b": (7,)}),
        # Owners of shards combine whole rows of coefficients.
        (
            codecs.TopK(k=64, values=codecs.F32(), groups=codecs.Blocks(), transform=codecs.DCT()),
            {"w": (192, 128), "v": (128, 64)},
        ),
    ],
)
def test_a_rule_is_elementwise_if_shards_may_be_combined_apart(codec, shapes, rule) -> None:
    layout = Layout.of(shapes)
    sent = list(torch.randn(5, layout.numel, generator=torch.Generator().manual_seed(0)))
    sent[4][:100] *= 10.0

    def combine(start: int, piece: Layout) -> Tensor:
        parts = [x[start : start + piece.numel] for x in sent]
        return rule.combine(received(parts, codec, piece))

    apart = torch.cat([combine(start, piece) for start, piece in layout.cut(3)])
    assert torch.equal(combine(0, layout), apart) == rule.elementwise


# -- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, tw.ClipNorms(limit=1.0), tw.TrimmedMean()])
@pytest.mark.parametrize(
    "bad", [{1: math.nan}, {1: math.inf}, {1: -math.inf}, {0: math.inf, 1: -math.inf}]
)
def test_opposite_infinities_do_not_hide_each_other(rule, bad) -> None:
    """And no number that is not finite is taken."""
    sent = vectors(4)
    for worker, number in bad.items():
        sent[worker][3 + worker] = number
    combined, left_out = aggregate_valid(rule, received(sent))
    reasons = {worker: why.reason for worker, why in left_out.items()}
    assert reasons == dict.fromkeys(bad, RejectReason.NOT_FINITE)
    kept = [x for worker, x in enumerate(sent) if worker not in bad]
    assert torch.equal(combined.whole(), rule.combine(received(kept)))


def test_finite_numbers_whose_sum_is_not_are_used() -> None:
    sent = [torch.full((LAYOUT.numel,), 3e38)] * 2
    combined, left_out = aggregate_valid(tw.MeanOverWorkers(), received(sent))
    assert left_out == {}
    assert torch.equal(combined.whole(), sent[0])
    few = received([*sent, *[torch.zeros(LAYOUT.numel)] * 2])
    assert float(tw.MeanOverSenders().combine(few)[0]) == pytest.approx(3e38)


# -- outliers ------------------------------------------------------------------------------------


def of_norms(*norms: float) -> Payloads:
    unit = torch.ones(LAYOUT.numel) / LAYOUT.numel**0.5
    return received([unit * norm for norm in norms])


@pytest.mark.parametrize("inner", RULES)
@pytest.mark.parametrize(
    ("norms", "left_out"),
    [
        ((1.0, 2.0, 21.0), [2]),
        ((1.0, 2.0, 19.0), []),
        ((1.0, 1.0, 9.0, 11.0), [3]),  # the lower of the two in the middle is the median
        ((0.01, 2.0, 2.0), []),  # a short one is no outlier
        ((1.0, 100.0), []),  # two have no median
        ((0.0, 0.0, 5.0), []),  # nor is there a usual length where most sent zeros
        ((1.0, 1.0, 50.0, 60.0, 1.0), [2, 3]),
    ],
)
def test_outliers_are_left_out_of_any_rule(norms, left_out: list[int], inner) -> None:
    sent = of_norms(*norms)
    combined, rejected = aggregate_valid(tw.DropOutliers(limit=10.0, aggregate=inner), sent)
    assert list(rejected) == left_out
    assert all(why.reason is RejectReason.OUTLIER for why in rejected.values())
    assert torch.equal(combined.whole(), inner.combine(sent.without(left_out)))
    # The control: without the rule they are used.
    assert torch.equal(aggregate_valid(inner, sent)[0].whole(), combined.whole()) == (not left_out)


def test_an_outlier_and_what_is_not_finite_are_both_left_out() -> None:
    sent = of_norms(1.0, float("nan"), 100.0, 2.0, 2.0)
    combined, rejected = aggregate_valid(tw.DropOutliers(), sent)
    assert {w: why.reason for w, why in rejected.items()} == {
        1: RejectReason.NOT_FINITE,
        2: RejectReason.OUTLIER,
    }
    assert torch.equal(combined.whole(), tw.MeanOverWorkers().combine(sent.without([1, 2])))
    nested = tw.DropOutliers(limit=50.0, aggregate=tw.DropOutliers(limit=5.0))
    assert list(nested.outliers(of_norms(1.0, 1.0, 6.0, 60.0))) == [2, 3]


KEEP_ZEROS = [
    *(tw.TrimmedMean(), tw.ClipNorms(aggregate=tw.TrimmedMean())),
    tw.DropOutliers(aggregate=tw.ClipNorms(aggregate=tw.TrimmedMean())),
    tw.MedianNormClip(aggregate=tw.TrimmedMean()),
]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        *(
            (lambda x=x: tw.DropOutliers(limit=x), "limit of DropOutliers to")
            for x in (0.0, 0.99, -1.0, math.inf, math.nan)
        ),
        *(
            (lambda x=x: tw.ClipNorms(limit=x), "limit of ClipNorms to")
            for x in (0.0, 0.99, -1.0, math.nan)
        ),
        (lambda: tw.TrimmedMean(trim=0), "trim of TrimmedMean to 0"),
        # Numbers that are not sent are no zeros to be kept.
        *((lambda r=r: tw.presets.sparseloco(aggregate=r), "keep the zeros") for r in KEEP_ZEROS),
    ],
)
def test_what_cannot_work_is_refused(call, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        call()


def test_where_every_number_is_sent_a_trimmed_mean_is_taken() -> None:
    for rule in KEEP_ZEROS:
        tw.presets.muloco(bits=2, aggregate=rule)
