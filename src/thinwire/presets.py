"""The papers' tables: each preset fills the slots of a `Method` and computes nothing.

Every field of `Method` can be given as a keyword and then replaces the paper's value.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, TypedDict, Unpack

from thinwire import codecs, inner, outer
from thinwire.aggregate import (
    Aggregate,
    ClipNorms,
    DropOutliers,
    MeanOverSenders,
    TrimmedMean,
)
from thinwire.codecs import CastBF16, Codec, Identity
from thinwire.errors import ConfigurationError, unknown_name
from thinwire.exchange import Exchange, Gather, Pairs, ReduceScatter
from thinwire.feedback import DecoupledMomentum, ErrorFeedback, Feedback
from thinwire.fragments import Fragments, Strided
from thinwire.inner import InnerOptimizer
from thinwire.method import Method
from thinwire.outer import Delay, OuterOptimizer, Overlap


class MethodFields(TypedDict, total=False):
    """The fields of a `Method`, all optional."""

    name: str
    inner: InnerOptimizer
    sync_every: int
    outer: OuterOptimizer
    codec: Codec
    feedback: Feedback
    fragments: Fragments
    overlap: Overlap
    aggregate: Aggregate
    exchange: Exchange


def ddp(**fields: Unpack[MethodFields]) -> Method:
    """Data parallelism: the workers' gradients are averaged at every step.

    g = (1/K) sum_k g_k; theta = AdamW(theta, g)

    Raises:
        ConfigurationError: an unknown field, or one that does not fit.

    >>> ddp().sync_every
    1
    """
    return _compose(
        fields,
        name="ddp",
        inner=inner.AdamW(),
        sync_every=1,
        outer=outer.GradientAveraging(),
    )


def diloco(**fields: Unpack[MethodFields]) -> Method:
    """DiLoCo: H steps of AdamW, then one step of Nesterov momentum on the mean displacement.

    Delta = (1/K) sum_k (theta - theta_k); m = mu m + Delta; theta = theta - eta (Delta + mu m)

    Settings: inner AdamW 4e-4 with weight decay 0.1 and, for K = 2 to 7, outer (0.7, 0.9) from
    DiLoCo (arXiv 2311.08105); H = 30 from its scaling laws (arXiv 2503.09799); the other rows of
    the outer table from MuLoCo (arXiv 2505.23725).

    Raises:
        ConfigurationError: an unknown field, or one that does not fit.

    >>> diloco().outer.at(4)
    SGD(lr=0.7, momentum=0.9, nesterov=True)
    """
    return _compose(
        fields,
        name="diloco",
        inner=inner.AdamW(lr=4e-4, weight_decay=0.1),
        sync_every=30,
        outer=_nesterov_per_workers((1, 0.7, 0.8), (2, 0.7, 0.9), (8, 0.9, 0.9), (16, 1, 0.9)),
    )


def muloco(
    *,
    bits: int | None = None,
    parameters: float | None = None,
    workers: int | None = None,
    global_batch: int | None = None,
    **fields: Unpack[MethodFields],
) -> Method:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, and codes of a few bits with error feedback.

    Settings: Muon with momentum 0.9 and scale sqrt(fan_out/fan_in), H = 30, inner lr, outer table
    and feedback decay of MuLoCo (arXiv 2505.23725). Without `parameters` the inner lr, 0.0156, is
    that of the 3.1B row below, and the weight decay, 1e-3, its base. Inner settings are published:

        parameters   K   batch   inner lr   weight decay = base * batch / (512 K)
              416M   8     512     0.0625   1.25e-3
              3.1B  16    2048     0.0156   2.5e-4

    with a base of 0.01 for 150M, 416M and 914M, 1e-3 for 1.76B and 3.1B, 1e-4 for 15B; for K = 1
    rates of 0.016 to 0.063, without sizes. A size from 150M to 15B takes lr and base of the nearest
    that has one, by ratio. Others are refused: the rate falls fourfold within the table.

    Differs: up to 8 bits the grid is mid-rise, per chunk, with less error than the published one.
    Vectors are not decayed. With error feedback the released code applies the outer learning rate
    in the feedback and in the outer step: a published eta is eta^2 here, and its (0.9, 0.8) is
    `outer.SGD(lr=0.81, momentum=0.8, nesterov=True)`. `bits` keeps the table's rates as they are.

    Args:
        bits: width of a number on the wire: None or 32 for fp32, 16 for bf16, else 8, 4, 2 or 1.
        parameters: of the model; chooses the inner optimizer.
        workers: K, for the weight decay; by default that of the row.
        global_batch: sequences a step of all workers, for the weight decay; by default the row's.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, `bits` without a codec, both
            `bits` and `codec`, or both `parameters` and `inner`; a size outside the paper's range;
            `workers` or `global_batch` below 1, or without `parameters`.

    >>> muloco(bits=16).codec
    CastBF16()
    >>> muloco(bits=2).feedback
    ErrorFeedback(decay=0.9, device=None)
    >>> small = muloco(parameters=416e6).inner
    >>> small.lr, small.weight_decay
    (0.0625, 0.00125)
    """
    if bits is not None:
        fields = {**_of_bits(bits, fields), **fields}
    if (parameters, workers, global_batch) != (None, None, None):
        fields = {**fields, "inner": _muon_for(parameters, workers, global_batch, fields)}
    return _compose(
        fields,
        name="muloco",
        inner=inner.Muon(lr=0.0156),
        sync_every=30,
        outer=_nesterov_per_workers((1, 0.7, 0.6), (8, 0.9, 0.8), (16, 1, 0.9)),
    )


