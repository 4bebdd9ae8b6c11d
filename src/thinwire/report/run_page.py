"""The page of `thinwire report`."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.errors import ThinwireError, check
from thinwire.plan.link import TOPOLOGIES
from thinwire.plan.units import counted
from thinwire.report.charts import (
    curves,
    curves_of,
    first_shown,
    front_chart,
    front_of,
    scaling_charts,
    senders,
    styles_of,
)
from thinwire.report.link_replay import replay_data
from thinwire.report.page import Block, Macro, Page, TextTable
from thinwire.report.results import (
    contributions_table,
    curves_table,
    differences_table,
    ranked,
    results_table,
    shared_table,
    versions_table,
)
from thinwire.runs.comparable import not_comparable
from thinwire.runs.find import find_runs
from thinwire.runs.status import RunState, RunStatus
from thinwire.runs.variants import Variant, repeated_runs, variants_of

_READING: Final = (
    "Loss: validation loss of the outer parameters at the end, in nats per token; ± one standard "
    "error of the mean over seeds. Behind the best: the mean difference to the lowest loss, paired "
    "by seed. Bytes are those of one worker, as counted at its transport, headers included. Up: "
    "through a store or hub, which takes a payload once, whoever reads it; point to point, as much "
    "goes up as down. Times fewer: up + down, than a ring all-reduce of 16-bit gradients at every "
    "step moves; ddp exchanges 32-bit gradients. Memory: weights, inner state, anchor, outer state "
    "and feedback, over the weights. Wall-clock is that of the run itself, wherever it ran. Front: "
    "no other method has both a lower loss and fewer bytes, up + down through a store."
)
_ON_THE_LINK: Final = (
    "Simulated by the planner of thinwire plan from the messages that each run sent. Every method "
    "takes the inner step that is set here; encoding, decoding and the outer step take no time."
)
_MEASURED: Final = (
    "Seconds that a worker waited for exchanges, or, by choice, that exchanges travelled while it "
    "trained. Simulated workers exchange within a process: theirs say little of a network."
)
_CONTRIBUTIONS: Final = (
    "Members whose pseudo-gradients were left out of means (rejected) or scaled down (clipped), in "
    "exchanges of fragments, as the run's first worker saw it."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Runs of a report.

    Args:
        variants: variants whose runs can be compared.
        left_out: other folders, and why they are left out.
    """

    variants: tuple[Variant, ...]
    left_out: Mapping[Path, RunStatus]


