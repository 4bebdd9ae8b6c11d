"""The page of `thinwire report`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, final

from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.report.agreement_charts import agreement_blocks
from thinwire.report.arms import Arm, arms_of, styles_of, without_doubles
from thinwire.report.blocks import Block, Text
from thinwire.report.controls import LinkControls, MethodControls
from thinwire.report.folders import LeftOut, comparable, find_runs
from thinwire.report.front import final_loss, front_of, senders, sent_bytes
from thinwire.report.page import Page
from thinwire.report.parts import Commands, Data, Details, Heading, Notice
from thinwire.report.reproduce import command_of, compare_command, report_command
from thinwire.report.results import (
    curves_table,
    differences_table,
    left_out_table,
    link_table,
    ranked,
    results_table,
    shared_table,
    versions_table,
)
from thinwire.report.run_charts import front_chart, link_charts, loss_charts, waits_chart
from thinwire.report.scaling import scaling_charts
from thinwire.report.voyage import TOPOLOGIES, Shapes, Voyage, voyage_of

__all__ = ["Evidence", "gather_evidence", "run_page"]

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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a report shows.

    Args:
        arms: methods whose runs can be compared.
        left_out: folders that are shown as left out.
    """

    arms: tuple[Arm, ...]
    left_out: tuple[LeftOut, ...]


def gather_evidence(paths: Sequence[Path]) -> Evidence:
    """The runs in `paths` that can be compared, and what else is there.

    Args:
        paths: run folders, or folders that hold some.

    Raises:
        ConfigurationError: there is not one run to be shown.
    """
    found = find_runs(paths)
    distinct, doubles = without_doubles(found.runs)
    kept, apart = comparable(distinct)
    left_out = (*found.left_out, *doubles, *apart)
    if not kept:
        first = f"{left_out[0].folder}: {left_out[0].reason}" if left_out else "no folder was given"
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise ConfigurationError(
            "write a report",
            because=f"there is no finished run to show; {first}{more}",
            do="pass folders of thinwire train or compare whose runs are finished",
        )
    return Evidence(arms=tuple(arms_of(kept)), left_out=left_out)