def streaming_diloco(
    *, layers: int = 3, tau: int = 1, alpha: float = 0.5, **fields: Unpack[MethodFields]
) -> Method:
    """Streaming DiLoCo: a few layers at a time, in 4 bits, while training goes on.

    theta_p = OuterOpt_p(theta_p, (1/K) sum_k Delta_kp), tau steps after Delta_kp was sent;
    theta_kp = alpha theta_kp + (1 - alpha) theta_p

    Settings: strided fragments of 3 layers, tau 1, outer Nesterov (0.4, 0.9), E3M0 without error
    feedback, H = 30, of Streaming DiLoCo (arXiv 2501.18512); inner AdamW of DiLoCo (arXiv
    2311.08105).

    Differs: alpha and outer momentum of the paper's main runs are not stated; 0.5 and 0.9 are ours,
    as are the scale and rounding of E3M0.

    Args:
        layers: layers in a fragment; embedding, final norm and head are one more fragment.
        tau: inner steps that an exchange may take.
        alpha: share of its own weights that a worker keeps when the result is merged.
        fields: fields of `Method`; `fragments` replaces `layers`, `overlap` both tau and alpha.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, or a tau that H cannot hold.

    >>> streaming_diloco(tau=2).overlap
    Delay(tau=2, mixing=0.5)
    """
    return _compose(
        fields,
        name="streaming_diloco",
        inner=inner.AdamW(lr=4e-4, weight_decay=0.1),
        sync_every=30,
        outer=outer.SGD(lr=0.4, momentum=0.9, nesterov=True),
        codec=codecs.E3M0(),
        fragments=Strided(layers=layers),
        overlap=Delay(tau=tau, mixing=alpha),
    )


def streaming_muloco(
    *, layers: int = 3, tau: int = 1, alpha: float = 0.5, **fields: Unpack[MethodFields]
) -> Method:
    """Streaming DiLoCo's outer step around MuLoCo's inner optimizer.

    Settings: inner Muon of MuLoCo (arXiv 2505.23725), all else of Streaming DiLoCo (arXiv
    2501.18512).

    Differs: the two were not published together with these settings.

    Args:
        layers: as in `streaming_diloco`.
        tau: as in `streaming_diloco`.
        alpha: as in `streaming_diloco`.
        fields: as in `streaming_diloco`.

    Raises:
        ConfigurationError: as in `streaming_diloco`.

    >>> streaming_muloco().inner.lr
    0.0156
    """
    fields = {"name": "streaming_muloco", "inner": inner.Muon(lr=0.0156), **fields}
    return streaming_diloco(layers=layers, tau=tau, alpha=alpha, **fields)


