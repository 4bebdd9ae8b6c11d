"""The arms of the claims, each of which changes some slots of a family's method and nothing else.

Labels say what differs from the family at the setting's K and H.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import thinwire as tw
from claim_settings import FAMILIES, Setting
from claim_tuning import with_settings
from thinwire import codecs
from thinwire.codecs import Identity, Linear, Quantise, Statistical, Tensors
from thinwire.feedback import ErrorFeedback, NoFeedback
from thinwire.method import Method
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop

# As in the sweeps of MuLoCo (arXiv 2505.23725).
_FEEDBACK = ErrorFeedback(decay=0.9)
UNTUNED = "diloco, outer (.7, .9)"
DENSITIES = {"1/8": 512, "1/32": 128, "1/64": 64, "1/128": 32, "1/256": 16}
"""Densities of the sparse families, and their k of 4,096."""
SPARSE = ("sparseloco", "sparse_muloco")
FRONT = ("diloco", "muloco", "muloco 1 bit", *SPARSE)
"""Arms that also run with more workers."""
ALONE = "no exchange but a mean at the end"
OVER_WORKERS = {family: f"{family}, over workers" for family in SPARSE}
"""The sparse families with sums divided by K, which need rates of their own."""
SCATTERED = ("muloco 2 bit", "muloco 1 bit", "streaming_muloco")
"""Arms that reduce-scatter with many workers, where owners of shards encode the mean again."""
OWNER_FEEDBACK = "muloco 1 bit, reduce-scatter, feedback of owners"
DECOUPLED = ("decoupled momentum", "decoupled momentum, coupled")
"""Arms without a family, whose searches begin at the rates of others."""
OWN_RATES = {bits: f"muloco {bits} bit, own rates" for bits in (4, 2, 1)}
"""Few bits at rates and feedback of their own, by bits; other arms have the rates of fp32."""


def arms(setting: Setting) -> dict[str, TrainConfig]:
    """All runs of one seed by their labels."""
    # What the warning is about is measured here.
    with warnings.catch_warnings(action="ignore", category=tw.LossyReduceScatterWarning):
        return _arms(setting)


def _arms(setting: Setting) -> dict[str, TrainConfig]:
    found = {family: setting.config(setting.method(family)) for family in FAMILIES}
    # With few rounds the papers' momentum is a straw man, which some claims are made against.
    papers = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    found[UNTUNED] = setting.config(renamed(setting, "diloco", UNTUNED, outer=papers))
    groups = (_intervals, _bits, _sparse, _streams, _demo, _decoupled)
    for method in (method for group in groups for method in group(setting)):
        found[method.name] = setting.config(method)
    found |= _teams(setting, found) | _gossip(setting) | _scattered(setting, found)
    found |= _pair(setting, found)
    found = {arm: found[arm] for arm in setting.only or found}
    own = {arm: setting.chosen.get(arm, {}) for arm in found}
    return {arm: replace(c, method=with_settings(c.method, own[arm])) for arm, c in found.items()}


def borrowed(setting: Setting, arm: str, config: TrainConfig) -> str | None:
    """Why the rates of an arm are borrowed: they are of another K, H or method; None if not.

    >>> from claim_settings import SMALL
    >>> [arm for arm, config in arms(SMALL).items() if borrowed(SMALL, arm, config)][:2]
    ['diloco H=5', 'diloco H=30']
    """
    if arm in setting.chosen:
        return None
    of_setting = (setting.workers, setting.sync_every if config.method.sync_every > 1 else 1)
    if (config.workers, config.method.sync_every) != of_setting:
        return "rates of another K or H"
    return "rates of another method" if arm in (*DECOUPLED, *OWN_RATES.values()) else None


def kind(method: Method) -> str:
    """The kind by which deviations are pooled: the inner optimizer, and whether it is sparse."""
    sparse = "sparse, " * isinstance(method.codec, codecs.TopK)
    return sparse + type(method.inner).__name__


def renamed(setting: Setting, family: str, name: str, **slots: Any) -> Method:
    """A family's method under another name, with some slots replaced."""
    return replace(setting.method(family), name=name, **slots)


