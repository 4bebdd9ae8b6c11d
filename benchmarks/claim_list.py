"""The published claims, each as a contrast of losses of the same seed, and what to say of it.

    effect_s = sum_a w_a loss_as        mean over seeds s, standard error s / sqrt(n)

A claim of an order is shown if the effect is below 0 at one-sided 95 % (Student's t), contradicted
if it is above 0 likewise. A claim that something costs nothing is shown if the effect is below 1 %
of the loss that it is compared with, likewise, and contradicted if it is above that. All else is
not shown at this scale. About one in twenty would be judged wrongly by chance.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from claim_arms import ALONE, DENSITIES, FRONT, SPARSE, UNTUNED
from claim_settings import Setting
from thinwire.runs.statistics import Estimate, estimate

MULOCO, SPARSELOCO = "MuLoCo (arXiv 2505.23725)", "SparseLoCo (arXiv 2508.15706)"
STREAMING, DILOCO = "Streaming DiLoCo (arXiv 2501.18512)", "DiLoCo (arXiv 2311.08105)"
NOLOCO, DEMO = "NoLoCo (arXiv 2506.10911)", "DeMo (arXiv 2411.19870)"
DECOUPLED = "Decoupled momentum (arXiv 2510.03371)"
OURS = "no paper: ours to find out"
MARGIN = 0.01
# One-sided 95 % of Student's t by degrees of freedom, from any table.
_T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is said of the losses of some arms.

    Args:
        group: under which heading it stands.
        text: what is claimed.
        source: by whom.
        weights: w_a.
        reference: the arm that is not to be exceeded by more than a margin; None for an order.
    """

    group: str
    text: str
    source: str
    weights: Mapping[str, float]
    reference: str | None = None

    def effect(self, losses: Mapping[str, Mapping[int, float]]) -> Estimate | None:
        """Of the seeds that all of its arms have; None if there is none."""
        seeds = set.intersection(*(set(losses.get(arm, {})) for arm in self.weights))
        found = {
            seed: sum(w * losses[arm][seed] for arm, w in self.weights.items()) for seed in seeds
        }
        return estimate(found) if found else None

    def verdict(self, losses: Mapping[str, Mapping[int, float]]) -> str:
        """Shown, not shown at this scale, or contradicted."""
        effect = self.effect(losses)
        if effect is None or effect.standard_error is None:
            return "not shown at this scale"
        slack = _T95[min(len(effect.seeds) - 1, max(_T95))] * effect.standard_error
        mean, margin = effect.mean, 0.0
        if self.reference is not None:
            margin = MARGIN * estimate(losses[self.reference]).mean
        if mean + slack < margin:
            return "shown"
        return "contradicted" if mean - slack > margin else "not shown at this scale"


def claims(setting: Setting) -> Iterator[Claim]:
    """All claims, at a setting's K and H."""
    yield from _muloco(setting)
    yield from _teams(setting)
    yield from _bits()
    yield from _sparse(setting)
    yield from _streams(setting)
    yield from _gossip(setting)
    yield from _demo()
    yield from _decoupled()
    yield from _data_parallel()


def _below(group: str, text: str, source: str, better: str, worse: str) -> Claim:
    return Claim(group=group, text=text, source=source, weights={better: 1.0, worse: -1.0})


def _as_good(group: str, text: str, source: str, arm: str, reference: str) -> Claim:
    return Claim(
        group=group,
        text=text,
        source=source,
        weights={arm: 1.0, reference: -1.0},
        reference=reference,
    )


def _muloco(setting: Setting) -> Iterator[Claim]:
    group = "MuLoCo and K"

    def of(family: str, workers: int) -> str:
        return family if workers == setting.workers else f"{family} K={workers}"

    for workers in setting.team_sizes:
        text = f"MuLoCo is below DiLoCo with K={workers}"
        yield _below(group, text, MULOCO, of("muloco", workers), of("diloco", workers))
    few, *_, many = setting.team_sizes
    yield Claim(
        group=group,
        text=f"MuLoCo loses less than DiLoCo from K={few} to K={many}",
        source=MULOCO,
        weights={
            of("muloco", many): 1.0,
            of("muloco", few): -1.0,
            of("diloco", many): -1.0,
            of("diloco", few): 1.0,
        },
    )


