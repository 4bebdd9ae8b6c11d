"""The page of `thinwire status`, of a run with a lighthouse or over an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.contributions import CLIPPED
from thinwire.elastic.quorum import Member, identity_of
from thinwire.membership import Progress, WorkerMetrics
from thinwire.plan.units import count_text, duration_text, nbytes_text

if TYPE_CHECKING:
    from thinwire.elastic.bucket.roll import View, WorkerReport
    from thinwire.elastic.bucket.watch import BucketStatus
    from thinwire.elastic.registry_server import RegistryReply

_WIDE = 116
"""Columns of a terminal that has room for all of the table."""
_REST = 60
"""Columns that a narrow one needs for all but names."""
_ONLY_WIDE = ("address", "sent", "received")
_NUMBERS = {"outer": 5, "inner": 5, "loss": 6, "tokens/s": 6, "sent": 7, "received": 8, "waited": 8}
"""Columns of numbers, and how many characters of each are never cut."""
_UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusPage:
    """What is shown of a run.

    Args:
        headlines: about the run.
        record: JSON-able data; its "workers" are the rows.
        has_addresses: of the workers.
        contributions: how often a worker's was rejected or clipped, by identity and kind.
    """

    headlines: Sequence[str]
    record: Mapping[str, Any]
    has_addresses: bool = False
    contributions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def shown(self, width: int) -> Group:
        """The page for a terminal of `width` columns."""
        every = (["address"] if self.has_addresses else []) + list(_NUMBERS)
        is_wide = width >= _WIDE
        names = [name for name in every if is_wide or name not in _ONLY_WIDE]
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        # Names are cut before anything else is.
        name_width = None if is_wide else max(10, width - _REST)
        table.add_column("worker", no_wrap=True, max_width=name_width)
        for name in names:
            justify = "right" if name in _NUMBERS else "left"
            table.add_column(name, justify=justify, no_wrap=True, min_width=_NUMBERS.get(name))
        table.add_column("state", min_width=14)
        for worker in self.record["workers"]:
            cells = _cells(worker)
            table.add_row(*(Text(cells[name]) for name in ("worker", *names, "state")))
        shown: list[RenderableType] = [Text("\n".join(self.headlines)), table]
        if self.contributions:
            shown.append(_contributions(self.contributions))
        if not is_wide:
            left_out = ", ".join(name for name in every if name in _ONLY_WIDE)
            shown.append(Text(f"a terminal of {_WIDE} columns shows {left_out}, too"))
        return Group(*shown)


def _cells(worker: Mapping[str, Any]) -> dict[str, str]:
    """What the table shows of a worker; a dash is what it did not measure."""
    position, (metrics, _) = worker["position"], WorkerMetrics.read(worker["metrics"])
    measured = {
        "loss": (metrics.loss, "{:.5g}".format),
        "tokens/s": (metrics.tokens_per_s, count_text),
        "sent": (metrics.sent_bytes, nbytes_text),
        "received": (metrics.received_bytes, nbytes_text),
        "waited": (metrics.wait_s, duration_text),
    }
    return {
        "worker": worker["identity"],
        "address": worker.get("address", ""),
        "outer": _UNKNOWN if position is None else str(position["version"]),
        "inner": _UNKNOWN if position is None else str(position["step"]),
        **{name: "-" if value is None else text(value) for name, (value, text) in measured.items()},
        "state": worker["state"],
    }


def _contributions(found: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contributions of", no_wrap=True)
    table.add_column("rejected", justify="right")
    table.add_column("clipped", justify="right")
    table.add_column("why")
    for identity, counts in found.items():
        rejected = {kind: count for kind, count in counts.items() if kind != CLIPPED}
        why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
        numbers = (str(sum(rejected.values())), str(counts.get(CLIPPED, 0)))
        table.add_row(*map(Text, (identity, *numbers, why)))
    return table


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


# -- a run with a lighthouse -----------------------------------------------------------------------


def lighthouse_page(reply: RegistryReply) -> StatusPage:
    """The page of what a lighthouse knows."""
    run, age = reply.run, duration_text(reply.age_s)
    told = "no outer step yet"
    if run.version:
        told = (
            f"the run is {'over' if run.over else 'under way'}: outer step {run.version}, "
            f"inner step {run.step}, {run.dealt} data shares dealt, state {run.digest}"
        )
    workers = [
        {
            "identity": member.identity,
            "address": member.address,
            "position": member.position.describe(),
            "metrics": reply.metrics.get(member.identity, WorkerMetrics()).describe(),
            "heartbeat_age_s": reply.heartbeat_age_s.get(member.identity),
            "state": _member_state(member, reply),
        }
        for member in sorted(reply.peers, key=lambda member: member.identity)
    ]
    return StatusPage(
        headlines=[f"lighthouse up for {age}; {_count(len(workers))}; {told}"],
        has_addresses=True,
        contributions=reply.contributions,
        record={
            "age_s": reply.age_s,
            "run": run.describe(),
            "workers": workers,
            "contributions": reply.contributions,
        },
    )


def _member_state(member: Member, reply: RegistryReply) -> str:
    run, behind = reply.run, reply.run.version - member.position.version
    silent_s = reply.heartbeat_age_s.get(member.identity, 0.0)
    found: list[str] = []
    # Heartbeats are sent five times within the timeout, or more often.
    if silent_s > reply.heartbeat_timeout_s / 2:
        found.append(f"no heartbeat for {silent_s:.0f} s")
    if member.finished:
        found.append("finished")
    if behind > 0:
        found.append(f"{behind} outer steps behind" if behind > 1 else "1 outer step behind")
    elif behind == 0 and run.version and member.position.digest not in ("", run.digest):
        found.append(f"another state: digest {member.position.digest}")
    if member.waiting_s >= 1:  # at the end of every round one waits for a moment
        found.append(f"waits for others, {member.waiting_s:.0f} s")
    return ", ".join(found) or "trains"


# -- a run over an object store --------------------------------------------------------------------


def bucket_page(status: BucketStatus, what: str) -> StatusPage:
    """The page of what a store holds.

    Args:
        status: as it was read.
        what: the run, as it is called in the first line.
    """
    roll = status.roll
    calls = {identity_of(call.name): call for call in status.calls}
    names: dict[str, str] = {}
    if roll is not None:
        present = roll.metrics if roll.is_over else (*roll.lacking, *roll.names)
        names = {identity_of(name): name for name in present}
    is_awaited = any(not call.leaves for call in status.calls)
    workers: list[dict[str, Any]] = []
    for identity in sorted({*names, *calls}):
        name, call = names.get(identity), calls.get(identity)
        told = {} if roll is None or name is None else roll.metrics.get(name, {})
        metrics = WorkerMetrics.read(told)[0] if call is None else call.metrics
        position = _position(name, call, roll)
        workers.append(
            {
                "identity": identity,
                "position": None if position is None else position.describe(),
                "metrics": metrics.describe(),
                "state": _worker_state(name, call, roll, is_awaited=is_awaited),
            }
        )
    return StatusPage(
        headlines=_bucket_headlines(status, what, len(workers)),
        record={
            "age_s": status.roll_age_s,
            "run": None if roll is None else roll.position.describe() | {"over": roll.is_over},
            "roll": None if roll is None else roll.number,
            "snapshot": None if roll is None or roll.state.version < 0 else roll.state.version,
            "workers": workers,
        },
    )


def _position(name: str | None, call: WorkerReport | None, roll: View | None) -> Progress | None:
    """How far a worker is; None where nothing tells."""
    if call is not None:
        return call.position
    if roll is None or name is None or name in (*roll.lacking, *roll.behind):
        return None
    return roll.position


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
    # Whether it trains or is gone, no object says.
    others = ", others wait for it" if is_awaited else ""
    if name in roll.behind:
        return f"catches up{others}"
    return ("has just come" if name in roll.new else "trains") + others


def _bucket_headlines(status: BucketStatus, what: str, workers: int) -> list[str]:
    roll = status.roll
    if roll is None:
        return [f"{what}: {_count(workers)}; no round has begun"]
    run = roll.position
    age = _UNKNOWN if status.roll_age_s is None else f"{duration_text(status.roll_age_s)} ago"
    newest, coming = roll.state.version, roll.next_state
    snapshot = "no snapshot yet" if newest < 0 else f"newest snapshot: of outer step {newest}"
    if coming.writer and not roll.is_over:
        snapshot += f"; {identity_of(coming.writer)} writes one of outer step {coming.version}"
    return [
        f"{what}: roll {roll.number}, written {age}; {_count(workers)}",
        f"the run is {'over' if roll.is_over else 'under way'}: outer step {run.version}, inner "
        f"step {run.step}, {run.dealt} data shares dealt, digest {run.digest}",
        snapshot,
    ]