def read_report_data(paths: Sequence[Path], *, may_be_empty: bool = False) -> ReportData:
    """The runs in `paths` that can be compared, and the folders that are left out.

    Args:
        paths: run folders, or folders of run folders.
        may_be_empty: accept folders without a finished run.

    Raises:
        ConfigurationError: no run can be shown.
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
    why = [f"{folder}: {status}" for folder, status in left_out.items()]
    because = f"there is no finished run to show; {'; '.join(why) or 'no folder was given'}"
    do = "pass folders of thinwire train or compare whose runs are finished"
    check(bool(runs) or may_be_empty, "write a report", because=because, do=do)
    return ReportData(variants=tuple(variants_of(runs)), left_out=left_out)


def run_page(data: ReportData, *, refresh_s: float | None = None) -> Page:
    """The whole report.

    Args:
        data: result of `read_report_data`.
        refresh_s: seconds after which the page reloads itself; None if its runs are complete.
    """
    variants = data.variants
    left_out: list[Block] = []
    if data.left_out:
        below = "Nothing of these is in any chart or table above."
        rows = tuple((str(folder), str(status)) for folder, status in data.left_out.items())
        left_out = [
            Macro("Heading", text="Left out", name="left-out", below=below),
            TextTable(title="Folders", head=("folder", "why", ""), rows=rows),
        ]
    if not variants:
        return Page(
            title="No run is finished yet",
            lead="This page fills as runs finish.",
            blocks=left_out,
            scripts=("report.js",),
            refresh_s=refresh_s,
        )
    played = dict[int, dict[str, Any]]()
    unplayed: list[Block] = []
    for index, variant in enumerate(variants):
        try:
            played[index] = replay_data(variant.runs[0])
        except ThinwireError as error:
            text = f"{variant.label} is not among them: {error.because}."
            unplayed.append(Macro("Paragraph", text=text))
    has_link = bool(played)
    config, summary = variants[0].config, variants[0].runs[0].summary
    seeds = _listed(seed for variant in variants for seed in variant.losses)
    heading = Macro("Heading", text="Contributions", name="members", below=_CONTRIBUTIONS)
    members = contributions_table(variants)
    return Page(
        title=f"{counted(len(variants), 'method')}, {summary.parameters:,} parameters, "
        f"{summary.tokens:,} tokens",
        lead=f"Model {config.model_size} on {config.corpus}, tokens by {config.tokenizer}, "
        f"sequences of {config.sequence_length}; K = "
        f"{_listed(variant.config.workers for variant in variants)}; "
        f"{'seeds' if ',' in seeds else 'seed'} {seeds}.",
        blocks=[
            *_summary(data),
            results_table(variants),
            Macro("Paragraph", text=_READING),
            *_losses(variants, has_link=has_link),
            *_link(variants, played, unplayed),
            *scaling_charts(variants),
            Macro("Heading", text="In the runs themselves", name="measured", below=_MEASURED),
            curves(y="waited", x="seconds", name="waits", has_link=has_link),
            *([heading, members] if members.rows else []),
            Macro("Heading", text="Settings and versions", name="settings"),
            differences_table(variants)
            if len(variants) > 1
            else Macro("Paragraph", text="There is one method, so nothing differed."),
            _folded(shared_table(variants)),
            versions_table(variants),
            *left_out,
            _page_data(variants, played),
        ],
        scripts=("link.js", "report.js", "table.js"),
        refresh_s=refresh_s,
    )


def _summary(data: ReportData) -> list[Block]:
    best, *_ = rows = ranked(data.variants)
    # Rows are sorted by loss: of the variants with the fewest bytes, the best.
    least = min(senders(rows), key=lambda variant: variant.moved_bytes)
    fewest = f"Fewest bytes: {least.label}, with a loss of {least.loss.text('.4f')}."
    if least is best:
        fewest = "It also moves the fewest bytes."
    trust = "Differences below about two standard errors may be chance."
    if any(len(variant.runs) == 1 for variant in rows):
        trust = "One seed says nothing about how far a difference can be trusted."
    below = f"Lowest loss: {best.label} with {best.loss.text('.4f')}. {fewest} {trust}"
    blocks: list[Block] = [Macro("Heading", text="In short", name="summary", below=below)]
    if data.left_out:
        text = f"Left out of everything here: {counted(len(data.left_out), 'folder')}."
        blocks.append(Macro("Notice", text=text, target="left-out"))
    return blocks


def _losses(variants: Sequence[Variant], *, has_link: bool) -> list[Block]:
    below = "One seed for each method, so there are no bands."
    if (counts := _listed(len(variant.runs) for variant in variants)) != "1":
        below = (
            f"Lines are means over seeds (n = {counts}), bands and bars one standard error; one "
            "seed has none."
        )
    controls = {
        "labels": [variant.label for variant in variants],
        "styles": styles_of(variants),
        "front": [variants.index(variant) for variant in front_of(variants)],
        "shown": first_shown(variants),
    }
    return [
        Macro("Heading", text="Loss and bytes", name="loss", below=below),
        Macro("MethodControls", **controls),
        curves(y="validation", x="tokens", name="by-tokens", has_link=has_link),
        curves(y="validation", x="bytes", name="by-bytes", has_link=has_link),
        front_chart(variants),
        _folded(curves_table(variants)),
    ]


def _link(
    variants: Sequence[Variant], played: Collection[int], unplayed: Sequence[Block]
) -> list[Block]:
    text, name = "On a link of your choice", "link-section"
    if not played:
        return [Macro("Heading", text=text, name=name), *unplayed]
    labels = {index: variants[index].label for index in played}
    shown = first_shown(variants)
    table = TextTable(
        title="On this link",
        name="on-link",
        head=("method", "wall-clock", "computing", "waiting", "hidden", "where the time goes"),
        rows=tuple(((label, index), *(("", ""),) * 5) for index, label in labels.items()),
        main=("wall-clock", "computing"),
        rest=[row for row, index in enumerate(played) if index not in shown],
    )
    return [
        Macro("Heading", text=text, name=name, below=_ON_THE_LINK),
        *unplayed,
        Macro("LinkControls", topologies=list(TOPOLOGIES)),
        curves(y="validation", x="link", name="by-link", has_link=True),
        table,
        Macro("Timeline", labels=labels),
    ]


def _page_data(variants: Sequence[Variant], played: Mapping[int, dict[str, Any]]) -> Macro:
    """Data for the page's scripts, not shown."""
    data = [
        {
            "label": variant.label,
            "style": style,
            # Six digits are more than a screen shows, and take a third of the bytes.
            "curves": json.loads(
                json.dumps(curves_of(variant)), parse_float=lambda text: float(f"{float(text):.6g}")
            ),
            "replay": played.get(index),
        }
        for index, (variant, style) in enumerate(zip(variants, styles_of(variants), strict=True))
    ]
    return Macro("PageData", data={"variants": data})


def _folded(table: TextTable) -> Macro:
    return Macro("Details", title=table.title, block=table)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))