def _teams(setting: Setting) -> Iterator[Claim]:
    group = "What is compressed, with more workers"
    dense = {"sparseloco": "diloco"}
    names = {"sparseloco": "SparseLoCo", "sparse_muloco": "sparse MuLoCo"}
    for workers in setting.team_sizes:
        for arm in FRONT[2:] if workers > setting.workers else ():
            reference = f"{dense.get(arm, 'muloco')} K={workers}"
            name = names.get(arm, "1-bit MuLoCo")
            text = f"{name} is as good as full precision with K={workers}"
            yield _as_good(group, text, OURS, f"{arm} K={workers}", reference)


def _bits() -> Iterator[Claim]:
    group, two = "Two bits, and what each part brings", "muloco 2 bit"
    yield _as_good(
        group, "4-bit MuLoCo is as good as full precision", MULOCO, "muloco 4 bit", "muloco"
    )
    yield _as_good(
        group, "2-bit MuLoCo with feedback is as good as full precision", MULOCO, two, "muloco"
    )
    yield _below(group, "2-bit MuLoCo is below full-precision DiLoCo", MULOCO, two, "diloco")
    text = "2-bit DiLoCo with feedback is as good as full precision"
    yield _as_good(group, text, MULOCO, "diloco 2 bit", "diloco")
    for bits in ("2 bit", "1 bit"):
        arm = f"muloco {bits}"
        text = f"at {bits} MuLoCo is better with feedback"
        yield _below(group, text, MULOCO, arm, f"{arm}, no feedback")
    statistical, linear = f"{two}, statistical grid", f"{two}, linear grid"
    text = "at 2 bit the statistical grid of a tensor is as good as full precision"
    yield _as_good(group, text, MULOCO, statistical, "muloco")
    text = "at 2 bit the linear grid of a tensor is above the statistical one"
    yield _below(group, text, MULOCO, statistical, linear)
    text = "at 2 bit the linear grid of a tensor loses, with AdamW inside"
    yield _below(group, text, MULOCO, "diloco 2 bit", "diloco 2 bit, linear grid")
    text = "at 1 bit the linear grid of a tensor loses"
    yield _below(group, text, OURS, "muloco 1 bit", "muloco 1 bit, linear grid")
    text = "at 2 bit our grid of a chunk is below the statistical one of a tensor"
    yield _below(group, text, OURS, two, statistical)
    yield _as_good(
        group,
        "1-bit MuLoCo with feedback is as good as full precision",
        OURS,
        "muloco 1 bit",
        "muloco",
    )


def _sparse(setting: Setting) -> Iterator[Claim]:
    group = "SparseLoCo, density and H"
    for density in DENSITIES:
        arm = "sparseloco" if density == "1/32" else f"sparseloco {density}"
        text = f"SparseLoCo of density {density} is below tuned DiLoCo"
        yield _below(group, text, SPARSELOCO, arm, "diloco")
    text = "SparseLoCo is as good as tuned DiLoCo"
    yield _as_good(group, text, OURS, "sparseloco", "diloco")
    for every in setting.intervals:
        if every != setting.sync_every:
            sparse, dense = f"sparseloco H={every}", f"diloco H={every}"
            text = f"SparseLoCo is below tuned DiLoCo with H={every}"
            yield _below(group, text, SPARSELOCO, sparse, dense)
    text = "SparseLoCo is below DiLoCo with the papers' outer optimizer"
    yield _below(group, text, SPARSELOCO, "sparseloco", UNTUNED)
    text = "Muon inside makes the sparse wire better than AdamW does"
    yield _below(group, text, OURS, "sparse_muloco", "sparseloco")
    for family, inside in zip(SPARSE, ("AdamW", "Muon"), strict=True):
        text = f"a mean over senders is below one over workers, {inside} inside"
        yield _below(group, text, OURS, family, f"{family}, over workers")
    for density in DENSITIES:
        if density != "1/32":
            text = f"density {density} is as good as 1/32, Muon inside"
            arm = f"sparse_muloco {density}"
            yield _as_good(group, text, OURS, arm, "sparse_muloco")
    for arm, (text, reference) in {
        "sparseloco, 1-bit values": ("one bit a value is as good as two", "sparseloco"),
        "sparse_muloco": (
            "one bit a value is as good as two, Muon inside",
            "sparse_muloco, 2-bit values",
        ),
    }.items():
        yield _as_good(group, text, OURS, arm, reference)
    text = "levels of a group are below the published ones of a tensor"
    yield _below(group, text, OURS, "sparseloco", "sparseloco, levels of a tensor")
    yield from _ablation()