def run_page(evidence: Evidence, paths: Sequence[Path], out: Path) -> Page:
    """All of a report.

    Args:
        evidence: of `gather_evidence`.
        paths: as they were given.
        out: where the page goes; it says how it was made.
    """
    arms = evidence.arms
    played, unplayed = _voyages(arms)
    blocks: list[Block] = [
        *_summary(evidence),
        results_table(arms),
        Text(text=_READING),
        Heading(text="Loss and bytes", name="loss", below=_errors(arms)),
        MethodControls(
            labels=[arm.label for arm in arms], styles=styles_of(arms), front=_front(arms)
        ),
        *loss_charts(arms),
        front_chart(arms),
        Details(title="The numbers of these charts", blocks=[curves_table(arms)]),
        *_link(arms, played, unplayed),
        *scaling_charts(arms),
        Heading(text="In the runs themselves", name="measured", below=_MEASURED),
        waits_chart(arms),
        *agreement_blocks(arms),
        Heading(text="Settings and versions", name="settings"),
        differences_table(arms),
        Details(title="Settings that all have in common", blocks=[shared_table(arms)]),
        versions_table(arms),
        *_reproduction(arms, paths, out),
        *_left_out(evidence.left_out),
        Data(name="report-data", data=_data(arms, played)),
    ]
    first = arms[0].first
    return Page(
        title=f"{_count(len(arms), 'method')}, {int(first.summary['parameters']):,} parameters, "
        f"{int(first.summary['tokens']):,} tokens",
        lead=_lead(arms),
        blocks=blocks,
        scripts=_SCRIPTS,
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


def _front(arms: Sequence[Arm]) -> list[int]:
    return [list(arms).index(arm) for arm in front_of(arms)]


def _lead(arms: Sequence[Arm]) -> str:
    config = arms[0].first.config
    workers = sorted({arm.workers for arm in arms})
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    return (
        f"Model {config['model'].get('size')} on {config['data'].get('corpus')}, tokens by "
        f"{config['data'].get('tokenizer')}, sequences of {config['data']['sequence_length']}; "
        f"K = {_listed(workers)}; {'seeds' if len(seeds) > 1 else 'seed'} {_listed(seeds)}."
    )


def _summary(evidence: Evidence) -> list[Block]:
    arms = evidence.arms
    best, *_ = ranked(arms)
    # Of those that send as little, the one that makes the most of it.
    least = min(senders(ranked(arms)), key=sent_bytes)
    fewest = f"Fewest bytes: {least.label}, with a loss of {final_loss(least).text('.4f')}."
    if least is best:
        fewest = "It also sends the fewest bytes."
    found = (
        f"Lowest loss: {best.label} with {final_loss(best).text('.4f')}. {fewest} "
        f"{_confidence(arms)}"
    )
    blocks: list[Block] = [Text(text=found)]
    if evidence.left_out:
        left = _count(len(evidence.left_out), "folder")
        blocks.append(Notice(text=f"Left out of everything here: {left}.", target="left-out"))
    return blocks


def _confidence(arms: Sequence[Arm]) -> str:
    if any(len(arm.runs) == 1 for arm in arms):
        return "One seed says nothing about how far a difference can be trusted."
    return "Differences below about two standard errors may be chance."


def _errors(arms: Sequence[Arm]) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    if counts == [1]:
        return "One seed for each method, so there are no bands."
    return (
        f"Lines are means over seeds (n = {_listed(counts)}), bands and bars one standard error; "
        "one seed has none."
    )


def _voyages(arms: Sequence[Arm]) -> tuple[dict[int, Voyage], dict[str, str]]:
    """Of each arm that can be played over a link, by its number; and why others cannot."""
    shapes, played = Shapes(), dict[int, Voyage]()
    refused: dict[str, str] = {}
    for index, arm in enumerate(arms):
        try:
            played[index] = voyage_of(arm.first, shapes)
        except ThinwireError as error:
            refused[arm.label] = error.because
    return played, refused


def _link(
    arms: Sequence[Arm], played: Mapping[int, Voyage], unplayed: Mapping[str, str]
) -> list[Block]:
    several = len({arms[index].workers for index in played}) > 1
    below = _ON_THE_LINK + (_SEVERAL_K if several else "")
    heading = Heading(text="On a link of your choice", name="link-section", below=below)
    missing = [Text(text=f"{label} is not among them: {why}.") for label, why in unplayed.items()]
    if not played:
        return [Heading(text=heading.text, name=heading.name), *missing]
    labels = {index: arms[index].label for index in played}
    charts = link_charts(arms)
    return [
        heading,
        *missing,
        LinkControls(labels=list(labels.values()), topologies=list(TOPOLOGIES)),
        charts["wall"],
        link_table(labels),
        charts["shares"],
        _TimelineControls(labels=labels),
        charts["timeline"],
    ]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _TimelineControls(Block):
    labels: Mapping[int, str]

    def html(self) -> str:
        options = "".join(
            f'<option value="{index}">{escape(label)}</option>'
            for index, label in self.labels.items()
        )
        return (
            '<div class="controls"><label class="field"><span>Timeline of</span>'
            f'<select id="timeline-arm">{options}</select></label>'
            '<p class="told" id="timeline-told" role="status"></p></div>'
        )


def _data(arms: Sequence[Arm], played: Mapping[int, Voyage]) -> dict[str, Any]:
    return {
        "arms": [
            {
                "label": arm.label,
                "voyage": played[index].describe() if index in played else None,
            }
            for index, arm in enumerate(arms)
        ]
    }


def _reproduction(arms: Sequence[Arm], paths: Sequence[Path], out: Path) -> list[Block]:
    runs = [run for arm in arms for run in arm.runs]
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
        "a recipe of somebody's own, and their config.json says all of it"
    )
    if len(folders) <= _FEW_COMMANDS:
        return [Text(text=f"{told}: {', '.join(folders)}.")]
    named = Details(title="Their folders", blocks=[Text(text=", ".join(folders))])
    return [Text(text=f"{told}."), named]


def _left_out(left_out: Sequence[LeftOut]) -> list[Block]:
    if not left_out:
        return []
    below = "Nothing of these is in any chart or table above."
    return [
        Heading(text="Left out", name="left-out", below=below),
        left_out_table(left_out),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