def sparseloco(*, density: float = 1 / 32, **fields: Unpack[MethodFields]) -> Method:
    """SparseLoCo: AdamW inside; Top-k of every chunk in 2 bits, and error feedback for the rest.

    e = beta e + Delta; q = Q(TopK(e)); e = e - q
    theta = theta - alpha (sum_k q_k) / (number of workers with q_k != 0), number by number

    The decayed feedback takes the place of the outer momentum.

    Source: SparseLoCo (arXiv 2508.15706) and its released code: H = 15, beta 0.95, alpha 1, 64x64
    blocks, density 1/32 of its 2-bit runs, inner AdamW 1e-3 with betas (0.9, 0.95) and weight decay
    0.1. The paper's formula divides by K; every released implementation (SparseLoCo, CCLoco,
    templar) divides a number by the workers that sent it, and so does the preset: divided by K, a
    number that one of four workers sent moves the model by a quarter of what that worker's
    feedback takes for delivered. `aggregate=MeanOverWorkers()` is the formula. Covenant-72B (arXiv
    2603.08163) has density 1/64.

    With `codec=TopK(k=32, groups=Blocks(), transform=DCT())` and `ErrorFeedback(decay=0.9)` it is
    decoupled momentum (arXiv 2510.03371) with replicas that stay equal.

    Differs: kept values have a sign and one of two levels for each chunk, with a smaller error than
    the published statistical quantiser over a tensor. Vectors share chunks with the edges of
    matrices, and are not decayed; the released code decays all parameters.

    Args:
        density: share of the numbers that is sent.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, or a density outside (0, 1].

    >>> sparseloco().codec
    TopK(k=128, values=SignLevels(), groups=Blocks(), transform=None)
    """
    return _compose(
        fields,
        name="sparseloco",
        inner=inner.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        sync_every=15,
        outer=outer.SGD(lr=1.0),
        codec=codecs.TopK(k=codecs.k_for_density(density), groups=codecs.Blocks()),
        feedback=ErrorFeedback(decay=0.95),
        aggregate=MeanOverSenders(),
    )


def sparse_muloco(*, density: float = 1 / 32, **fields: Unpack[MethodFields]) -> Method:
    """Muon inside, sparse outside: SparseLoCo's outer step around MuLoCo's inner optimizer.

    Source: inner Muon of MuLoCo (arXiv 2505.23725), all else of SparseLoCo (arXiv 2508.15706) as
    released: a number is divided by the workers that sent it.

    Differs: no paper describes it. Chunks are runs, which do as well as blocks on Muon's deltas,
    and kept values have one bit, a sign: a second gained nothing (docs/log.md).

    Args:
        density: share of the numbers that is sent.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, or a density outside (0, 1].

    >>> sparse_muloco().codec
    TopK(k=128, values=SignMean(), groups=Chunks(), transform=None)
    """
    return _compose(
        fields,
        name="sparse_muloco",
        inner=inner.Muon(lr=0.0156),
        sync_every=15,
        outer=outer.SGD(lr=1.0),
        codec=codecs.TopK(k=codecs.k_for_density(density), values=codecs.SignMean()),
        feedback=ErrorFeedback(decay=0.95),
        aggregate=MeanOverSenders(),
    )


