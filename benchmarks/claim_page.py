"""The committed result of a setting as a document."""

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
        "The sum of an element is divided by the number of workers that sent it, as in every",
        "released implementation. The arms *over workers* divide by all K, as the paper does: see",
        "[SparseLoCo, by senders](evidence.md#sparseloco-by-senders).",
    ),
    "NoLoCo": (
        "Anchors differ between workers; losses are those of their mean. *As many bytes*: in a",
        "round, a worker of NoLoCo receives one payload, and in an all-reduce 1.5 with four",
        "workers and 1.75 with eight. NoLoCo then has rounds of 7 and of 6 steps, and DiLoCo of",
        "10. Both send fp32.",
    ),
}
"""What must be known before a group's verdicts are read; by the group's name."""


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
    yield f"{setting.what}, unless the name of an arm"
    yield f"has another value. `{found['command']}` writes this page and"
    yield f"[{file}](../{file}). Do not edit it."
    yield ""
    yield f"{len(papers)} claims of papers: {_counts(papers)}. {len(ours)} claims of ours:"
    yield f"{_counts(ours)}."
    yield ""
    yield "Losses are validation losses of the outer parameters, in nats per byte. An effect is a"
    yield "difference of losses of the same seeds (same weights, same data), with its 95 % interval"
    yield "(Student's t). The standard deviation of a loss, without the means of arms and seeds, is"
    yield "pooled over the arms of a kind: dense with AdamW inside, dense with Muon inside, sparse."
    yield "An arm beyond three times its kind's median is not pooled; claims about it have their"
    yield "own deviation. Arms of which three seeds leave much open have six, as was decided when"
    yield "three were seen. A claim has the seeds that all of its arms have; with six, p counts"
    yield "twice, for the two looks. p is two-sided, and corrected by Holm within a paper, whose"
    yield "claims that are not run count, too. Below 5 %, a claim is"
    yield f"**{REPRODUCED}**, or **{OPPOSITE}** is found; otherwise it is"
    margin = f"{found['margin_nats']:.4f} nats" if found["margin_nats"] else "what is not known yet"
    yield f"{UNDECIDED}. *As good as* allows {margin}: the"
    yield "standard deviation between seeds of data parallelism, pooled over AdamW and Muon."
    yield ""
    yield f"A claim is **{NOT_RUN}** if a row of it is missing, of fewer than three seeds, of"
    yield "another corpus, of a method whose settings have changed since, or at rates that were"
    yield "searched for another K or H, or for another method: such rows decide nothing, whatever"
    yield "they show."
    yield ""
    yield f"`python benchmarks/claims.py {setting.name} OUT` repeats the runs and compares losses"
    yield "with these. With the torch and the model of processor that a row names"
    yield f"({next(iter(found['rows']))}: {first['machine']}) they must be equal, elsewhere within"
    yield "three standard deviations between seeds. The SHA-256 of the corpus begins with"
    varies = "" if setting.corpus else ", and differs between versions of Python"
    yield f"{first['corpus'][:16]}{varies}."
    yield ""


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
    """Three cells."""
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
    yield "Losses with their own standard errors; those without one are of one seed."
    yield "Bytes are those that the transport of one worker"
    yield "counted, headers included; DP (data parallelism) and full precision send fp32. Through a"
    yield "store or a hub, a worker sends *up* once what all others read. Point to point it sends"
    yield "as much as it receives (*down*). *Times fewer* compares up and down together with a ring"
    yield "all-reduce of 16-bit gradients at every step, which moves 2 (K - 1) / K of their bytes"
    yield f"each way: {megabytes(base(found['rows'])['all_reduce_bytes_each_way'])} up and"
    yield f"as much down with {setting.workers} workers."
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
    yield f"The planner computed how long these runs take over a link: {clock['step_s']} s a step,"
    yield f"{1000 * clock['latency_s']:.0f} ms one way, one link per worker, without encoding. Each"
    yield "cell has the time until the loss reaches DiLoCo's final one"
    yield f"({clock['target_val_loss']:.4f}), and that of the whole run."
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
    yield "The rates of every family are searched by one rule, from those of the laptop recipe,"
    yield "and those of an arm of another K or H, *over workers*, or of no family, for it alone,"
    yield "from its family's: one setting at a time goes a step up or down while the loss falls,"
    yield f"until every step from the best was tried and is worse ([all candidates](../{file}))."
    yield "The first seed is 10. The best four also run with 11 and 12, and all that is a step from"
    yield "the one that they choose is tried, too. The loss is that of documents of the training"
    yield "side that the search holds out: neither these seeds nor these documents are reported."
    if setting.budget != WHOLE:
        yield f"Here only {' and '.join(setting.budget.names)} is searched, from the rates of the"
        yield f"small size, in runs of {setting.budget.steps} steps with the first seed alone."
    yield "Not all arms are there yet: *seeds* are those by which the rates were chosen, 0 and 1"
    yield "being of an earlier search, of four candidates by reported losses; *untried* are steps"
    yield "from the chosen rates that no run has taken."
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
        untried = sum(step not in tried for _, step in setting.budget.ways(chosen))
        yield f"| {arm} | {' | '.join(cells)} | {', '.join(by)} | {untried} |"
    yield ""
    for arm, row in rows.items():
        if (found := lowest(row, setting.budget.seeds)) not in (None, row["chosen"]):
            rates = ", ".join(f"{name} {value:g}" for name, value in found.items())
            yield f"* **{arm}** has other rates than the search prefers so far: {rates}."
    yield ""
