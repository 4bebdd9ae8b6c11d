"""The page of `thinwire report`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.plan.link import TOPOLOGIES
from thinwire.report.blocks import (
    Block,
    Commands,
    Details,
    Heading,
    LinkControls,
    MethodControls,
    Notice,
    PageData,
    Paragraph,
    TextTable,
    TimelineControls,
    rounded,
)
from thinwire.report.link_advice import link_advice
from thinwire.report.link_replay import LinkReplay, ShapeCache, replay_data
from thinwire.report.page import Page
from thinwire.report.pareto import family_of, first_shown, front_of, senders
from thinwire.report.reproduce import command_of, compare_command, report_command
from thinwire.report.results import (
    contributions_table,
    curves_table,
    left_out_table,
    link_table,
    ranked,
    results_table,
    versions_table,
)
from thinwire.report.run_charts import front_chart, link_charts, loss_charts, waits_chart
from thinwire.report.scaling import scaling_charts
from thinwire.report.settings import differences_table, shared_table
from thinwire.report.traces import curves_of, styles_of
from thinwire.runs.comparable import not_comparable
from thinwire.runs.find import find_runs
from thinwire.runs.status import RunState, RunStatus
from thinwire.runs.variants import Variant, repeated_runs, variants_of

_SCRIPTS: Final = ("link.js", "report.js", "table.js")
_ON_THE_LINK: Final = (
    "Simulated by the planner of thinwire plan from the messages that each run sent, whose bytes "
    "it foretold exactly. Every method takes the inner step that is set here; encoding, decoding "
    "and the outer step take no time."
)
_SEVERAL_K: Final = (
    " That holds for every K as well, though each of more workers reads fewer tokens in a step."
)
_FEW_COMMANDS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """What a report shows.

    Args:
        variants: whose runs can be compared.
        left_out: folders that are shown as left out, and why.
    """

    variants: tuple[Variant, ...]
    left_out: Mapping[Path, RunStatus]


def read_report_data(paths: Sequence[Path], *, may_be_empty: bool = False) -> ReportData:
    """The runs in `paths` that can be compared, and what else is there.

    Args:
        paths: run folders, or folders that hold some.
        may_be_empty: whether no run needs to be finished yet.

    Raises:
        ConfigurationError: there is not one run to be shown.
    """
    found = find_runs(paths)
    left_out = {folder: status for folder, status in found.items() if status.run is None}
    runs = [status.run for status in found.values() if status.run is not None]
    for unrelated in (repeated_runs, not_comparable):
        apart = unrelated(runs)
        runs = [run for run in runs if run.folder not in apart]
        left_out |= {
            folder: RunStatus(state=RunState.UNRELATED, why=why) for folder, why in apart.items()
        }
    if not runs and not may_be_empty:
        first = "no folder was given"
        for folder, status in list(left_out.items())[:1]:
            more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
            first = f"{folder}: {status}{more}"
        raise ConfigurationError(
            "write a report",
            because=f"there is no finished run to show; {first}",
            do="pass folders of thinwire train or compare whose runs are finished",
        )
    return ReportData(variants=tuple(variants_of(runs)), left_out=left_out)


def run_page(
    data: ReportData, paths: Sequence[Path], out: Path, *, refresh_s: float | None = None
) -> Page:
    """All of a report.

    Args:
        data: of `read_report_data`.
        paths: as they were given.
        out: where the page goes; it says how it was made.
        refresh_s: after how many seconds it loads itself again; None if its runs are complete.
    """
    variants = data.variants
    if not variants:
        return Page(
            title="No run is finished yet",
            lead=f"In {', '.join(map(str, paths))}.",
            blocks=_left_out(data.left_out),
            refresh_s=refresh_s,
        )
    shapes = ShapeCache()
    played, unplayed = _replays(variants, shapes)
    blocks: list[Block] = [
        *_summary(data),
        results_table(variants),
        Paragraph(text=_READING),
        Heading(text="Loss and bytes", name="loss", below=_errors(variants)),
        MethodControls(
            labels=[variant.label for variant in variants],
            styles=styles_of(variants),
            front=_front(variants),
            families=[family_of(variant) for variant in variants],
            shown=first_shown(variants),
        ),
        *loss_charts(),
        front_chart(variants),
        Details(title="The numbers of these charts", blocks=[curves_table(variants)]),
        *_link(variants, played, unplayed, shapes),
        *scaling_charts(variants),
        Heading(text="In the runs themselves", name="measured", below=_MEASURED),
        waits_chart(variants),
        *_contributions(variants),
        Heading(text="Settings and versions", name="settings"),
        *_differences(variants),
        _folded(shared_table(variants)),
        versions_table(variants),
        *_reproduction(variants, paths, out),
        *_left_out(data.left_out),
        PageData(name="report-data", data=_data(variants, played)),
    ]
    summary = variants[0].runs[0].summary
    return Page(
        title=f"{_count(len(variants), 'method')}, {summary.parameters:,} parameters, "
        f"{summary.tokens:,} tokens",
        lead=_lead(variants),
        blocks=blocks,
        scripts=_SCRIPTS,
        refresh_s=refresh_s,
    )


_READING: Final = (
    "Loss: validation loss of the outer parameters at the end, in nats per token; ± one standard "
    "error of the mean over seeds. Behind the best: the mean difference to the lowest loss, paired "
    "by seed. Bytes are those of one worker, as counted at its transport, "
    "headers included. Memory: weights, inner state, anchor, outer state and feedback, over the "
    "weights. Wall-clock is that of the run itself, wherever it ran. Front: no other method has "
    "both a lower loss and fewer bytes sent."
)


_MEASURED: Final = (
    "Seconds that a worker stood still, and seconds in which exchanges travelled while it trained "
    "(dotted). Simulated workers exchange within a process: theirs say little of a network."
)

_CONTRIBUTIONS: Final = (
    "Members whose pseudo-gradients were left out of means (rejected) or scaled down in them "
    "(clipped), in exchanges; a fragment is exchanged by itself. A run counts what its first "
    "worker saw, which is the same on all workers unless shards are combined apart."
)


def _front(variants: Sequence[Variant]) -> list[int]:
    return [list(variants).index(variant) for variant in front_of(variants)]


def _lead(variants: Sequence[Variant]) -> str:
    config = variants[0].config
    workers = sorted({variant.config.workers for variant in variants})
    seeds = sorted({seed for variant in variants for seed in variant.seeds})
    return (
        f"Model {config.model_size} on {config.corpus}, tokens by {config.tokenizer}, sequences of "
        f"{config.sequence_length}; K = {_listed(workers)}; "
        f"{'seeds' if len(seeds) > 1 else 'seed'} {_listed(seeds)}."
    )


def _summary(data: ReportData) -> list[Block]:
    variants = data.variants
    best, *_ = ranked(variants)
    # Of those that send as little, the one that makes the most of it.
    least = min(senders(ranked(variants)), key=lambda variant: variant.sent_bytes)
    fewest = f"Fewest bytes: {least.label}, with a loss of {least.loss.text('.4f')}."
    if least is best:
        fewest = "It also sends the fewest bytes."
    found = (
        f"Lowest loss: {best.label} with {best.loss.text('.4f')}. {fewest} {_confidence(variants)}"
    )
    blocks: list[Block] = [Heading(text="In short", name="summary", below=found)]
    if data.left_out:
        left = _count(len(data.left_out), "folder")
        blocks.append(Notice(text=f"Left out of everything here: {left}.", target="left-out"))
    return blocks


def _confidence(variants: Sequence[Variant]) -> str:
    if any(len(variant.runs) == 1 for variant in variants):
        return "One seed says nothing about how far a difference can be trusted."
    return "Differences below about two standard errors may be chance."


def _errors(variants: Sequence[Variant]) -> str:
    counts = sorted({len(variant.runs) for variant in variants})
    if counts == [1]:
        return "One seed for each method, so there are no bands."
    return (
        f"Lines are means over seeds (n = {_listed(counts)}), bands and bars one standard error; "
        "one seed has none."
    )


def _replays(
    variants: Sequence[Variant], shapes: ShapeCache
) -> tuple[dict[int, LinkReplay], dict[str, str]]:
    """The replays over a link by the variant's index, and why other variants have none."""
    played = dict[int, LinkReplay]()
    refused: dict[str, str] = {}
    for index, variant in enumerate(variants):
        try:
            played[index] = replay_data(variant.runs[0], shapes)
        except ThinwireError as error:
            refused[variant.label] = error.because
    return played, refused


