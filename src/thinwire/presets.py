"""Presets: functions that fill the slots of a `Method` with a paper's settings.

Every field of `Method` is also a keyword argument, which replaces the paper's value.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, TypedDict, Unpack

from thinwire import codecs, inner, outer
from thinwire.aggregate import Aggregate, ClipNorms, DropOutliers, MeanOverSenders, TrimmedMean
from thinwire.codecs import CastBF16, Codec, Identity
from thinwire.errors import ConfigurationError, check, check_whole, unknown_name
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
    """Data parallelism: average the workers' gradients at every step.

    g = (1/K) sum_k g_k; theta = AdamW(theta, g)

    Raises:
        ConfigurationError: a field is unknown or does not fit.

    >>> ddp().sync_every
    1
    """
    return _compose(
        fields, name="ddp", inner=inner.AdamW(), sync_every=1, outer=outer.GradientAveraging()
    )


def diloco(**fields: Unpack[MethodFields]) -> Method:
    """DiLoCo: H steps of AdamW, then one Nesterov step along the mean pseudo-gradient.

    Delta = (1/K) sum_k (theta - theta_k); m = mu m + Delta; theta = theta - eta (Delta + mu m)

    Settings: inner AdamW 4e-4 with weight decay 0.1 and, for K = 2 to 7, outer learning rate 0.7
    and momentum 0.9 from DiLoCo (arXiv 2311.08105); H = 30 from its scaling laws (arXiv
    2503.09799); outer settings for other K from MuLoCo (arXiv 2505.23725).

    Raises:
        ConfigurationError: a field is unknown or does not fit.

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
    """MuLoCo: DiLoCo with Muon as the inner optimizer and, with `bits`, quantised messages.

    Settings: Muon with momentum 0.9 and scale sqrt(fan_out/fan_in), H = 30, inner lr, outer table
    and feedback decay of MuLoCo (arXiv 2505.23725). Without `parameters`, the inner lr is 0.0156
    and the weight decay 1e-3: the lr and the base of the 3.1B row. The paper publishes these
    inner settings:

        parameters   K   batch   inner lr   weight decay = base * batch / (512 K)
              416M   8     512     0.0625   1.25e-3
              3.1B  16    2048     0.0156   2.5e-4

    The base is 0.01 for 150M, 416M and 914M, 1e-3 for 1.76B and 3.1B, and 1e-4 for 15B. For K = 1,
    the paper gives rates of 0.016 to 0.063 without sizes. `parameters` from 150M to 15B selects the
    nearest published lr and the nearest published base, by ratio. The row changes at 1.14B and the
    base at 1.27B, so that between them the decay is 2.5e-3: K and batch of the row of 3.1B, with
    the base of 914M. Other sizes raise an error, because the lr falls fourfold within the table.

    Differs: the grid for up to 8 bits is mid-rise, per chunk, and has a smaller error than the
    published grid. Vectors have no weight decay. With error feedback, the released code applies the
    outer learning rate twice, in the feedback and in the outer step. A published eta is therefore
    eta^2 here: the published (0.9, 0.8) is `outer.SGD(lr=0.81, momentum=0.8, nesterov=True)`.
    `bits` does not change the rates of the table.

    Args:
        bits: bits per number on the wire: None or 32 is fp32, 16 is bf16; 8, 4, 2 and 1 quantise
            with error feedback.
        parameters: number of parameters of the model; selects the inner settings.
        workers: K, for the weight decay; default: that of the row.
        global_batch: sequences per step over all workers, for the weight decay; default: that of
            the row.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit, `bits` has no codec, both `bits` and
            `codec` or both `parameters` and `inner` are given, the size is outside the paper's
            range, or `workers` or `global_batch` is below 1 or lacks `parameters`.

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
    """Streaming DiLoCo: exchange a few layers at a time, in 4 bits, while training continues.

    theta_p = OuterOpt_p(theta_p, (1/K) sum_k Delta_kp), tau steps after Delta_kp was sent;
    theta_kp = alpha theta_kp + (1 - alpha) theta_p

    Settings: strided fragments of 3 layers, tau 1, outer Nesterov (0.4, 0.9), E3M0 without error
    feedback, H = 30, of Streaming DiLoCo (arXiv 2501.18512); inner AdamW of DiLoCo (arXiv
    2311.08105).

    Differs: the paper does not state alpha and the outer momentum of its main runs; 0.5 and 0.9 are
    ours. So are the scale and the rounding of E3M0.

    Args:
        layers: layers per fragment; embedding, final norm and head form one more fragment.
        tau: inner steps between sending a pseudo-gradient and applying the result.
        alpha: fraction of its local weights that a worker keeps when it applies the result.
        fields: fields of `Method`; `fragments` replaces `layers`, `overlap` both tau and alpha.

    Raises:
        ConfigurationError: a field is unknown or does not fit, or tau does not fit into H.

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
    """Streaming MuLoCo: the outer step of Streaming DiLoCo with the inner optimizer of MuLoCo.

    Settings: inner Muon of MuLoCo (arXiv 2505.23725), all else of Streaming DiLoCo (arXiv
    2501.18512).

    Differs: no paper publishes this combination with these settings.

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
    """SparseLoCo: AdamW; Top-k of every chunk in 2 bits, with error feedback.

    e = beta e + Delta; q = Q(TopK(e)); e = e - q
    theta = theta - alpha (sum_k q_k) / (number of workers with q_k != 0), number by number

    The decayed feedback replaces the outer momentum.

    Source: SparseLoCo (arXiv 2508.15706) and its released code: H = 15, beta 0.95, alpha 1, 64x64
    blocks, density 1/32 of its 2-bit runs, inner AdamW 1e-3 with betas (0.9, 0.95) and weight decay
    0.1. Covenant-72B (arXiv 2603.08163) has density 1/64.

    Divisor: the paper's formula divides each sum by K. Every released implementation (SparseLoCo,
    CCLoco, templar) divides by the number of workers that sent the number, and so does this preset.
    With K = 4, dividing by K moves the model by only a quarter of a number that one worker sent,
    although that worker's feedback counts all of it as sent. `aggregate=MeanOverWorkers()` selects
    the paper's formula.

    With `codec=TopK(k=32, groups=Blocks(), transform=DCT())` and
    `feedback=ErrorFeedback(decay=0.9)`, it is decoupled momentum (arXiv 2510.03371) with equal
    replicas.

    Differs: sent values have a sign and one of two levels per chunk. The error is smaller than that
    of the published statistical quantiser, which works per tensor. Vectors share chunks with the
    edges of matrices. They have no weight decay; the released code decays all parameters.

    Args:
        density: fraction of the numbers that is sent; `codec` replaces it.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit, or density is outside (0, 1].

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
    """Sparse MuLoCo: the outer step of SparseLoCo with the inner optimizer of MuLoCo.

    Source: inner Muon of MuLoCo (arXiv 2505.23725), all else of SparseLoCo (arXiv 2508.15706) as
    released: a sum is divided by the number of workers that sent the number.

    Differs: no paper describes this combination. Chunks are runs of numbers, which are as good as
    blocks for Muon. Sent values have one bit, the sign: a second bit gained nothing (docs/log.md).

    Args:
        density: fraction of the numbers that is sent; `codec` replaces it.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit, or density is outside (0, 1].

    >>> sparse_muloco().codec
    TopK(k=128, values=SignMean(), groups=Chunks(), transform=None)
    """
    codec = codecs.TopK(k=codecs.k_for_density(density), values=codecs.SignMean())
    fields = {"name": "sparse_muloco", "inner": inner.Muon(lr=0.0156), "codec": codec, **fields}
    return sparseloco(density=density, **fields)


