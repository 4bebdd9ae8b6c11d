"""The committed result of a setting as a document."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from claim_list import OURS
from claim_settings import FAMILIES, Setting, tuned

MARKS = {"shown": "**shown**", "contradicted": "**contradicted**"}
NOTES = {
    "SparseLoCo, density and H": (
        "The sum of an element is divided by the number of workers that sent it, as in every",
        "released implementation. The arms *over workers* divide by all K, as the paper does: see",
        "[SparseLoCo, by senders](evidence.md#sparseloco-by-senders).",
    ),
    "NoLoCo": (
        "Anchors differ between workers; losses are those of their mean. *As many bytes*: in a",
        "round, a worker of NoLoCo receives one payload, and in an all-reduce 1.5. NoLoCo then has",
        "rounds of 6 steps, and DiLoCo of 10. Both send fp32.",
    ),
}
"""What must be known before a group's verdicts are read; by the group's name."""


def page(setting: Setting, found: Mapping[str, Any]) -> str:
    """Markdown: verdicts, all rows, wall-clock, rates."""
    return "\n".join(
        [
            *_head(setting, found),
            *_verdicts(found),
            *_rows(found),
            *_clock(setting, found),
            *_rates(setting),
        ]
    )


def _head(setting: Setting, found: Mapping[str, Any]) -> Iterator[str]:
    papers = [claim for claim in found["claims"] if claim["source"] != OURS]
    ours = [claim for claim in found["claims"] if claim["source"] == OURS]
    file = f"benchmarks/results/claims-{setting.name}.json"
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
    yield "difference of two losses of one seed (same weights, same data): its mean over seeds and"
    yield "its standard error. **Shown**: the claimed order holds at one-sided 95 % (Student's t);"
    yield "*as good as* holds if the loss is less than 1 % above the other one, at the same level."
    yield "**Contradicted**: the opposite holds at this level. Otherwise, a claim is **not shown at"
    yield "this scale**. One verdict in twenty is wrong by chance."
    yield ""
    yield f"`python benchmarks/claims.py {setting.name} OUT` repeats the runs and compares losses"
    yield "with these: they must agree within three standard deviations between seeds."
    yield ""


def _counts(claims: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [claim["verdict"] for claim in claims]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in sorted({*verdicts}, reverse=True))


def _verdicts(found: Mapping[str, Any]) -> Iterator[str]:
    for group, same in groupby(found["claims"], key=lambda claim: claim["group"]):
        yield f"## {group}"
        yield ""
        yield from (*NOTES[group], "") if group in NOTES else ()
        yield "| claim | verdict | effect, nats | seeds | claimed by |"
        yield "|---|---|---|---|---|"
        for claim in same:
            verdict, effect = claim["verdict"], claim["effect"]
            yield (
                f"| {claim['claim']} | {MARKS.get(verdict, verdict)} | {_signed(effect)} | "
                f"{_seeds(effect)} | {claim['source']} |"
            )
        yield ""


def _signed(effect: Mapping[str, Any] | None) -> str:
    return "" if effect is None else f"{effect['mean']:+.4f}{_error(effect)}"


def _error(effect: Mapping[str, Any]) -> str:
    error = effect["standard_error"]
    return "" if error is None else f" ± {error:.4f}"


def _seeds(effect: Mapping[str, Any] | None) -> str:
    return "" if effect is None else ", ".join(map(str, effect["seeds"]))


def _rows(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## All arms"
    yield ""
    yield "Bytes are those that the transport of one worker counted, headers included. DP (data"
    yield "parallelism) and full precision send fp32. The last column is relative to DP gradients"
    yield "of 16 bits. The results also have the differences to DP."
    yield ""
    yield "| arm | validation loss | minus DiLoCo | sent per worker | times fewer |"
    yield "|---|---|---|---|---|"
    for arm, row in found["rows"].items():
        loss, fewer = row["val_loss"], row["fewer_bytes_than_16_bit_ddp"]
        yield (
            f"| {arm} | {loss['mean']:.4f}{_error(loss)} | {_signed(row['minus_diloco'])} | "
            f"{_megabytes(row['sent_bytes_per_worker'])} | {_times_fewer(fewer)} |"
        )
    yield ""


def _megabytes(sent: int) -> str:
    return f"{sent / 1e6:,.2f} MB" if sent else "nothing"


def _times_fewer(fewer: float | None) -> str:
    if fewer is None:
        return ""
    return f"{fewer:,.0f}" if fewer >= 100 else f"{fewer:.3g}"


def _clock(setting: Setting, found: Mapping[str, Any]) -> Iterator[str]:
    clock, file = found["clock"], f"benchmarks/results/claims-{setting.name}.json"
    yield "## Loss against wall-clock"
    yield ""
    yield f"The planner computed how long these runs take over a link: {clock['step_s']} s a step,"
    yield f"{1000 * clock['latency_s']:.0f} ms one way, one link per worker, without encoding. Each"
    yield "cell has the time until the loss reaches DiLoCo's final one"
    yield f"({clock['target_val_loss']:.4f}), and that of the whole run. [The results](../{file})"
    yield "have all arms."
    yield ""
    yield "| arm | " + " | ".join(clock["links"]) + " |"
    yield "|---|" + "---|" * len(clock["links"])
    for arm in FAMILIES:
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
    yield "Every family had four candidates with seed 0. The best two also ran with seed 1, and the"
    yield f"lower mean won ([all candidates](../{file})). Arms have the rates of their family, also"
    yield "with another K, H, codec or feedback."
    yield ""
    yield "| family | inner lr | outer lr | outer momentum |"
    yield "|---|---|---|---|"
    for family, rates in tuned(setting).rates.items():
        given = (rates.inner_lr, rates.outer_lr, rates.outer_momentum)
        yield f"| {family} | " + " | ".join("" if v is None else f"{v:g}" for v in given) + " |"
    yield ""