def demo(*, density: float = 1 / 128, **fields: Unpack[MethodFields]) -> Method:
    """DeMo: at every step the largest cosine coefficients of each worker's momentum, then a sign.

    m_k = beta m_k + g_k; c_k = TopK(DCT(m_k)); m_k = m_k - IDCT(c_k);
    G = IDCT(sum_k c_k / #{k: sent}), coefficient by coefficient; theta = theta - lr sign(G)

    The momentum is the error feedback: what was not sent stays in it. Settings: beta 0.999, 32
    coefficients of each 64x64 block, lr 4e-4 without weight decay, gradients clipped to norm 1 by
    each worker, of DeMo's released code (arXiv 2411.19870) for 300M and 1B parameters. SparseLoCo
    (arXiv 2508.15706) tuned it as a baseline to lr 1e-3 with weight decay 0.1:
    `demo(inner=tw.inner.SignSGD(lr=1e-3, weight_decay=0.1))`.

    Differs: the released code has lr g_k in the momentum, which is the same for a constant lr,
    since the sign has no scale. Kept values have a sign and one of two levels, where it sends fp32
    with int64 places. In vectors and leftovers k is scaled to their length, where it keeps up to 32
    of any run of 64. The momentum is in the checkpoint, where it is lost. Vectors are not decayed.

    Args:
        density: share of the coefficients that is sent.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, or a density outside (0, 1].

    >>> demo().codec
    TopK(k=32, values=SignLevels(), groups=Blocks(), transform=DCT())
    """
    k = codecs.k_for_density(density)
    return _compose(
        fields,
        name="demo",
        inner=inner.SignSGD(lr=4e-4),
        sync_every=1,
        outer=outer.GradientAveraging(clip_norm=1.0),
        codec=codecs.TopK(k=k, groups=codecs.Blocks(), transform=codecs.DCT()),
        feedback=ErrorFeedback(decay=0.999),
        aggregate=MeanOverSenders(),
    )


def decoupled_momentum(*, density: float = 1 / 128, **fields: Unpack[MethodFields]) -> Method:
    """Decoupled momentum for DiLoCo, as released: workers share large coefficients of a momentum.

    m_k = beta m_k + Delta_k; c_k = TopK(DCT(m_k)); G = IDCT(sum_k c_k / #{k: sent});
    m_k = m_k - IDCT(c_k) + G; theta_k = theta_k - eta (Delta_k + beta m_k)

    Settings: beta 0.9, 32 coefficients of each 64x64 block, eta 0.7, H = 128, inner AdamW 4e-4 with
    weight decay 0.1, of the code released with arXiv 2510.03371.

    To reproduce that code, not to train with: **a worker's own Delta_k is applied in full and never
    averaged**, so that replicas differ hardly less than workers that exchange nothing; the loss of
    one replica shows it, that of their mean hides it. And with these settings it **diverges**: a
    worker that did not send a coefficient keeps its own and adds the senders' mean.
    `aggregate=tw.MeanOverWorkers()` or beta 0.6 does not diverge. What the paper describes is
    `sparseloco(codec=..., feedback=...)` with a DCT, see there: its replicas stay equal.

    Differs: kept values have a sign and one of two levels, where the code sends fp32. All workers
    take the same number of inner steps. The momentum is in the checkpoint, where it is lost. What
    is evaluated and published is the mean of the workers' anchors, where the code has one of them.

    Args:
        density: share of the coefficients that is sent.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, or a density outside (0, 1].

    >>> decoupled_momentum().outer, decoupled_momentum().feedback.decay
    (DecoupledNesterov(lr=0.7), 0.9)
    """
    k = codecs.k_for_density(density)
    return _compose(
        fields,
        name="decoupled_momentum",
        inner=inner.AdamW(lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1),
        sync_every=128,
        outer=outer.DecoupledNesterov(lr=0.7),
        codec=codecs.TopK(k=k, groups=codecs.Blocks(), transform=codecs.DCT()),
        feedback=DecoupledMomentum(decay=0.9),
        aggregate=MeanOverSenders(),
    )