def _link(
    variants: Sequence[Variant],
    played: Mapping[int, LinkReplay],
    unplayed: Mapping[str, str],
    shapes: ShapeCache,
) -> list[Block]:
    several = len({variants[index].config.workers for index in played}) > 1
    below = _ON_THE_LINK + (_SEVERAL_K if several else "")
    heading = Heading(text="On a link of your choice", name="link-section", below=below)
    missing = [
        Paragraph(text=f"{label} is not among them: {why}.") for label, why in unplayed.items()
    ]
    if not played:
        return [Heading(text=heading.text, name=heading.name), *missing]
    labels = {index: variants[index].label for index in played}
    charts, first = link_charts(), variants[min(played)]
    return [
        heading,
        *missing,
        LinkControls(topologies=list(TOPOLOGIES)),
        charts["wall"],
        link_table(labels, first_shown(variants)),
        charts["shares"],
        TimelineControls(labels=labels),
        charts["timeline"],
        *link_advice(shapes.of(first.runs[0]), first.config.workers),
    ]


def _data(variants: Sequence[Variant], played: Mapping[int, LinkReplay]) -> dict[str, Any]:
    return {
        "variants": [
            {
                "label": variant.label,
                "style": style,
                "curves": rounded(curves_of(variant)),
                "replay": played[index].describe() if index in played else None,
            }
            for index, (variant, style) in enumerate(
                zip(variants, styles_of(variants), strict=True)
            )
        ]
    }


