"""The tables of a report of runs."""

from collections.abc import Mapping, Sequence

from thinwire.plan.units import duration_text, nbytes_text
from thinwire.report.arms import Arm, differing
from thinwire.report.blocks import Table
from thinwire.report.folders import LeftOut
from thinwire.report.front import final_loss, front_of, sent_bytes
from thinwire.report.parts import Cell, SortableTable
from thinwire.report.run_charts import LOSSES
from thinwire.report.seeds import Estimate, estimate, mean_curve

__all__ = [
    "curves_table",
    "differences_table",
    "left_out_table",
    "link_table",
    "ranked",
    "results_table",
    "shared_table",
    "versions_table",
]


def _summed(arm: Arm, name: str) -> Estimate:
    return estimate([run.summary[name] for run in arm.runs])


def ranked(arms: Sequence[Arm]) -> list[Arm]:
    """By rising loss."""
    return sorted(arms, key=lambda arm: final_loss(arm).mean)


def results_table(arms: Sequence[Arm]) -> SortableTable:
    """A row for each method, the lowest loss first."""
    front = {arm.label for arm in front_of(arms)}
    most = max(map(sent_bytes, arms))
    return SortableTable(
        title="Results",
        name="results",
        head=(
            "method",
            "loss",
            "behind the best",
            "sent",
            "fewer bytes",
            "front",
            "seeds",
            "K",
            "H",
            "received",
            "peak a step",
            "memory",
            "wall-clock",
        ),
        rows=tuple(_result(arm, front, most, ranked(arms)[0]) for arm in ranked(arms)),
    )


def _behind(arm: Arm, best: Arm) -> Cell:
    """Paired by seed: runs of one seed share initial weights and data."""
    theirs = {run.seed: run.summary["val_loss"] for run in best.runs}
    pairs = [(r.summary["val_loss"], theirs[r.seed]) for r in arm.runs if r.seed in theirs]
    if arm is best or not pairs:
        return ("the best", 0.0) if arm is best else ("no seed in common", "")
    found = estimate([its - others for its, others in pairs])
    return found.text("+.4f").replace("± +", "± "), found.mean


def _result(arm: Arm, front: set[str], most: float, best: Arm) -> tuple[Cell, ...]:
    loss, sent = final_loss(arm), sent_bytes(arm)
    received = _summed(arm, "received_bytes_per_worker").mean
    peak, wall = _summed(arm, "peak_sent_bytes_per_step").mean, _summed(arm, "wall_s").mean
    memory = _memory(arm)
    return (
        (arm.label, arm.label),
        (loss.text(".4f"), loss.mean),
        _behind(arm, best),
        (nbytes_text(sent), sent),
        (_times(most / sent), most / sent) if sent else ("none sent", ""),
        ("yes", 0) if arm.label in front else ("", 1),
        (str(loss.n), loss.n),
        (str(arm.workers), arm.workers),
        (str(arm.sync_every), arm.sync_every),
        (nbytes_text(received), received),
        (nbytes_text(peak), peak),
        ("not recorded", "") if memory is None else (f"{memory:.2f} x", memory),
        (duration_text(wall), wall),
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.3g} x"


def _memory(arm: Arm) -> float | None:
    """Bytes of all states of a worker over those of its weights."""
    held = [run.memory_bytes for run in arm.runs]
    if not all(held):
        return None
    return estimate([sum(its.values()) / its["live_weights"] for its in held]).mean


def curves_table(arms: Sequence[Arm]) -> SortableTable:
    """What the charts of validation loss show, as numbers."""
    return SortableTable(
        title="Validation loss by steps",
        name="curves",
        head=("method", "step", "tokens", "sent", "loss"),
        rows=tuple(row for arm in arms for row in _points(arm)),
    )


def _points(arm: Arm) -> list[tuple[Cell, ...]]:
    records = [run.records for run in arm.runs]
    curve = mean_curve(records, LOSSES["validation"])
    tokens, sent = mean_curve(records, "tokens"), mean_curve(records, "sent_bytes")
    at = {
        step: (t.mean, s.mean)
        for step, t, s in zip(tokens.steps, tokens.points, sent.points, strict=True)
    }
    return [
        (
            (arm.label, arm.label),
            (f"{step:,}", step),
            (f"{at[step][0]:,.0f}", at[step][0]),
            (nbytes_text(at[step][1]), at[step][1]),
            (point.text(".4f"), point.mean),
        )
        for step, point in zip(curve.steps, curve.points, strict=True)
    ]


def link_table(playable: Mapping[int, str]) -> SortableTable:
    """What the page fills in for the chosen link.

    Args:
        playable: label of each method that can be played over a link, by its number.
    """
    return SortableTable(
        title="On this link",
        name="on-link",
        head=("method", "wall-clock", "computing", "waiting", "hidden"),
        rows=tuple(((label, arm), *(("", ""),) * 4) for arm, label in playable.items()),
    )


def differences_table(arms: Sequence[Arm]) -> Table:
    """Fields of the configurations that are not the same for all methods."""
    fields = [arm.fields for arm in arms]
    return Table(
        title="What differed",
        head=("field", *(arm.label for arm in arms)),
        rows=tuple((n, *(its.get(n, "-") for its in fields)) for n in differing(fields))
        or (("nothing",),),
    )


def shared_table(arms: Sequence[Arm]) -> Table:
    """All other fields."""
    fields = [arm.fields for arm in arms]
    apart = set(differing(fields))
    same = [(name, value) for name, value in sorted(fields[0].items()) if name not in apart]
    return Table(
        title="Settings that all have in common", head=("field", "value"), rows=tuple(same)
    )


def versions_table(arms: Sequence[Arm]) -> Table:
    """What the runs ran on; several values where they differ."""
    versions = [run.summary.get("versions", {}) for arm in arms for run in arm.runs]
    names = sorted({name for its in versions for name in its})
    rows = [
        (name, ", ".join(sorted({str(its.get(name, "not recorded")) for its in versions})))
        for name in names
    ]
    return Table(
        title="Versions",
        head=("what", "version"),
        rows=tuple(rows) or (("versions", "not recorded"),),
    )


def left_out_table(left_out: Sequence[LeftOut]) -> Table:
    """Folders that are not shown, and why."""
    return Table(
        title="Folders",
        head=("folder", "why", ""),
        rows=tuple((str(found.folder), found.reason) for found in left_out),
    )