def noloco(**fields: Unpack[MethodFields]) -> Method:
    """NoLoCo: every worker averages with one other, drawn anew each round; there is no all-reduce.

    m_k = mu m_k + eta (phi_k - (theta_k + theta_j) / 2); phi_k = phi_k - m_k; theta_k = phi_k

    A worker sends one message of its weights a round, however many workers there are. Every worker
    has an anchor phi_k of its own; what is evaluated and published is their mean. The anchors
    spread less the lower the inner learning rate, so end with a low one.

    Settings: inner Adam 6e-4, H = 50, eta = gamma = 0.7, mu = 0.5, pairs (n = 2), of NoLoCo (arXiv
    2506.10911), Table 1 and section 4, with warm-up and a cosine to 10 %. The inner rate is that of
    125M parameters:

    | parameters | inner lr | tokens a step |
    |---|---|---|
    | 125M | 6e-4 | 0.5M |
    | 1.3B | 2e-4 | 1M |
    | 6.8B | 1.2e-4 | 2M |

    Published, validation perplexity on C4 of DiLoCo (H = 100) and NoLoCo (H = 50): 125M on 8
    workers 35.4 and 34.5, 1.3B on 16 workers 23.2 and 23.4, 6.8B on 16 workers 17.3 and 16.6, each
    but the first with pipeline stages and random routing between them. Neither bytes nor rounds
    were equal.

    Differs: the paper's eq. 1 has the pseudo-gradient of the other sign, with which the step
    climbs; its proof and its released code do not. Of an odd number of workers one steps on its own
    weights, where released code stops. Messages are bf16 and outer state is fp32; released code has
    both in the type of the weights. It evaluates a replica; here it is the mean of all.

    Args:
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, or one that does not fit.

    >>> noloco().outer, noloco().exchange
    (Gossip(lr=0.7, momentum=0.5), Pairs(seed=0))
    """
    return _compose(
        fields,
        name="noloco",
        inner=inner.AdamW(lr=6e-4, weight_decay=0.0),
        sync_every=50,
        outer=outer.Gossip(lr=0.7, momentum=0.5),
        codec=CastBF16(),
        exchange=Pairs(),
    )


def async_diloco(*, every: int = 4, c: float = 0.0, **fields: Unpack[MethodFields]) -> Method:
    """Asynchronous DiLoCo: no worker waits; Nesterov momentum moves once in N arrivals.

    On arrival of g = theta_start - theta_w:  S = S + g, and

        every N-th:   m = beta m + S/N;  theta = theta - eps ((1 - c N + c) beta m + g/N);  S = 0
        every other:  theta = theta - eps (c beta m + g/N)

    For `thinwire.asynchronous`; `OuterLoop`, which trains in rounds, refuses it. N = K is natural,
    and K equal workers are then `diloco` with the same numbers (c = 0). eps is the rate of a whole
    mean, and an arrival moves by eps/N: rates in other code may be divided already. Codec and
    feedback act on every arrival; feedback and momentum add up, as they do in rounds.

    Settings: H = 50, weight decay 0.1 of Asynchronous Local-SGD (arXiv 2401.09135), which tried
    outer rates of 0.03, 0.1, 0.3 and 0.7, N of 4, 8 and 16, and found c = 0.1 no better than 0;
    inner rate, outer rate and momentum of DiLoCo (arXiv 2311.08105).

    Differs: which outer rate was best is not legible in the paper's text that we have, hence
    DiLoCo's. With c > 0 a footnote of the paper claims the equality with DiLoCo, which only c = 0
    has.

    Args:
        every: N.
        c: share of the momentum that each arrival takes in advance, in [0, 1/N].
        fields: fields of `Method`; `outer` replaces both N and c.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, an N below 1 or c outside
            [0, 1/N].

    >>> async_diloco(every=8).outer
    DelayedNesterov(lr=0.7, momentum=0.9, every=8, c=0.0)
    """
    return _compose(
        fields,
        name="async_diloco",
        inner=inner.AdamW(lr=4e-4, weight_decay=0.1),
        sync_every=50,
        outer=outer.DelayedNesterov(lr=0.7, momentum=0.9, every=every, c=c),
    )


