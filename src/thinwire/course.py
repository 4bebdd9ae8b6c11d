"""Where a worker's run stands: its tracks, what is under way, and what all workers share of it."""

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from thinwire.elastic.shared_state import Progress, RoundRecord, SharedState, Snapshot
from thinwire.errors import ConfigurationError, RoundDiscarded
from thinwire.exchange import RoundResult
from thinwire.fragment_builder import FragmentBuilder
from thinwire.fragment_state import FragmentState, PendingRound
from thinwire.handshake import check_same_run
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.outer import OuterState
from thinwire.rejection import RejectReason
from thinwire.replay import check_follows, copy_of, describe_round, remake
from thinwire.storage import Ledger, StatePlacement
from thinwire.transport import Metered, Phase, RoundPlan

__all__ = ["Course"]

_LOG = logging.getLogger(__name__)
_GLANCE_S = 0.1


@final
class Course(SharedState):
    """The state of an outer loop, and what happens to it in a round.

    Args:
        method: fills the slots.
        replica: the worker's live weights.
        transport: to the other workers.
        storage: where outer state rests.
    """

    def __init__(
        self, method: Method, replica: LiveWeights, transport: Metered, storage: StatePlacement
    ) -> None:
        self._method, self._replica = method, replica
        self._transport, self._storage = transport, storage
        self._assembly = FragmentBuilder(method, replica, transport, storage)
        self.tracks = self._assembly.tracks()
        self.description = self._assembly.describe(self.tracks)
        self.step = self.version = self.dealt = self.peak_sent_bytes = 0
        self.left_out: dict[int, int] = {}
        self._convened: RoundPlan | None = None
        self._entered = self._joining = False
        self._name = ""
        self._ended_at_step = -1
        # K as far as the outer optimizers know it.
        self._seats = transport.world_size
        # K and rank as far as the exchanges know them.
        self._place = transport.world_size, transport.rank
        # Whoever heals from this worker reads its state in a thread of its own.
        self._lock = threading.RLock()
        self._digest = (-1, "")
        self._seen = Progress(version=0, step=0, digest="")

    @property
    def ledger(self) -> Ledger:
        """What outer state takes."""
        return self._storage.ledger

    @property
    def share(self) -> int:
        """Number of the data share that is this worker's until workers convene again."""
        if self._convened is None:
            rounds = self.step // self._method.sync_every
            return rounds * self._transport.world_size + self._transport.rank
        return self._convened.dealt + self._transport.rank

    # -- a round -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Take a place among the workers, who may be under way already; once."""
        if self._entered:
            return
        if self._transport.forgiving:
            for track in self.tracks:
                track.outer.shared()  # a method that shares nothing is refused before it begins
        convened = self._convene(Phase.ENTER)
        self._entered = True
        if convened is not None and convened.joins:
            self._joining = True
            try:
                self._send_for(convened.occasion)
            finally:
                self._joining = False
            self.finish()

    def begin(self) -> None:
        """Count an inner step and send every fragment that is due."""
        self.enter()
        self.step += 1
        convened = None
        if self.step % self._method.sync_every == 0:
            convened = self._convene(Phase.ROUND)
        self._send_for(Phase.ROUND if convened is None else convened.occasion)

    def begin_last(self) -> None:
        """Send every fragment that was trained since it was last sent, and call everything in."""
        # Another fragment than the one that the next step would have needed may come first.
        self._storage.put_away()
        self.enter()
        if self._ended_at_step != self.step:
            self._convene(Phase.LAST)
        over = self._convened is not None and self._convened.occasion is Phase.OVER
        self._send_for(Phase.OVER if over else Phase.LAST)

    def finish(self) -> None:
        """Apply what is due: wait for all workers' payloads and take the outer step."""
        flights = [(t, f) for t in self.tracks for f in t.flights if f.due_step <= self.step]
        self._apply_all(flights)
        self._prefetch()

    def is_settled(self) -> bool:
        """Whether all that was trained is in the outer parameters."""
        return not any(track.flights or track.sent_at_step < self.step for track in self.tracks)

    def _send_for(self, occasion: Phase) -> None:
        if occasion is Phase.OVER:
            return
        if occasion is Phase.LAST:
            self._send_left_over()
            return
        due = [track for track in self.tracks if self._is_due(track, self.step)]
        self._send_all(due)
        self._note_peak(sum(track.exchange.sent_nbytes for track in due))

    def _send_left_over(self) -> None:
        tracks = [t for t in self.tracks if t.sent_at_step < self.step]
        # An anchor that is about to move is none to take a pseudo-gradient from.
        crowded = [t for t in tracks if len(t.flights) >= self._method.overlap.at_once]
        self._apply_all([(track, flight) for track in crowded for flight in track.flights])
        self._send_all(tracks)
        # Nobody trains beside the last exchanges: they need not be carried at once.
        self._note_peak(max((track.exchange.sent_nbytes for track in tracks), default=0))
        for track in self.tracks:
            for flight in track.flights:
                flight.due_step = self.step

    @torch.no_grad()
    def _send_all(self, tracks: Sequence[FragmentState]) -> None:
        if tracks:
            self._replica.check_unchanged()
        for track in tracks:
            self._send(track)

    def _note_peak(self, sent_bytes: int) -> None:
        self.peak_sent_bytes = max(self.peak_sent_bytes, sent_bytes)

    def _send(self, track: FragmentState) -> None:
        if len(track.flights) >= self._method.overlap.at_once:
            raise ConfigurationError(
                f"send {track.fragment.name} again at inner step {self.step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        delta = track.outer.collect()
        self._replica.check_finite(
            track.fragment.names, delta, what="pseudo-gradient", when=f"inner step {self.step}"
        )
        track.outer.sending(delta)
        # A lone worker has nobody to drift from.
        anchor = b"" if self._transport.world_size == 1 else track.digest()
        due_step = self.step + self._method.overlap.steps(sync_every=self._method.sync_every)
        # Whoever captures the state meanwhile must not count what is sent as what has come back.
        with self._lock:
            if self._joining:
                track.send_nothing(anchor=anchor, step=self.step, due_step=due_step)
                return
            before = track.feedback() if self._transport.forgiving else None
            track.send(delta, step=self.step, due_step=due_step, anchor=anchor, before=before)

    def _apply_all(self, flights: list[tuple[FragmentState, PendingRound]]) -> None:
        # All workers must wait in one order: a sort is stable, and tracks have the plan's order.
        for track, flight in sorted(flights, key=lambda tf: (tf[1].due_step, tf[1].sent_at_step)):
            # One round that counts on nobody takes those with it that are under way beside it.
            if any(flying is flight for flying in track.flights):
                self._apply(track, flight)

    def _apply(self, track: FragmentState, flight: PendingRound) -> None:
        try:
            with torch.no_grad():
                outcome = flight.exchange.finish()
        except RoundDiscarded as discarded:
            _LOG.info("%s", discarded)
            with self._lock:
                self._abandon()
            return
        # Not before: a round that failed must neither be passed over nor left out of a checkpoint.
        with self._lock:
            before = b"" if self._convened is None else track.digest()
            track.apply(flight, outcome, rank=self._transport.rank)
            self.version += 1
            self._note(track, flight, outcome, before)

    def _note(
        self, track: FragmentState, flight: PendingRound, outcome: RoundResult, before: bytes
    ) -> None:
        flaws = outcome.left_out.items()
        at_fault = {worker: f for worker, f in flaws if f.fault is not RejectReason.NOTHING}
        for worker, flaw in at_fault.items():
            self.left_out[worker] = self.left_out.get(worker, 0) + 1
            where = (track.fragment.name, flight.round, flaw)
            _LOG.warning("worker %d was left out of %s in round %d: %s", worker, *where)
        if self._convened is None:
            return
        index, names = self.tracks.index(track), self._convened.names
        facts = describe_round(index, flight, outcome, names, before=before)
        track.remember_counted(flight.round, facts["counted"])
        version = self.version
        self._transport.remember(
            lambda: RoundRecord(version=version, facts=facts, messages=outcome.messages)
        )

    def _is_due(self, track: FragmentState, step: int) -> bool:
        return track.fragment.is_due(step=step, sync_every=self._method.sync_every)

    def _prefetch(self) -> None:
        """Begin to bring what the next step needs first: one fragment's, for room is scarce."""
        step = self.step + 1
        for track in self.tracks:
            if self._is_due(track, step):
                return track.prefetch_send()
        for track in self.tracks:
            if any(flight.due_step <= step for flight in track.flights):
                return track.outer.prefetch_apply()
        return None

    # -- checkpoints -------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this worker among as many others, and send again what flew."""
        self.peak_sent_bytes = int(state["peak_sent_bytes"])
        self._load_counts(state)
        self.left_out = {int(w): int(count) for w, count in state["left_out"].items() if count}
        flights = [
            (step, track, flight)
            for track, saved in zip(self.tracks, state["fragments"], strict=True)
            for step, flight in track.load_state_dict(saved)
        ]
        for _, track, flight in sorted(flights, key=lambda found: found[0]):
            track.send_again(flight)

    def _load_counts(self, state: Mapping[str, Any]) -> None:
        self.step, self.version = int(state["step"]), int(state["rounds"])
        self.dealt, self._digest = int(state["dealt"]), (-1, "")

    # -- workers that come and go ------------------------------------------------------------------

    def _convene(self, occasion: Phase) -> RoundPlan | None:
        # Read anew, and not from memory: who has drifted within a round is to be found out.
        self._digest = (-1, "")
        convened = self._transport.convene(self, occasion)
        if convened is None:
            return None
        with self._lock:
            if convened.changed or convened.occasion is Phase.OVER:
                self._abandon()
            if convened.changed:
                self._reseat_exchange()
            self._reseat_outer(self._transport.world_size)
            self._convened, self.step = convened, convened.step
            self._name = convened.names[self._transport.rank]
            self.dealt = convened.dealt + len(convened.names)
        if convened.occasion in (Phase.LAST, Phase.OVER):
            self._ended_at_step = self.step
        if convened.occasion is Phase.OVER:
            for track in self.tracks:
                track.sent_at_step = self.step
        return convened

    def _abandon(self) -> None:
        """Nothing that is under way counts."""
        self._storage.put_away()
        for track in self.tracks:
            track.abandon()
        self._ended_at_step = -1

    def _reseat_exchange(self) -> None:
        workers, rank = self._transport.world_size, self._transport.rank
        if (workers, rank) == self._place:
            return
        for track in self.tracks:
            track.reseat_exchange(self._assembly.exchange_state(track.fragment, workers, rank))
        self._place = workers, rank

    def _reseat_outer(self, workers: int) -> None:
        self._take_seats(workers, self._outers(workers))

    def _outers(self, workers: int) -> list[OuterState]:
        if workers == self._seats:
            return [track.outer for track in self.tracks]
        return [self._assembly.outer_state(track.fragment, workers) for track in self.tracks]

    def _take_seats(self, workers: int, outers: Sequence[OuterState]) -> None:
        for track, outer in zip(self.tracks, outers, strict=True):
            track.reseat_outer(outer)
        self._seats = workers

    def position(self) -> Progress:
        """Where this worker stands; safe from any thread."""
        with self._lock:
            if self._digest[0] != self.version:
                digests = b"".join(track.shared_digest() for track in self.tracks)
                self._digest = self.version, hashlib.sha256(digests).hexdigest()[:16]
            return Progress(
                version=self.version,
                step=self.step,
                digest=self._digest[1],
                dealt=self.dealt,
                # Together with the version: who sees the last one knows that it is the last.
                over=self._ended_at_step == self.step and self.is_settled(),
            )

    def glance(self) -> Progress:
        """As `position`, but a step under way is not waited for: then it is where it last stood."""
        if self._lock.acquire(timeout=_GLANCE_S):
            try:
                self._seen = self.position()
            finally:
                self._lock.release()
        return self._seen

    def shared_nbytes(self) -> int:
        """Bytes of a snapshot's tensors."""
        with self._lock:
            return sum(value.nbytes for track in self.tracks for value in track.shared().values())

    def capture(self) -> Snapshot:
        """A copy of the shared state between two rounds; safe from any thread."""
        with self._lock:
            where = {"version": self.version, "step": self.step, "dealt": self.dealt}
            facts = {"run": self.description, "workers": self._seats, **where}
            return copy_of(self.tracks, facts)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a shared state; feedback stays this worker's own, and so does its local work.

        Raises:
            MismatchError: it is of another model or method.
        """
        facts = snapshot.facts
        check_same_run(facts["run"], self.description)
        shared = [_of_track(snapshot.tensors, index) for index in range(len(self.tracks))]
        with self._lock:
            workers = int(facts["workers"])
            outers = self._outers(workers)
            # All of it before anything changes.
            for track, theirs, outer in zip(self.tracks, shared, outers, strict=True):
                track.check_shared(theirs, outer)
            self._abandon()
            unsent = [track.outer.unsent() for track in self.tracks]
            self._take_seats(workers, outers)
            for track, theirs, known in zip(self.tracks, shared, facts["tracks"], strict=True):
                track.adopt(theirs, known)
            self.version, self.step = int(facts["version"]), int(facts["step"])
            self.dealt, self._digest = int(facts["dealt"]), (-1, "")
            for track, work in zip(self.tracks, unsent, strict=True):
                track.settle(self._name, work)

    def drop_work(self) -> None:
        """Forget what this worker has done since its outer parameters last moved."""
        with self._lock:
            self._abandon()
            for track in self.tracks:
                track.outer.place(None)

    @torch.no_grad()
    def replay(self, record: RoundRecord) -> None:
        """Take the outer step of a round that this worker missed.

        Raises:
            MismatchError: it does not follow on what this worker has.
            ExchangeError: its messages are damaged.
        """
        facts = record.facts
        track = self.tracks[int(facts["track"])]
        with self._lock:
            check_follows(record, track, version=self.version)
            # Before anything changes: the messages may turn out to be unusable.
            mean = remake(record, track, self._assembly)
            self._abandon()
            unsent = track.outer.unsent()
            self._reseat_outer(int(facts["workers"]))
            track.advance(mean, facts)
            self.version = record.version
            track.settle(self._name, unsent)


def _of_track(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
