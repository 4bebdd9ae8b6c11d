"""The committed result of a setting as a document."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from claim_list import BASELINES, NOT_RUN, OPPOSITE, OURS, REPRODUCED, UNDECIDED, base
from claim_settings import Setting, searched
from claim_tuning import WHOLE, lowest
from moved_bytes import megabytes
from thinwire.plan.units import times_text

NOTES = {
    "SparseLoCo, density and H": (
        "Each element's sum is divided by the number of workers that sent it, as in every released",
        "implementation. The arms *over workers* divide by all K, as the paper does: see",
        "[SparseLoCo, by senders](evidence.md#sparseloco-by-senders).",
    ),
    "Two bits, and what each part brings": (
        "Unless an arm names a grid, it is ours: mid-rise, per chunk of 4,096. The paper's is the",
        "statistical one of a tensor.",
    ),
    "DeMo": (
        "Our preset sends a sign and one of two levels for each value, the released code fp32.",
    ),
    "NoLoCo": (
        "Anchors differ between workers; losses are those of their mean. *As many bytes*: in each",
        "round, a worker of NoLoCo receives one payload, where an all-reduce moves 1.5 with four",
        "workers and 1.75 with eight. So NoLoCo has rounds of 7 and of 6 steps, and DiLoCo of 10.",
        "The paper compares rounds half as long as DiLoCo's, which was not run. Both send fp32.",
    ),
}
"""What to know before reading a group's verdicts, by the name of the group."""


def page(setting: Setting, found: Mapping[str, Any]) -> str:
    """Markdown: verdicts, all rows, wall-clock, rates."""
    return "\n".join(
        [
            *_head(setting, found),
            *_verdicts(found),
            *_rows(setting, found),
            *_clock(found),
            *_rates(setting),
        ]
    )


def _head(setting: Setting, found: Mapping[str, Any]) -> Iterator[str]:
    papers = [claim for claim in found["claims"] if claim["source"] != OURS]
    ours = [claim for claim in found["claims"] if claim["source"] == OURS]
    file = f"benchmarks/results/claims-{setting.name}.json"
    first = base(found["rows"])
    yield f"# The published claims, at the {setting.name} setting"
    yield ""
    yield f"{setting.what}, unless an arm's name"
    yield f"says otherwise. `{found['command']}` writes this page and"
    yield f"[{file}](../{file}). Do not edit it."
    yield ""
    yield f"{len(papers)} claims of papers: {_counts(papers)}. {len(ours)} claims of our own:"
    yield f"{_counts(ours)}."
    yield ""
    yield "Losses are validation losses of the outer parameters, in nats per byte. An effect is a"
    yield "difference between losses of the same seeds (same weights, same data), with its 95 %"
    yield "interval (Student's t), which is not corrected for other claims. The standard deviation"
    yield "of a loss, after subtracting the means of arms and seeds, is pooled over the arms of a"
    yield "kind: dense or sparse, with AdamW or with Muon inside. An arm above three times its"
    yield "kind's median is not pooled. Claims about it, and those that compare two kinds, use the"
    yield "deviation of their own effect. Arms of claims that three seeds left open have up to six."
    yield "A claim uses the seeds that all of its arms have; with more than three, p is doubled for"
    yield "the second look. p is"
    yield "two-sided and corrected by Holm within a paper, including claims that are not run. If it"
    yield f"is below 5 %, a claim is **{REPRODUCED}** or **{OPPOSITE}**; otherwise"
    margin = f"{found['margin_nats']:.4f} nats" if found["margin_nats"] else "what is not known yet"
    yield f"it is {UNDECIDED}. *As good as* allows {margin}: the"
    yield "standard deviation between seeds of data parallelism, pooled over AdamW and Muon"
    yield f"({' and '.join(_spread(found['rows'], arm) for arm in BASELINES)})."
    yield ""
    yield f"A claim is **{NOT_RUN}** if one of its rows is missing, or has fewer than three seeds,"
    yield "another corpus, settings that have changed since, or rates searched for another K, H or"
    yield "method. Such rows decide nothing, whatever they show."
    yield ""
    yield f"`python benchmarks/claims.py {setting.name} OUT` repeats the runs and compares losses"
    yield "with these. With the same torch and processor as a row names"
    yield f"({next(iter(found['rows']))}: {first['machine']}) they must be equal; elsewhere they"
    yield "must agree within three standard deviations between seeds. The SHA-256 of the corpus"
    yield "begins with"
    varies = "" if setting.corpus else ", and differs between versions of Python"
    yield f"{first['corpus'][:16]}{varies}."
    yield ""


def _spread(rows: Mapping[str, Any], arm: str) -> str:
    losses = rows[arm]["val_loss_by_seed"].values() if arm in rows else ()
    return f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "unknown"


def _counts(claims: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [claim["verdict"] for claim in claims]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in (REPRODUCED, UNDECIDED, OPPOSITE, NOT_RUN))


def _verdicts(found: Mapping[str, Any]) -> Iterator[str]:
    for group, same in groupby(found["claims"], key=lambda claim: claim["group"]):
        yield f"## {group}"
        yield ""
        yield from (*NOTES[group], "") if group in NOTES else ()
        yield "| claim | verdict | effect, nats | p | claimed by |"
        yield "|---|---|---|---|---|"
        for claim in same:
            yield f"| {claim['claim']} | {_verdict(claim)} | {claim['source']} |"
        yield ""