# Methods in rounds, by which `OuterLoop` trains; async_diloco needs a server.
_PRESETS: Mapping[str, Callable[..., Method]] = {
    "ddp": ddp,
    "decoupled_momentum": decoupled_momentum,
    "demo": demo,
    "diloco": diloco,
    "muloco": muloco,
    "noloco": noloco,
    "sparseloco": sparseloco,
    "sparse_muloco": sparse_muloco,
    "streaming_diloco": streaming_diloco,
    "streaming_muloco": streaming_muloco,
}


def names() -> tuple[str, ...]:
    """The names of all presets that train in rounds.

    >>> names()[:3]
    ('ddp', 'decoupled_momentum', 'demo')
    """
    return tuple(_PRESETS)


def by_name(name: str) -> Callable[..., Method]:
    """The preset called `name`, one of `names()` or async_diloco.

    Raises:
        ConfigurationError: no preset has this name.

    >>> by_name("diloco") is diloco
    True
    """
    known = {**_PRESETS, "async_diloco": async_diloco}
    if name not in known:
        raise unknown_name(f"use method {name!r}", name, known)
    return known[name]


def from_text(text: str, **fields: Any) -> Method:
    """The method that a command line names: NAME[:FIELD=VALUE]...

    Args:
        text: a preset's name and arguments of it, such as `muloco:bits=2` or
            `sparseloco:density=1/32:sync_every=30`; it becomes the method's name. Any preset takes
            `clip_norms` and `drop_outliers`, limits of `ClipNorms` and `DropOutliers` around its
            aggregate, and `trimmed_mean`, the workers that a `TrimmedMean` in its place leaves out
            at either end. All values are numbers but that of `exchange`: gather or reduce_scatter.
        fields: further arguments; those in `text` win.

    Raises:
        ConfigurationError: no preset has this name, or it has no such argument.

    >>> from_text("sparse_muloco:density=1/32").codec.k
    128
    >>> from_text("diloco:clip_norms=2").aggregate
    ClipNorms(limit=2, aggregate=MeanOverWorkers())
    """
    name, *arguments = text.split(":")
    preset = by_name(name)
    own = [p.name for p in signature(preset).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given: dict[str, Any] = {}
    for argument in arguments:
        field, value = _argument(name, argument)
        known = (*own, "sync_every", *_WORDS, *_RULES)
        if field not in known:
            raise unknown_name(f"give {name} the number {field!r}", field, known)
        if field in given:
            raise ConfigurationError(
                f"use method {text!r}",
                because=f"it gives {field} twice",
                do="leave one of them out",
            )
        given[field] = value
    limits = {field: given.pop(field) for field in _RULES if field in given}
    method = preset(**{**fields, **given, "name": text})
    for field, limit in limits.items():
        aggregate = _RULES[field](limit, method.aggregate)
        method = dataclasses.replace(method, aggregate=aggregate)
    return method


# Fields of any method that are words.
_WORDS: Mapping[str, Mapping[str, Exchange]] = {
    "exchange": {"gather": Gather(), "reduce_scatter": ReduceScatter()}
}
# What a number makes of an aggregate, from the inside out.
_RULES: Mapping[str, Callable[[Any, Aggregate], Aggregate]] = {
    "trimmed_mean": lambda trim, _: TrimmedMean(trim=trim),
    "clip_norms": lambda limit, inner: ClipNorms(limit=limit, aggregate=inner),
    "drop_outliers": lambda limit, inner: DropOutliers(limit=limit, aggregate=inner),
}


def _argument(name: str, argument: str) -> tuple[str, int | float | Exchange]:
    # Slow to import (decimal comes with it), and needed on a command line only.
    from fractions import Fraction

    field, _, number = argument.partition("=")
    if field in _WORDS:
        if number not in _WORDS[field]:
            cannot = f"use method {name!r} with {argument!r}"
            raise unknown_name(cannot, number, _WORDS[field])
        return field, _WORDS[field][number]
    try:
        value = Fraction(number)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"use method {name!r} with {argument!r}",
            because="that is not FIELD=NUMBER",
            do="write it like muloco:bits=2 or sparseloco:density=1/32",
        ) from error
    return field, value.numerator if value.denominator == 1 else float(value)