def _ablation() -> Iterator[Claim]:
    group = "Sparsity alone, all at SparseLoCo's rates"
    rungs = [f"sparseloco's rates, {rung}" for rung in ("dense", "Top-k alone", "Top-k, feedback")]
    dense, alone, feedback = rungs
    yield _below(group, "Top-k without feedback loses", STREAMING, dense, alone)
    yield _below(group, "feedback makes up for some of it", SPARSELOCO, feedback, alone)
    yield _as_good(group, "Top-k with feedback is as good as dense", SPARSELOCO, feedback, dense)
    text = "2-bit values cost nothing on top of Top-k"
    yield _as_good(group, text, SPARSELOCO, "sparseloco", feedback)


def _streams(setting: Setting) -> Iterator[Claim]:
    group = "Streaming, over tau and alpha"
    long = max(1, setting.sync_every // 2)
    steps = {
        "fragments": "fragments",
        "fragments, tau 2": "and tau 2, nothing mixed",
        "fragments, tau 2, alpha .5": "and tau 2, alpha .5",
        f"fragments, tau {long}, alpha .5": f"and tau {long}, alpha .5",
        "streaming_diloco": "and tau 2, alpha .5, E3M0",
    }
    for arm, text in steps.items():
        yield _as_good(group, f"{text}: as good as DiLoCo", STREAMING, arm, "diloco")
    text = "four bits (E3M0) cost nothing"
    yield _as_good(group, text, STREAMING, "streaming_diloco", "fragments, tau 2, alpha .5")
    yield _below(
        group, "streaming MuLoCo, E3M0, is below DiLoCo", OURS, "streaming_muloco", "diloco"
    )


def _gossip(setting: Setting) -> Iterator[Claim]:
    group, every = "NoLoCo", round(0.6 * setting.sync_every)
    for workers in (setting.workers, 2 * setting.workers):
        team = "" if workers == setting.workers else f" K={workers}"
        at, dense = f"K={workers}", f"diloco{team}"
        text = f"NoLoCo is below DiLoCo in as many rounds, {at}"
        yield _below(group, text, NOLOCO, f"noloco{team}", dense)
        text = f"NoLoCo is below DiLoCo in as many bytes received, K={workers}"
        yield _below(group, text, NOLOCO, f"noloco{team} H={every}", dense)


def _demo() -> Iterator[Claim]:
    group = "DeMo"
    yield _as_good(group, "DeMo is as good as DP AdamW", DEMO, "demo", "ddp")


def _decoupled() -> Iterator[Claim]:
    group, name = "Decoupled momentum", "decoupled momentum"
    text = "decoupled momentum is as good as DiLoCo"
    yield _as_good(group, text, DECOUPLED, name, "diloco")
    text = (
        "the released form of decoupled momentum is below no exchange at all but a mean at the end"
    )
    yield _below(group, text, OURS, name, ALONE)
    text = "its coupled form, which the paper describes, is below the released one"
    yield _below(group, text, OURS, f"{name}, coupled", name)


def _data_parallel() -> Iterator[Claim]:
    group = "Against tuned data parallelism"
    yield _below(group, "DP Muon is below DP AdamW", MULOCO, "ddp-muon", "ddp")
    yield _below(group, "DiLoCo K=1 is below DP AdamW", MULOCO, "diloco K=1", "ddp")
    yield _below(group, "MuLoCo K=1 is below DP Muon", MULOCO, "muloco K=1", "ddp-muon")
    yield _as_good(group, "DiLoCo is as good as DP AdamW", DILOCO, "diloco", "ddp")
    for arm, name in {
        "muloco": "MuLoCo",
        "muloco 2 bit": "2-bit MuLoCo",
        "sparse_muloco": "sparse MuLoCo",
        "sparseloco": "SparseLoCo",
    }.items():
        yield _below(group, f"{name} is below DP AdamW", OURS, arm, "ddp")
    yield _as_good(group, "MuLoCo is as good as DP Muon", OURS, "muloco", "ddp-muon")
