"""Events of a worker's membership in an elastic run."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "waits for",  # before its first round: others have to join, or to end a round
    "joined",  # this worker has joined the run
    "arrived",  # another worker has joined
    "left",  # another worker is gone
    "late",  # the others did not wait for this worker
    "healed",  # this worker caught up by rounds or a snapshot
    "committed",  # a round counts
    "discarded",  # a round does not count here: its work is sent again, or the others count it
    "left out",  # a worker's contribution was not used
    "clipped",  # a worker's contribution was scaled down
    "refused",  # a worker may not take part
    "unsaved",  # this worker could not write a file
]


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event: its time and the workers concerned.

    Args:
        kind: see `Kind`.
        at_s: time, in seconds since 1970.
        round: outer steps taken by then.
        who: identities of the workers.
        why: explanation, as text.
        lost_s: seconds of training that it cost this worker.
    """

    kind: Kind
    at_s: float
    round: int
    who: tuple[str, ...] = ()
    why: str = ""
    lost_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON-able data."""
        return {**asdict(self), "who": list(self.who)}

    def __str__(self) -> str:
        lost = f" ({self.lost_s:.1f} s lost)" if self.lost_s >= 0.05 else ""
        parts = (f"round {self.round}: {self.kind}", *self.who, self.why)
        return " ".join(filter(None, parts)) + lost


class EventLog:
    """Keeps events in order, counts them and passes them to listeners; safe from any thread.

    `committed` events are counted and passed on, but not kept: a long run has many rounds.

    >>> log = EventLog()
    >>> log.note("left", round=3, who=("b",), why="no heartbeat for 5 s", lost_s=5.2)
    >>> [str(event) for event in log.events]
    ['round 3: left b no heartbeat for 5 s (5.2 s lost)']
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._counts: dict[str, int] = {}
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> list[Event]:
        """All events that are kept."""
        with self._lock:
            return list(self._events)

    def listen(self, listener: Callable[[Event], None]) -> list[Event]:
        """Call `listener` with every event from now on, in the thread where it happens.

        Returns:
            The events kept so far.
        """
        with self._lock:
            self._listeners.append(listener)
            return list(self._events)

    def note(self, kind: Kind, *, round: int, **about: Any) -> None:
        """Add an event; `about` sets further fields of `Event`."""
        event = Event(kind=kind, at_s=time.time(), round=round, **about)
        with self._lock:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            if kind != "committed":
                self._events.append(event)
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                # A closed terminal must not end the thread that reports.
                _LOG.exception("a listener failed on an event")

    def summary(self) -> Mapping[str, Any]:
        """Counts by kind, seconds lost in all, and the events, JSON-able."""
        with self._lock:
            return {
                "counts": dict(self._counts),
                "lost_s": sum((event.lost_s for event in self._events), 0.0),
                "events": [event.describe() for event in self._events],
            }