def _nesterov_per_workers(*rows: tuple[int, float, float]) -> OuterOptimizer:
    return outer.ByWorkerCount(
        table=tuple((k, outer.SGD(lr=lr, momentum=mu, nesterov=True)) for k, lr, mu in rows)
    )


def _of_bits(bits: int, fields: MethodFields) -> MethodFields:
    plain: dict[int, Codec] = {16: CastBF16(), 32: Identity()}
    known = (1, 2, 4, 8, *plain)
    if bits not in known or "codec" in fields:
        raise ConfigurationError(
            f"send {bits} bits a number" + (" and a codec too" if "codec" in fields else ""),
            because=f"bits must be one of {', '.join(map(str, known))}, and chooses the codec",
            do="pass one of these as bits, or codec= alone",
        )
    if bits in plain:
        return {"codec": plain[bits]}
    return {"codec": codecs.Quantise(bits=bits), "feedback": ErrorFeedback(decay=0.9)}


# Rows of MuLoCo's tables, by parameters: (inner lr, K, batch), and the base of the weight decay.
_MULOCO_RATES = {416e6: (0.0625, 8, 512), 3.1e9: (0.0156, 16, 2048)}
_MULOCO_DECAYS = {150e6: 1e-2, 416e6: 1e-2, 914e6: 1e-2, 1.76e9: 1e-3, 3.1e9: 1e-3, 15e9: 1e-4}


def _muon_for(
    parameters: float | None, workers: int | None, global_batch: int | None, fields: MethodFields
) -> InnerOptimizer:
    cannot = f"choose MuLoCo's inner settings for {parameters=}, {workers=}, {global_batch=}"
    if "inner" in fields:
        raise ConfigurationError(
            cannot,
            because="inner is given, too (a recipe such as laptop has its own)",
            do="leave one of them out",
        )
    least, most = min(_MULOCO_DECAYS), max(_MULOCO_DECAYS)
    if parameters is None or not least <= parameters <= most:
        raise ConfigurationError(
            cannot,
            because="they are published for models of 150M to 15B parameters",
            do="pass parameters in that range, or inner=Muon(lr=...) with a rate of your own",
        )
    lr, published_workers, published_batch = _MULOCO_RATES[_nearest(parameters, _MULOCO_RATES)]
    workers = published_workers if workers is None else workers
    global_batch = published_batch if global_batch is None else global_batch
    if min(workers, global_batch) < 1:
        raise ConfigurationError(
            cannot,
            because="the weight decay is for one worker or more, and at least one sequence a step",
            do="pass numbers from 1, or leave them out",
        )
    base = _MULOCO_DECAYS[_nearest(parameters, _MULOCO_DECAYS)]
    return inner.Muon(lr=lr, weight_decay=base * global_batch / (512 * workers))


def _nearest(parameters: float, published: Iterable[float]) -> float:
    """The one of `published` whose ratio to `parameters` is nearest to 1."""
    return min(published, key=lambda size: abs(math.log(size / parameters)))


def _compose(fields: MethodFields, **paper: Unpack[MethodFields]) -> Method:
    for field in fields:
        if field not in MethodFields.__annotations__:
            cannot = f"build {paper.get('name')} with {field!r}"
            raise unknown_name(cannot, field, MethodFields.__annotations__)
    return Method(**{**paper, **fields})  # pyright: ignore[reportArgumentType]
