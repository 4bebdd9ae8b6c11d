"""The page of `thinwire status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from thinwire.elastic.roll import identity_of
from thinwire.membership import WorkerMetrics
from thinwire.plan.units import count_text, counted, duration_text, nbytes_text

if TYPE_CHECKING:
    from thinwire.asynchronous.objects import AsyncRunStatus
    from thinwire.elastic.roll import View, WorkerReport
    from thinwire.elastic.watch import BucketStatus

_MEASURED = {
    "loss": ("loss", "{:.5g}".format),
    "tokens/s": ("tokens_per_s", count_text),
    "sent": ("sent_bytes", nbytes_text),
    "received": ("received_bytes", nbytes_text),
    "waited": ("wait_s", duration_text),
    "silent": ("age_s", duration_text),
}
"""By column heading: the name of a worker's measurement, and how to show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusPage:
    """The status of a run, for rich to print and as data.

    Args:
        headlines: lines about the run.
        record: JSON-able data; its "workers" are the rows.
    """

    headlines: Sequence[str]
    record: Mapping[str, Any]

    def __rich__(self) -> Group:
        table = Table(box=SIMPLE_HEAD, padding=0)
        # A narrow terminal folds the widest columns first: names and states, and numbers last.
        table.add_column("worker", overflow="fold")
        for name in ("outer", "inner", *_MEASURED):
            table.add_column(name, justify="right", overflow="fold")
        table.add_column("state")
        for worker in self.record["workers"]:
            table.add_row(*map(Text, _cells(worker)))
        return Group(Text("\n".join(self.headlines)), table)


def _cells(worker: Mapping[str, Any]) -> list[str]:
    """A worker's row; a dash where it measured nothing."""
    position = worker["position"] or {}
    measured = {"age_s": worker.get("age_s"), **worker["metrics"]}
    return [
        worker["identity"],
        *(str(position.get(name, "unknown")) for name in ("version", "step")),
        *(
            "-" if (value := measured.get(name)) is None else text(value)
            for name, text in _MEASURED.values()
        ),
        worker["state"],
    ]


def bucket_page(status: BucketStatus, what: str) -> StatusPage:
    """The page of an elastic run.

    Args:
        status: status of the run.
        what: name of the run in the first line.
    """
    roll = status.roll
    calls = {identity_of(call.name): call for call in status.calls}
    names: dict[str, str] = {}
    if roll is not None:
        present = status.metrics if roll.is_over else (*roll.lacking, *roll.names)
        names = {identity_of(name): name for name in present}
    is_awaited = any(not call.leaves for call in status.calls)
    workers: list[dict[str, Any]] = []
    for identity in sorted({*names, *calls}):
        name, call = names.get(identity), calls.get(identity)
        position, process = None, (name if call is None else call.name) or ""
        if call is not None:
            position = call.position
        elif roll is not None and name is not None:
            position = None if name in (*roll.lacking, *roll.behind) else roll.position
        age_s = status.signs_s.get(process)
        worker = {
            "identity": identity,
            "position": None if position is None else asdict(position),
            "metrics": status.metrics.get(process, WorkerMetrics()).describe(),
            "age_s": None if age_s is None else max(0.0, age_s),  # clocks may differ
            "state": _worker_state(name, call, roll, is_awaited=is_awaited),
        }
        workers.append(worker)
    headlines = _bucket_headlines(status, what, counted(len(workers), "worker"))
    record = {
        "age_s": status.roll_age_s,
        "run": None if roll is None else asdict(roll.position) | {"over": roll.is_over},
        "roll": None if roll is None else roll.number,
        "snapshot": None if roll is None or roll.state.version < 0 else roll.state.version,
        "workers": workers,
    }
    return StatusPage(headlines=headlines, record=record)


def _worker_state(
    name: str | None, call: WorkerReport | None, roll: View | None, *, is_awaited: bool
) -> str:
    if roll is not None and roll.is_over:
        return "finished"
    if call is not None and call.leaves:
        return "has left"
    if (call is not None and call.lacks) or (roll is not None and name in roll.lacking):
        return "waits for a snapshot"
    if call is not None or roll is None:
        return "waits for the next round"
    others = ", others wait for it" if is_awaited else ""
    if name in roll.behind:
        return f"catches up{others}"
    return ("has just come" if name in roll.new else "trains") + others


def _bucket_headlines(status: BucketStatus, what: str, workers: str) -> list[str]:
    roll = status.roll
    if roll is None:
        return [f"{what}: {workers}; no round has begun"]
    run = roll.position
    age = "unknown" if status.roll_age_s is None else f"{duration_text(status.roll_age_s)} ago"
    newest, coming = roll.state.version, roll.next_state
    snapshot = "no snapshot yet" if newest < 0 else f"newest snapshot: of outer step {newest}"
    if coming.writer and not roll.is_over:
        snapshot += f"; {identity_of(coming.writer)} writes one of outer step {coming.version}"
    return [
        f"{what}: roll {roll.number}, written {age}; {workers}",
        f"the run is {'over' if roll.is_over else 'under way'}: outer step {run.version}, inner "
        f"step {run.step}, {run.dealt} data shares dealt, digest {run.digest}",
        snapshot,
    ]


# -- an asynchronous run ---------------------------------------------------------------------------


def asynchronous_page(status: AsyncRunStatus, what: str, now_s: float) -> StatusPage:
    """The page of an asynchronous run.

    Args:
        status: status that the server wrote last.
        what: name of the run in the first line.
        now_s: time in seconds since 1970.
    """
    stats, total, is_over = status.stats, status.total_steps, status.is_finished
    age_s = max(0.0, now_s - status.written_s)
    workers: list[dict[str, Any]] = []
    for number, state in sorted(status.workers.items()):
        doing = f"has {state.assigned} steps" if state.assigned else "waits"
        worker = {
            "identity": f"worker {number}",
            "position": {"version": stats.arrivals, "step": stats.steps_of.get(number, 0)},
            "metrics": WorkerMetrics(loss=state.loss, wait_s=state.wait_s).describe(),
            "assigned_steps": state.assigned,
            "age_s": max(0.0, now_s - state.arrived_s),
            "state": "finished" if is_over else doing,
        }
        workers.append(worker)
    steps = f"{stats.steps_done} of {total}" if total else str(stats.steps_done)
    refused = "".join(f", {count} {name}" for name, count in stats.refused.items())
    present = counted(len(workers), "worker")
    headlines = [
        f"{what}: asynchronous, written {duration_text(age_s)} ago; {present}",
        f"the run is {'over' if is_over else 'under way'}: version "
        f"{stats.arrivals}, {steps} inner steps; staleness {stats.mean_staleness:.2f} in the "
        f"mean, {stats.largest_staleness} at most{refused}",
    ]
    run = {
        "version": stats.arrivals,
        "steps": stats.steps_done,
        "total_steps": total,
        "over": is_over,
        "mean_staleness": stats.mean_staleness,
        "largest_staleness": stats.largest_staleness,
    }
    record = {"age_s": age_s, "run": run, "workers": workers}
    return StatusPage(headlines=headlines, record=record)
