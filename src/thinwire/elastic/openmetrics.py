"""An elastic run as text for Prometheus: OpenMetrics 1.0.

Written here because it is one page: a library for it keeps metrics of its own process in a registry
of its own, and these are of other processes that come and go.

Source: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from thinwire.elastic.registry import MemberStatus
from thinwire.elastic.registry_server import RegistryStatus

S = TypeVar("S")

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family(Generic[S]):
    """A metric: how it is named, and its value in what is shown; None is left out."""

    name: str
    help: str
    value: Callable[[S], float | None]
    unit: str = ""
    kind: Literal["gauge", "counter"] = "gauge"

    def header(self) -> Iterator[str]:
        yield f"# TYPE {self.name} {self.kind}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {self.help}"

    def sample(self, shown: S, labels: str = "") -> Iterator[str]:
        value = self.value(shown)
        if value is not None:
            suffix = "_total" if self.kind == "counter" else ""
            yield f"{self.name}{suffix}{labels} {value}"


_OF_THE_RUN: Final[Sequence[_Family[RegistryStatus]]] = (
    _Family(
        name="thinwire_workers",
        help="Workers that send heartbeats.",
        value=lambda status: len(status.workers),
    ),
    _Family(
        name="thinwire_run_outer_step",
        help="Outer steps of the furthest state that a worker had.",
        value=lambda status: status.run.version,
    ),
    _Family(
        name="thinwire_run_inner_step",
        help="Inner steps of the schedule at that state.",
        value=lambda status: status.run.step,
    ),
    _Family(
        name="thinwire_run_over",
        help="1 once all steps of the run are taken.",
        value=lambda status: int(status.run.over),
    ),
    _Family(
        name="thinwire_refusals",
        help="Workers, rounds and requests that were refused; the same one once a minute.",
        kind="counter",
        value=lambda status: status.refusals,
    ),
    _Family(
        name="thinwire_lighthouse_uptime_seconds",
        help="Since when the lighthouse runs.",
        unit="seconds",
        value=lambda status: status.age_s,
    ),
)

_OF_A_WORKER: Final[Sequence[_Family[MemberStatus]]] = (
    _Family(
        name="thinwire_worker_outer_step",
        help="Outer steps that the worker's state has taken.",
        value=lambda worker: worker.member.position.version,
    ),
    _Family(
        name="thinwire_worker_inner_step",
        help="Inner steps of the schedule at which the worker is.",
        value=lambda worker: worker.member.position.step,
    ),
    _Family(
        name="thinwire_worker_finished",
        help="1 once the worker has taken all its steps.",
        value=lambda worker: int(worker.member.finished),
    ),
    _Family(
        name="thinwire_worker_heartbeat_age_seconds",
        help="Since the worker's last heartbeat.",
        unit="seconds",
        value=lambda worker: worker.heartbeat_age_s,
    ),
    _Family(
        name="thinwire_worker_waiting_seconds",
        help="For how long it has been waiting for others to begin a round, beyond what it allows.",
        unit="seconds",
        value=lambda worker: worker.member.waiting_s,
    ),
    _Family(
        name="thinwire_worker_wait_seconds",
        help="Spent waiting for rounds to begin and for exchanges.",
        unit="seconds",
        kind="counter",
        value=lambda worker: worker.metrics.wait_s,
    ),
    _Family(
        name="thinwire_worker_sent_bytes",
        help="Payload handed to the transport, metadata included.",
        unit="bytes",
        kind="counter",
        value=lambda worker: worker.metrics.sent_bytes,
    ),
    _Family(
        name="thinwire_worker_received_bytes",
        help="Payload that came from other workers.",
        unit="bytes",
        kind="counter",
        value=lambda worker: worker.metrics.received_bytes,
    ),
    _Family(
        name="thinwire_worker_loss",
        help="Training loss that the worker reported last.",
        value=lambda worker: worker.metrics.loss,
    ),
    _Family(
        name="thinwire_worker_tokens_per_second",
        help="Tokens that the worker reads.",
        value=lambda worker: worker.metrics.tokens_per_s,
    ),
)

_CONTRIBUTIONS: Final[_Family[int]] = _Family(
    name="thinwire_worker_contributions_rejected_or_clipped",
    help="Contributions of the worker that were rejected, by reason, or clipped.",
    kind="counter",
    value=lambda count: count,
)


def openmetrics_text(status: RegistryStatus) -> str:
    """What the registry knows, in OpenMetrics 1.0; ends with `# EOF`.

    A worker that did not report a value has no sample of it. Identities are the only names in it:
    addresses, digests and the token are not.

    >>> from thinwire.membership import Progress
    >>> at = Progress(version=3, step=30, digest="ab")
    >>> text = openmetrics_text(RegistryStatus(workers=(), run=at, refusals=0, age_s=1.5))
    >>> text.splitlines()[:3]
    ['# TYPE thinwire_workers gauge', '# HELP thinwire_workers Workers that send heartbeats.', \
'thinwire_workers 0']
    """
    return "\n".join([*_lines(status), "# EOF", ""])


def _lines(status: RegistryStatus) -> Iterator[str]:
    for family in _OF_THE_RUN:
        yield from family.header()
        yield from family.sample(status)
    labelled = [(worker, _labels(worker.member.identity)) for worker in _in_order(status.workers)]
    for family in _OF_A_WORKER:
        yield from family.header()
        for worker, labels in labelled:
            yield from family.sample(worker, labels)
    yield from _CONTRIBUTIONS.header()
    for identity, found in sorted(status.contributions.items()):
        for kind, count in found.items():
            yield from _CONTRIBUTIONS.sample(count, _labels(identity, kind=kind))


def _in_order(workers: Iterable[MemberStatus]) -> list[MemberStatus]:
    return sorted(workers, key=lambda worker: worker.member.identity)


def _labels(identity: str, **more: str) -> str:
    labels = {"worker": identity, **more}
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}"


def _escaped(value: str) -> str:
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ('"', '\\"')):
        value = value.replace(plain, escaped)
    return value