def demo(*, density: float = 1 / 128, **fields: Unpack[MethodFields]) -> Method:
    """DeMo: send the largest DCT coefficients of the momentum at every step; step by the sign.

    m_k = beta m_k + g_k; c_k = TopK(DCT(m_k)); m_k = m_k - IDCT(c_k);
    G = IDCT(sum_k c_k / #{k: sent}), coefficient by coefficient; theta = theta - lr sign(G)

    The momentum is the error feedback: coefficients that were not sent stay in it.

    Settings: beta 0.999, 32 coefficients of each 64x64 block, lr 4e-4 without weight decay, each
    worker's gradient clipped to norm 1, of DeMo's released code (arXiv 2411.19870) for 300M and 1B
    parameters. SparseLoCo (arXiv 2508.15706) tuned DeMo as a baseline to lr 1e-3 with weight decay
    0.1: `demo(inner=tw.inner.SignSGD(lr=1e-3, weight_decay=0.1))`.

    Differs: the momentum sums g_k; in the released code, it sums lr g_k. For a constant lr this is
    the same, because the sign has no scale. Under a schedule, the released code weighs a gradient
    by the lr of its step: those of the warm-up count less, and while the lr falls, older ones count
    more; here, all count alike. Beta 0.999 remembers 1,000 steps of either. Sent values have a sign
    and one of two levels; the released code sends fp32 values and int64 indices. In vectors and
    incomplete blocks, k is proportional to the length; the released code keeps up to 32 of any 64
    numbers. Checkpoints contain the momentum; the released code loses it. Vectors have no weight
    decay.

    Args:
        density: fraction of the coefficients that is sent; `codec` replaces it.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit, or density is outside (0, 1].

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
    """Decoupled momentum for DiLoCo, as released: share the largest DCT coefficients of momenta.

    m_k = beta m_k + Delta_k; c_k = TopK(DCT(m_k)); G = IDCT(sum_k c_k / #{k: sent});
    m_k = m_k - IDCT(c_k) + G; theta_k = theta_k - eta (Delta_k + beta m_k)

    Settings: beta 0.95, 32 coefficients of each 64x64 block, eta 0.7, H = 128, inner AdamW 4e-4
    with weight decay 0.1, of the configurations released with arXiv 2510.03371. Without one, the
    released code has beta 0.9.

    Use it only to reproduce that code. **Each worker applies its own Delta_k in full; Delta_k is
    never averaged.** Replicas differ nearly as much as those of workers that exchange nothing. The
    loss of one replica shows this; the loss of the mean hides it. With beta 0.9 it
    **diverges**: a worker that did not send a coefficient keeps its own and adds the mean of the
    senders. It does not diverge with `aggregate=tw.MeanOverWorkers()` or beta 0.6. The method that
    the paper describes is `sparseloco` with a DCT, see there: its replicas stay equal.

    Differs: sent values have a sign and one of two levels; the released code sends fp32. All
    workers take the same number of inner steps. Checkpoints contain the momentum; the released code
    loses it. The mean of the workers' anchors is evaluated and published; the released code uses
    one of them.

    Args:
        density: fraction of the coefficients that is sent; `codec` replaces it.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit, or density is outside (0, 1].

    >>> decoupled_momentum().outer, decoupled_momentum().feedback.decay
    (DecoupledNesterov(lr=0.7), 0.95)
    """
    k = codecs.k_for_density(density)
    return _compose(
        fields,
        name="decoupled_momentum",
        inner=inner.AdamW(lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1),
        sync_every=128,
        outer=outer.DecoupledNesterov(lr=0.7),
        codec=codecs.TopK(k=k, groups=codecs.Blocks(), transform=codecs.DCT()),
        feedback=DecoupledMomentum(decay=0.95),
        aggregate=MeanOverSenders(),
    )


def noloco(**fields: Unpack[MethodFields]) -> Method:
    """NoLoCo: every worker averages its weights with one random other worker; no all-reduce.

    m_k = mu m_k + eta (phi_k - (theta_k + theta_j) / 2); phi_k = phi_k - m_k; theta_k = phi_k

    Pairs change in every round. A worker sends its weights once per round, for any number of
    workers. Every worker has its own anchor phi_k; their mean is evaluated and published. A lower
    inner learning rate keeps the anchors closer together, so end with a low one.

    Settings: inner Adam 6e-4, H = 50, eta = gamma = 0.7, mu = 0.5, pairs (n = 2), of NoLoCo (arXiv
    2506.10911), Table 1 and section 4, with warm-up and a cosine to 10 %; betas (0.9, 0.999) of the
    released code. The inner rate is that of 125M parameters:

    | parameters | inner lr | tokens a step |
    |---|---|---|
    | 125M | 6e-4 | 0.5M |
    | 1.3B | 2e-4 | 1M |
    | 6.8B | 1.2e-4 | 2M |

    Published validation perplexity on C4 of DiLoCo (H = 100) and NoLoCo (H = 50): 35.4 and 34.5 for
    125M on 8 workers, 23.2 and 23.4 for 1.3B on 16, 17.3 and 16.6 for 6.8B on 16. The runs of 1.3B
    and 6.8B have pipeline stages with random routing between them. DiLoCo and NoLoCo had neither
    equal bytes nor equal rounds.

    Differs: in the paper's eq. 1 the pseudo-gradient has the opposite sign, which would increase
    the loss; the paper's proof and the released code have this sign. With an odd number of workers,
    one worker steps on its own weights; the released code stops. Messages are bf16 and the outer
    state is fp32; the released code keeps both in the dtype of the weights. The mean of all workers
    is evaluated; the released code evaluates one replica.

    Args:
        fields: fields of `Method`.

    Raises:
        ConfigurationError: a field is unknown or does not fit.

    >>> noloco().outer, noloco().exchange
    (Gossip(lr=0.7, momentum=0.5), Pairs(seed=0))
    """
    return _compose(
        fields,
        name="noloco",
        inner=inner.AdamW(lr=6e-4, betas=(0.9, 0.999), weight_decay=0.0),
        sync_every=50,
        outer=outer.Gossip(lr=0.7, momentum=0.5),
        codec=CastBF16(),
        exchange=Pairs(),
    )


def async_diloco(*, every: int = 4, c: float = 0.0, **fields: Unpack[MethodFields]) -> Method:
    """Asynchronous DiLoCo: no worker waits; the Nesterov momentum changes every N arrivals.

    On arrival of g = theta_start - theta_w:  S = S + g, and

        every N-th:   m = beta m + S/N;  theta = theta - eps ((1 - c N + c) beta m + g/N);  S = 0
        every other:  theta = theta - eps (c beta m + g/N)

    Use it with `thinwire.asynchronous`; `OuterLoop` trains in rounds and raises an error. Choose
    N = K: with c = 0, K workers of equal speed then compute the numbers of `diloco`. eps is the
    learning rate for a mean of N arrivals, and one arrival moves theta by eps/N; other code may
    specify eps/N. Codec and feedback apply to every arrival; feedback and momentum accumulate, as
    in rounds.

    Settings: H = 50 and weight decay 0.1 of Asynchronous Local-SGD (arXiv 2401.09135); inner lr,
    outer lr and momentum of DiLoCo (arXiv 2311.08105). The first paper tried outer learning rates
    of 0.03, 0.1, 0.3 and 0.7 and N of 4, 8 and 16, and found c = 0.1 no better than c = 0.

    Differs: the text that we have of the paper does not show which outer learning rate was best, so
    the preset takes DiLoCo's. A footnote of the paper claims equality with DiLoCo for c > 0; only
    c = 0 has it.

    Args:
        every: N.
        c: fraction of the momentum that each arrival applies early, in [0, 1/N].
        fields: fields of `Method`; `outer` replaces both N and c.

    Raises:
        ConfigurationError: a field is unknown or does not fit, N is below 1 or c is outside
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


_PRESETS: Mapping[str, Callable[..., Method]] = {
    preset.__name__: preset
    for preset in (
        *(ddp, decoupled_momentum, demo, diloco, muloco, noloco, sparseloco, sparse_muloco),
        *(streaming_diloco, streaming_muloco, async_diloco),
    )
}


def names() -> tuple[str, ...]:
    """The names of all presets that train in rounds.

    >>> names()[:3]
    ('ddp', 'decoupled_momentum', 'demo')
    """
    return tuple(name for name in _PRESETS if name != "async_diloco")  # which needs a server


def by_name(name: str) -> Callable[..., Method]:
    """The preset called `name`, one of `names()` or async_diloco.

    Raises:
        ConfigurationError: no preset has this name.

    >>> by_name("diloco") is diloco
    True
    """
    if name not in _PRESETS:
        raise unknown_name(f"use method {name!r}", name, _PRESETS)
    return _PRESETS[name]


def from_text(text: str, **fields: Any) -> Method:
    """The method that a command line names: NAME[:FIELD=VALUE]...

    Args:
        text: a preset's name and its arguments, such as `muloco:bits=2` or
            `sparseloco:density=1/32:sync_every=30`; it becomes the method's name. Any preset takes
            `clip_norms` and `drop_outliers`, limits of `ClipNorms` and `DropOutliers` around its
            aggregate, and `trimmed_mean`, how many workers a `TrimmedMean` in its place leaves out
            at either end. All values are numbers except `exchange`: gather or reduce_scatter.
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
    known = (*own, "sync_every", "exchange", *_RULES)
    given: dict[str, Any] = {}
    for argument in arguments:
        field, _, value = argument.partition("=")
        if field not in known:
            raise unknown_name(f"give {name} the number {field!r}", field, known)
        check(
            field not in given,
            f"use method {text!r}",
            because=f"it gives {field} twice",
            do="leave one of them out",
        )
        if field == "exchange" and value not in _EXCHANGES:
            raise unknown_name(f"use method {name!r} with {argument!r}", value, _EXCHANGES)
        given[field] = _EXCHANGES[value] if field == "exchange" else _number(name, argument, value)
    limits = {field: given.pop(field) for field in _RULES if field in given}
    method = preset(**{**fields, **given, "name": text})
    for field, limit in limits.items():
        aggregate = _RULES[field](limit, method.aggregate)
        method = dataclasses.replace(method, aggregate=aggregate)
    return method


_EXCHANGES: Mapping[str, Exchange] = {"gather": Gather(), "reduce_scatter": ReduceScatter()}
# Aggregates that a number in the text selects, innermost first.
_RULES: Mapping[str, Callable[[Any, Aggregate], Aggregate]] = {
    "trimmed_mean": lambda trim, _: TrimmedMean(trim=trim),
    "clip_norms": lambda limit, inner: ClipNorms(limit=limit, aggregate=inner),
    "drop_outliers": lambda limit, inner: DropOutliers(limit=limit, aggregate=inner),
}


def _number(name: str, argument: str, text: str) -> int | float:
    # Imported late: it is slow (it imports decimal), and only a command line needs it.
    from fractions import Fraction

    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"use method {name!r} with {argument!r}",
            because="that is not FIELD=NUMBER",
            do="write it like muloco:bits=2 or sparseloco:density=1/32",
        ) from error
    return value.numerator if value.denominator == 1 else float(value)


def _nesterov_per_workers(*rows: tuple[int, float, float]) -> OuterOptimizer:
    return outer.ByWorkerCount(
        table=tuple((k, outer.SGD(lr=lr, momentum=mu, nesterov=True)) for k, lr, mu in rows)
    )


def _of_bits(bits: int, fields: MethodFields) -> MethodFields:
    check(
        bits in (1, 2, 4, 8, 16, 32) and "codec" not in fields,
        f"send {bits} bits a number" + (" and a codec too" if "codec" in fields else ""),
        because="bits must be one of 1, 2, 4, 8, 16, 32, and chooses the codec",
        do="pass one of these as bits, or codec= alone",
    )
    if bits >= 16:
        return {"codec": CastBF16() if bits == 16 else Identity()}
    return {"codec": codecs.Quantise(bits=bits), "feedback": ErrorFeedback(decay=0.9)}


# Rows of MuLoCo's tables, by parameters: (inner lr, K, batch), and the base of the weight decay.
_MULOCO_RATES = {416e6: (0.0625, 8, 512), 3.1e9: (0.0156, 16, 2048)}
_MULOCO_DECAYS = {150e6: 1e-2, 416e6: 1e-2, 914e6: 1e-2, 1.76e9: 1e-3, 3.1e9: 1e-3, 15e9: 1e-4}


def _muon_for(
    parameters: float | None, workers: int | None, global_batch: int | None, fields: MethodFields
) -> InnerOptimizer:
    cannot = f"choose MuLoCo's inner settings for {parameters=}, {workers=}, {global_batch=}"
    check(
        "inner" not in fields,
        cannot,
        because="inner is given, too (a recipe such as laptop has its own)",
        do="leave one of them out",
    )
    size = parameters or 0
    check(
        min(_MULOCO_DECAYS) <= size <= max(_MULOCO_DECAYS),
        cannot,
        because="they are published for models of 150M to 15B parameters",
        do="pass parameters in that range, or inner=Muon(lr=...) with a rate of your own",
    )
    lr, published_workers, published_batch = _MULOCO_RATES[_nearest(size, _MULOCO_RATES)]
    workers = published_workers if workers is None else workers
    global_batch = published_batch if global_batch is None else global_batch
    check_whole("workers", workers)
    check_whole("global_batch", global_batch)
    base = _MULOCO_DECAYS[_nearest(size, _MULOCO_DECAYS)]
    return inner.Muon(lr=lr, weight_decay=base * global_batch / (512 * workers))


def _nearest(parameters: float, published: Iterable[float]) -> float:
    """The size in `published` whose ratio to `parameters` is nearest to 1."""
    return min(published, key=lambda size: abs(math.log(size / parameters)))


def _compose(fields: MethodFields, **paper: Unpack[MethodFields]) -> Method:
    for field in fields:
        if field not in MethodFields.__annotations__:
            cannot = f"build {fields.get('name', paper.get('name'))} with {field!r}"
            raise unknown_name(cannot, field, MethodFields.__annotations__)
    return Method(**{**paper, **fields})  # pyright: ignore[reportArgumentType]