def _reproduction(variants: Sequence[Variant], paths: Sequence[Path], out: Path) -> list[Block]:
    runs = [run for variant in variants for run in variant.runs]
    together = compare_command(runs)
    above = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    commands = {
        run.folder: command_of(run, f"runs/{run.folder.absolute().relative_to(above).as_posix()}")
        for run in runs
    }
    lines = [together] if together else [line for line in commands.values() if line]
    shown = lines if len(lines) <= _FEW_COMMANDS else []
    blocks: list[Block] = [
        Heading(text="How to reproduce this", name="reproduce"),
        Commands(lines=[*shown, report_command(paths, out)], label="Commands"),
    ]
    if not shown and lines:
        all_runs = Commands(lines=lines, label="Commands of all runs")
        blocks.append(Details(title=f"The {len(lines)} runs, each by itself", blocks=[all_runs]))
    unknown = [str(folder) for folder, line in commands.items() if line is None]
    return [*blocks, *_of_own_recipes(unknown)]


def _of_own_recipes(folders: Sequence[str]) -> list[Block]:
    if not folders:
        return []
    told = (
        f"No flags of thinwire train make {_count(len(folders), 'run')} of these: they came from "
        "a recipe that is not built in, and their config.json says all of it"
    )
    if len(folders) <= _FEW_COMMANDS:
        return [Paragraph(text=f"{told}: {', '.join(folders)}.")]
    named = Details(title="Their folders", blocks=[Paragraph(text=", ".join(folders))])
    return [Paragraph(text=f"{told}."), named]


def _contributions(variants: Sequence[Variant]) -> list[Block]:
    table = contributions_table(variants)
    if table is None:
        return []
    heading = Heading(text="Contributions", name="contributions-section", below=_CONTRIBUTIONS)
    return [heading, table]


def _left_out(left_out: Mapping[Path, RunStatus]) -> list[Block]:
    if not left_out:
        return []
    below = "Nothing of these is in any chart or table above."
    return [
        Heading(text="Left out", name="left-out", below=below),
        left_out_table(left_out),
    ]


def _differences(variants: Sequence[Variant]) -> list[Block]:
    if len(variants) == 1:
        return [Paragraph(text="There is one method, so nothing differed.")]
    return [differences_table(variants)]


def _folded(table: TextTable) -> Details:
    return Details(title=table.title, blocks=[table])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