def _teams(setting: Setting, found: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """The front with more workers, and dense methods also with fewer."""
    return {
        f"{arm} K={workers}": setting.config(
            replace(found[arm].method, name=f"{arm} K={workers}"), workers
        )
        for arm in FRONT
        for workers in setting.team_sizes
        if workers > setting.workers or (workers != setting.workers and arm in FRONT[:2])
    }


def _pair(setting: Setting, found: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Two workers with one bit, which send 300 times fewer bytes."""
    if (every := setting.pair_every) is None:
        return {}
    name = f"muloco 1 bit K=2 H={every}"
    method = replace(found["muloco 1 bit"].method, name=name, sync_every=every)
    return {name: setting.config(method, 2)}


def _intervals(setting: Setting) -> Iterator[Method]:
    for family in ("diloco", "muloco", "sparseloco"):
        for every in setting.intervals:
            if every != setting.sync_every:
                yield renamed(setting, family, f"{family} H={every}", sync_every=every)


def _bits(setting: Setting) -> Iterator[Method]:
    """Bits, feedback and grid, each changed alone; and DiLoCo with the same two bits."""

    def muloco(name: str, codec: codecs.Codec, **slots: Any) -> Method:
        slots = {"feedback": _FEEDBACK, **slots}
        return renamed(setting, "muloco", f"muloco {name}", codec=codec, **slots)

    two, per_tensor = Quantise(bits=2), Tensors()
    linear = Quantise(bits=2, grid=Linear(), groups=per_tensor)
    yield muloco("4 bit", Quantise(bits=4))
    yield muloco("2 bit", two)
    yield muloco("2 bit, no feedback", two, feedback=NoFeedback())
    yield muloco("2 bit, statistical grid", Quantise(bits=2, grid=Statistical(), groups=per_tensor))
    yield muloco("2 bit, linear grid", linear)
    yield muloco("1 bit", Quantise(bits=1))
    yield muloco("1 bit, linear grid", Quantise(bits=1, grid=Linear(), groups=per_tensor))
    yield muloco("1 bit, no feedback", Quantise(bits=1), feedback=NoFeedback())
    for bits, arm in OWN_RATES.items():
        yield replace(muloco(f"{bits} bit", Quantise(bits=bits)), name=arm)
    if (few := setting.few_rounds) is not None:
        # The recipe's settings for as many rounds (12.5), which wire_claims.py found.
        recipe = laptop("muloco:bits=1:sync_every=128").method
        slots = {"feedback": recipe.feedback, "outer": recipe.outer}
        yield muloco(f"1 bit, H={few}", Quantise(bits=1), sync_every=few, **slots)
    adamw = {f"{bits} bit": Quantise(bits=bits) for bits in (4, 2, 1)}
    for name, codec in (adamw | {"2 bit, linear grid": linear}).items():
        yield renamed(setting, "diloco", f"diloco {name}", codec=codec, feedback=_FEEDBACK)


def _sparse(setting: Setting) -> Iterator[Method]:
    """Density, bits of a value and the divisor, each changed alone; then the ladder."""
    other_values = {"sparseloco": codecs.SignMean(), "sparse_muloco": codecs.SignLevels()}
    bits = {"sparseloco": 1, "sparse_muloco": 2}
    for family in SPARSE:
        method = setting.method(family)
        codec = method.codec
        assert isinstance(codec, codecs.TopK)
        for density, k in DENSITIES.items():
            if k != codec.k:
                name = f"{family} {density}"
                yield renamed(setting, family, name, codec=replace(codec, k=k))
        values = replace(codec, values=other_values[family])
        yield renamed(setting, family, f"{family}, {bits[family]}-bit values", codec=values)
        yield renamed(setting, family, OVER_WORKERS[family], aggregate=tw.MeanOverWorkers())
    codec = setting.method("sparseloco").codec
    assert isinstance(codec, codecs.TopK)
    published = replace(codec, values=codecs.TensorLevels())
    yield renamed(setting, "sparseloco", "sparseloco, levels of a tensor", codec=published)
    yield from _ladder(setting)


def _ladder(setting: Setting) -> Iterator[Method]:
    """From dense averaging to SparseLoCo one slot at a time, all at SparseLoCo's rates."""
    codec = setting.method("sparseloco").codec
    assert isinstance(codec, codecs.TopK)
    whole = replace(codec, values=codecs.F32())
    ladder = {
        "dense": {"codec": Identity(), "feedback": NoFeedback()},
        "Top-k alone": {"codec": whole, "feedback": NoFeedback()},
        "Top-k, feedback": {"codec": whole},
    }
    for rung, slots in ladder.items():
        yield renamed(setting, "sparseloco", f"sparseloco's rates, {rung}", **slots)


def _demo(setting: Setting) -> Iterator[Method]:
    codec = setting.method("demo").codec
    assert isinstance(codec, codecs.TopK)
    whole = replace(codec, values=codecs.F32())
    yield renamed(setting, "demo", "demo, fp32 values", codec=whole)


def _decoupled(setting: Setting) -> Iterator[Method]:
    """Decoupled momentum as released and as in its paper, and the baselines that both must beat.

    Outer (.7, .9) diverges (`thinwire.presets.decoupled_momentum`), so the search
    begins at the choices for MuLoCo and streaming DiLoCo, and at SparseLoCo's inner rate.
    """
    released = tw.presets.decoupled_momentum(
        inner=setting.method("sparseloco").inner,
        sync_every=setting.sync_every,
        outer=tw.outer.DecoupledNesterov(lr=0.8),
        feedback=tw.feedback.DecoupledMomentum(decay=0.6),
    )
    yield replace(released, name=DECOUPLED[0])
    yield renamed(setting, "sparseloco", DECOUPLED[1], codec=released.codec)
    yield renamed(setting, "diloco", ALONE, sync_every=setting.changes["steps"])


def _streams(setting: Setting) -> Iterator[Method]:
    """Fragments, delay, mixing and four bits, added one after the other.

    Mixing needs outer momentum, and replacing does not (docs/log.md): without mixing, rates are
    DiLoCo's.
    """
    apart = setting.method("streaming_diloco").fragments
    long = max(1, setting.sync_every // 2)
    unmixed = {"fragments": apart}
    yield renamed(setting, "diloco", "fragments", **unmixed)
    yield renamed(setting, "diloco", "fragments, tau 2", overlap=tw.Delay(tau=2), **unmixed)
    for tau in (2, long):
        yield renamed(
            setting,
            "streaming_diloco",
            f"fragments, tau {tau}, alpha .5",
            codec=Identity(),
            overlap=tw.Delay(tau=tau, mixing=0.5),
        )
    streaming = setting.method("streaming_diloco")
    yield renamed(
        setting,
        "muloco",
        "streaming_muloco",
        fragments=streaming.fragments,
        overlap=streaming.overlap,
        codec=streaming.codec,
        # The best of four that were tried (docs/log.md).
        outer=tw.outer.SGD(lr=1.0, momentum=0.7, nesterov=True),
    )


def _gossip(setting: Setting) -> dict[str, TrainConfig]:
    """NoLoCo with K and 2 K workers, with DiLoCo's number of rounds, or at most its bytes."""
    found = dict[str, TrainConfig]()
    for workers in (setting.workers, 2 * setting.workers):
        team = "noloco" if workers == setting.workers else f"noloco K={workers}"
        for every in (setting.sync_every, gossip_interval(setting, workers)):
            arm = team if every == setting.sync_every else f"{team} H={every}"
            method = renamed(setting, "noloco", arm, sync_every=every)
            found[arm] = setting.config(method, workers)
    return found


def _scattered(setting: Setting, found: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Reduce-scatter with the K of the other arms, so that nothing else differs."""
    slots = {f"{arm}, reduce-scatter": (arm, tw.ReduceScatter()) for arm in SCATTERED}
    slots[OWNER_FEEDBACK] = "muloco 1 bit", tw.ReduceScatter(owner_feedback=_FEEDBACK)
    return {
        name: setting.config(replace(found[arm].method, name=name, exchange=exchange))
        for name, (arm, exchange) in slots.items()
    }


def gossip_interval(setting: Setting, workers: int) -> int:
    """The H with which NoLoCo receives at most as many bytes as DiLoCo with the setting's H.

    In NoLoCo a worker receives one payload a round. An all-reduce of K workers takes 2 (K - 1) / K
    of them: 1.5 with four, which allows NoLoCo rounds of 7 steps in place of 10, 1.75 with eight.

    >>> from claim_settings import SMALL
    >>> [gossip_interval(SMALL, workers) for workers in (4, 8)]
    [7, 6]
    """
    return math.ceil(setting.sync_every * workers / (2 * (workers - 1)))