def _verdict(claim: Mapping[str, Any]) -> str:
    """The three cells of a claim's effect and verdict."""
    verdict, effect = claim["verdict"], claim["effect"]
    if effect is None:
        return f"{verdict}: {claim['why']} | |"
    shown = f"**{verdict}**" if verdict in (REPRODUCED, OPPOSITE) else verdict
    interval = f"{effect['mean']:+.4f} ({effect['low']:+.4f} to {effect['high']:+.4f})"
    p = effect["p_holm"]
    return f"{shown} | {interval} | {f'{p:.3f}' if p >= 0.0005 else '< .001'}"


def _signed(effect: Mapping[str, Any]) -> str:
    return f"{effect['mean']:+.4f}{_error(effect)}"


def _error(effect: Mapping[str, Any]) -> str:
    error = effect["standard_error"]
    return "" if error is None else f" ± {error:.4f}"


def _rows(setting: Setting, found: Mapping[str, Any]) -> Iterator[str]:
    yield "## All arms"
    yield ""
    yield "Losses with their own standard errors; those without one have one seed. Bytes are what"
    yield "the transport of one worker counted, headers included, or for some rows in fp32 what the"
    yield "planner computes, which equals it; DP (data parallelism) and full"
    yield "precision send fp32. Through a store or a hub, a worker sends its payload *up* once, for"
    yield "all others to read. Point to point it sends as much as it receives (*down*). *Times"
    yield "fewer* compares up and down together with a ring all-reduce of 16-bit gradients at every"
    yield "step, which moves 2 (K - 1) / K of their bytes each way:"
    yield f"{megabytes(base(found['rows'])['all_reduce_bytes_each_way'])} up and as much down with"
    yield f"{setting.workers} workers."
    yield ""
    yield (
        "| arm | validation loss | minus DP AdamW | minus DP Muon | up, store | down | "
        "times fewer, store | point to point |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for arm, row in found["rows"].items():
        against = (row.get(f"minus_{baseline}") for baseline in BASELINES)
        cells = " | ".join("" if effect is None else _signed(effect) for effect in against)
        moved = (row["sent_bytes_per_worker"], row["received_bytes_per_worker"])
        fewer = (row["times_fewer_by_store"], row["times_fewer_point_to_point"])
        yield (
            f"| {arm} | {row['val_loss']['mean']:.4f}{_error(row['val_loss'])} | {cells} | "
            f"{' | '.join(map(megabytes, moved))} | {' | '.join(map(times_text, fewer))} |"
        )
    yield ""


def _clock(found: Mapping[str, Any]) -> Iterator[str]:
    clock = found["clock"]
    if clock is None:
        return
    yield "## Loss against wall-clock"
    yield ""
    yield f"The planner's time for these runs over a link: {clock['step_s']} s a step,"
    yield f"{1000 * clock['latency_s']:.0f} ms one way, one link per worker, without encoding. Each"
    yield f"cell has the time to DiLoCo's final loss ({clock['target_val_loss']:.4f}), and that of"
    yield "the whole run. Losses are means of the first three seeds, and not of all six that some"
    yield "arms have above."
    yield ""
    yield "| arm | " + " | ".join(clock["links"]) + " |"
    yield "|---|" + "---|" * len(clock["links"])
    for arm in next(iter(clock["links"].values())):
        cells = [link[arm] for link in clock["links"].values()]
        yield f"| {arm} | " + " | ".join(map(_times, cells)) + " |"
    yield ""


def _times(cell: Mapping[str, float | None]) -> str:
    reached, whole = cell["to_target_s"], cell["whole_run_s"]
    return f"{'never' if reached is None else f'{reached:,.0f} s'} of {whole:,.0f} s"


def _rates(setting: Setting) -> Iterator[str]:
    file = f"benchmarks/results/claims-{setting.name}-tuning.json"
    yield "## Rates"
    yield ""
    yield "One rule searches the rates of every family, beginning at those of the laptop recipe. An"
    yield "arm of another K or H, *over workers*, with *own rates* or of no family has a search of"
    yield "its own, which begins at its family's rates. One setting at a time goes a step up or"
    yield "down while the loss falls, until every step from the best is tried and worse"
    yield f"([all candidates](../{file}))."
    yield "All candidates run with seed 10 and the best four also with 11 and 12; every step from"
    yield "the one that they choose is tried, too. The loss is that of held-out documents of the"
    yield "training side. Neither these seeds nor these documents are reported."
    if setting.budget != WHOLE:
        yield f"At this size only {' and '.join(setting.budget.names)} is searched, from the rates"
        yield f"of the small size, in runs of {setting.budget.steps} steps with seed 10 alone;"
        yield f"for {', '.join(setting.widened)} all settings are."
    yield "*Seeds* are those that chose the rates (0 and 1 belong to an earlier search of four"
    yield "candidates by reported losses); *untried* counts steps from the rates that did not run."
    yield ""
    names = ("inner_lr", "outer_lr", "outer_momentum", "feedback_decay")
    yield (
        "| arm | inner lr | outer lr | outer momentum | decay of feedback, 0: none | seeds | "
        "untried |"
    )
    yield "|---|---|---|---|---|---|---|"
    rows = searched(setting)
    for arm, row in rows.items():
        chosen = row["chosen"]
        cells = [f"{chosen[name]:g}" if name in chosen else "" for name in names]
        by = next(each["runs"] for each in row["candidates"] if each["settings"] == chosen)
        tried = [each["settings"] for each in row["candidates"]]
        untried = sum(step not in tried for _, step in setting.budget_of(arm).ways(chosen))
        yield f"| {arm} | {' | '.join(cells)} | {', '.join(by)} | {untried} |"
    yield ""
    for arm, row in rows.items():
        if (found := lowest(row, setting.budget.seeds)) not in (None, row["chosen"]):
            rates = ", ".join(f"{name} {value:g}" for name, value in found.items())
            yield f"* **{arm}** has other rates than the search now prefers: {rates}."
    yield ""
