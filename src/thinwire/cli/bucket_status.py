"""What `thinwire status` shows of a run over an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.cli.status_page import StatusPage, metric_cells
from thinwire.elastic.quorum import identity_of
from thinwire.membership import Progress, WorkerMetrics
from thinwire.plan.units import duration_text

if TYPE_CHECKING:
    from thinwire.elastic.bucket.roll import Call, Roll
    from thinwire.elastic.bucket.watch import BucketStatus

_UNKNOWN = "unknown"


def bucket_page(status: BucketStatus, what: str) -> StatusPage:
    """The page of what lies in a store.

    Args:
        status: as it was read.
        what: the run, as it is called in the first line.
    """
    workers = _workers(status)
    return StatusPage(
        headlines=_headlines(status, what, len(workers)),
        rows=[_row(worker) for worker in workers],
        record=_record(status, workers),
    )


def _workers(status: BucketStatus) -> list[dict[str, Any]]:
    """Each worker that the newest roll or a call names, by identity."""
    roll = status.roll
    calls = {identity_of(call.name): call for call in status.calls}
    names = {} if roll is None else {identity_of(n): n for n in (*roll.lacking, *roll.names)}
    if roll is not None and roll.is_over:
        names = {identity_of(name): name for name in roll.metrics}
    is_awaited = any(not call.leaves for call in status.calls)
    return [
        _worker(identity, names.get(identity), calls.get(identity), roll, is_awaited=is_awaited)
        for identity in sorted({*names, *calls})
    ]


def _worker(
    identity: str, name: str | None, call: Call | None, roll: Roll | None, *, is_awaited: bool
) -> dict[str, Any]:
    told = {} if roll is None or name is None else roll.metrics.get(name, {})
    metrics = WorkerMetrics.read(told)[0] if call is None else call.metrics
    return {
        "identity": identity,
        "position": None if (at := _position(name, call, roll)) is None else at.describe(),
        "metrics": metrics.describe(),
        "state": _state(name, call, roll, is_awaited=is_awaited),
    }


def _position(name: str | None, call: Call | None, roll: Roll | None) -> Progress | None:
    """How far a worker is; None where nothing tells."""
    if call is not None:
        return call.position
    if roll is None or name is None or name in (*roll.lacking, *roll.behind):
        return None
    return roll.position


def _state(name: str | None, call: Call | None, roll: Roll | None, *, is_awaited: bool) -> str:
    if roll is not None and roll.is_over:
        return "finished"
    if call is not None and call.leaves:
        return "has left"
    if (call is not None and call.lacks) or (roll is not None and name in roll.lacking):
        return "waits for a snapshot"
    if call is not None:
        return "waits for the next round"
    # Whether it trains or is gone, no object says.
    others = ", others wait for it" if is_awaited else ""
    if roll is not None and name in roll.behind:
        return f"catches up{others}"
    is_new = roll is not None and name in roll.new
    return ("has just come" if is_new else "trains") + others


def _headlines(status: BucketStatus, what: str, count: int) -> list[str]:
    roll = status.roll
    workers = "1 worker" if count == 1 else f"{count} workers"
    if roll is None:
        return [f"{what}: {workers}; no round has begun"]
    run = roll.position
    age = _UNKNOWN if status.roll_age_s is None else f"{duration_text(status.roll_age_s)} ago"
    state = "over" if roll.is_over else "under way"
    lines = [
        f"{what}: roll {roll.number}, written {age}; {workers}",
        f"the run is {state}: outer step {run.version}, inner step {run.step}, {run.dealt} data "
        f"shares dealt, digest {run.digest}",
    ]
    newest, coming = roll.state.version, roll.next_state
    snapshot = "no snapshot yet" if newest < 0 else f"newest snapshot: of outer step {newest}"
    if coming.writer and not roll.is_over:
        snapshot += f"; {identity_of(coming.writer)} writes one of outer step {coming.version}"
    return [*lines, snapshot]


def _row(worker: dict[str, Any]) -> dict[str, str]:
    position = worker["position"]
    metrics, _ = WorkerMetrics.read(worker["metrics"])
    return {
        "worker": worker["identity"],
        "outer": _UNKNOWN if position is None else str(position["version"]),
        "inner": _UNKNOWN if position is None else str(position["step"]),
        **metric_cells(metrics),
        "state": worker["state"],
    }


def _record(status: BucketStatus, workers: list[dict[str, Any]]) -> dict[str, Any]:
    roll = status.roll
    return {
        "age_s": status.roll_age_s,
        "run": None if roll is None else roll.position.describe() | {"over": roll.is_over},
        "roll": None if roll is None else roll.number,
        "snapshot": None if roll is None or roll.state.version < 0 else roll.state.version,
        "workers": workers,
    }
