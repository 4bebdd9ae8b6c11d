"""A simulated run under way.

A worker computes a step in stretches. Between two of them it waits for the answer to something sent
earlier, decodes it and applies it, or it encodes and sends a piece that is ready. Exchanges have
the link one after the other, in the order in which they were begun.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from thinwire.plan.clocks import Clocks, Sent
from thinwire.plan.engine import Piece
from thinwire.plan.freight import due_after, last_due
from thinwire.plan.link import Crossing
from thinwire.plan.outcome import Outcome, Seconds
from thinwire.plan.scenario import Scenario

__all__ = ["Run"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    """Of a piece, among so many workers."""

    encode_s: float
    decode_s: float
    crossing: Crossing


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    piece: Piece
    sent: Sent
    decode_s: float


@final
class Run:
    """Where a run stands, and what it has come to.

    Args:
        scenario: what is simulated.
        clocks: of its workers.
    """

    def __init__(self, scenario: Scenario, clocks: Clocks) -> None:
        self.scenario, self.workers = scenario, scenario.freight.workers
        self._clocks = clocks
        self._pieces = scenario.pieces()
        self._cyclic_from = max(message.first for message in scenario.freight.messages)
        every = scenario.freight.sync_every
        self._places = sorted({message.offset % every for message in scenario.freight.messages})
        self._cycle: dict[int, tuple[tuple[int, ...], list[Piece]]] = {}
        self._costs: dict[tuple[int, float, int], _Cost] = {}
        self._needed: dict[int, list[_Flight]] = {}
        self._early_wait_s = 0.0
        self._wait_s: list[float] = []
        self._round_s: list[float] = []
        self._begun_s: list[float] = []
        self._freed_s: list[float] = []
        self._sent_nbytes: float = 0
        self._received_nbytes: float = 0
        self._peak_nbytes: float = 0

    # -- a step ------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Compute inner step `step`, counted from 1, and all that happens in it."""
        due, pieces = self._schedule(step)
        at = self._use_answers(step)
        for piece in pieces:
            at = self._train_to(at, piece.ready_at)
            self._send(piece, step)
        self._train_to(at, 1.0)
        if due:
            self._note_peak(sum(self._count(index) for index in due))
        if step % self.scenario.freight.sync_every == 0:
            self._round_s.append(self._clocks.latest_s())

    def rest(self, steps: int) -> None:
        """Compute `steps` inner steps in which nothing else happens."""
        self._clocks.train(steps)
        self._wait_s.extend([0.0] * steps)

    def next_event(self, step: int) -> int:
        """The first step from `step` on in which something is sent or needed, or a round ends."""
        every = self.scenario.freight.sync_every
        round_end = step + -step % every
        return min(self._next_due(step), min(self._needed, default=round_end), round_end)

    def _next_due(self, step: int) -> int:
        every = self.scenario.freight.sync_every
        if step < self._cyclic_from:
            firsts = (
                m.first + (m.offset - m.first) % every for m in self.scenario.freight.messages
            )
            return min(first + max(0, -((first - step) // every)) * every for first in firsts)
        place = step % every
        later = bisect_left(self._places, place)
        wrapped = later == len(self._places)
        return step - place + (self._places[0] + every if wrapped else self._places[later])

    def _schedule(self, step: int) -> tuple[tuple[int, ...], list[Piece]]:
        """The messages that are due after `step`, and their pieces as they get ready."""
        freight = self.scenario.freight
        if step < self._cyclic_from:
            return self._in_order(due_after(freight, step))
        place = step % freight.sync_every
        if place not in self._cycle:
            self._cycle[place] = self._in_order(due_after(freight, step))
        return self._cycle[place]

    def _in_order(self, due: list[int]) -> tuple[tuple[int, ...], list[Piece]]:
        pieces = (piece for index in due for piece in self._pieces[index])
        return tuple(due), sorted(pieces, key=lambda piece: piece.ready_at)

    def _train_to(self, at: float, place: float) -> float:
        if place > at:
            self._clocks.train(place - at)
        return place

    def _use_answers(self, step: int) -> float:
        """Train as far as answers are needed in `step`; returns how far that is."""
        at, waited_s, self._early_wait_s = 0.0, self._early_wait_s, 0.0
        for flight in sorted(self._needed.pop(step, ()), key=lambda f: f.piece.needed_at):
            at = self._train_to(at, flight.piece.needed_at)
            waited_s += self._use(flight)
        self._wait_s.append(waited_s)
        return at

    def use_first_answers(self, step: int) -> None:
        """Use what is needed before anything in `step` is computed: whoever leaves then has it."""
        flights = self._needed.pop(step, [])
        self._early_wait_s = self._use_all(f for f in flights if f.piece.needed_at == 0)
        self._needed[step] = [f for f in flights if f.piece.needed_at > 0]

    def _use(self, flight: _Flight) -> float:
        waited_s = self._clocks.wait(flight.sent)
        if flight.decode_s:
            self._clocks.code(flight.decode_s)
        return waited_s

    def _send(self, piece: Piece, step: int) -> None:
        cost = self._cost(piece)
        if cost.encode_s:
            self._clocks.code(cost.encode_s)
        exchange = self.scenario.freight.messages[piece.message].exchange
        sent, begun_s, freed_s = self._clocks.meet(exchange, cost.crossing)
        self._begun_s.append(begun_s)
        self._freed_s.append(freed_s)
        flight = _Flight(piece=piece, sent=sent, decode_s=cost.decode_s)
        self._needed.setdefault(step + 1 + self.scenario.freight.tau, []).append(flight)

    def _cost(self, piece: Piece) -> _Cost:
        key = piece.message, piece.share, self.workers
        if key not in self._costs:
            index, share, workers = key
            scenario = self.scenario
            self._costs[key] = _Cost(
                encode_s=scenario.encode_s(index, share=share),
                decode_s=scenario.decode_s(index, share=share, workers=workers),
                crossing=scenario.crossing(index, share=share, workers=workers),
            )
        return self._costs[key]

    # -- bytes -------------------------------------------------------------------------------------

    def _count(self, index: int) -> float:
        """Count message `index` as sent and its answers as received; returns its own bytes."""
        message, planned = self.scenario.freight.messages[index], self.scenario.freight.workers
        if self.workers == 1:
            return 0
        self._sent_nbytes += message.sent_nbytes + message.vote_nbytes
        received_nbytes = message.received_nbytes + (planned - 1) * message.vote_nbytes
        if self.workers != planned:
            received_nbytes *= (self.workers - 1) / (planned - 1)
        self._received_nbytes += received_nbytes
        return message.sent_nbytes

    def _note_peak(self, nbytes: float) -> None:
        self._peak_nbytes = max(self._peak_nbytes, nbytes)

    # -- the end -----------------------------------------------------------------------------------

    def end(self, steps: int) -> Outcome:
        """Exchange what was trained since it was last sent, and wait for all that is under way."""
        waited_s = self._use_all(self._needed.pop(steps + 1, ()))
        freight = self.scenario.freight
        left_over = [
            index
            for index, message in enumerate(freight.messages)
            if last_due(message, steps, sync_every=freight.sync_every) < steps
        ]
        waited_s += self._make_room(left_over)
        for index in left_over:
            for piece in self._pieces[index]:
                self._send(piece, steps)
            self._note_peak(self._count(index))
        for step in sorted(self._needed):
            waited_s += self._use_all(self._needed.pop(step))
        self._wait_s.append(waited_s)
        return self._outcome(steps)

    def _use_all(self, flights: Iterable[_Flight]) -> float:
        return sum(self._use(flight) for flight in flights)

    def _make_room(self, left_over: list[int]) -> float:
        """Use the answers to what is sent again, unless a whole round may be under way."""
        if self.scenario.freight.tau >= self.scenario.freight.sync_every:
            return 0.0
        waited_s = 0.0
        for step, flights in sorted(self._needed.items()):
            waited_s += self._use_all(f for f in flights if f.piece.message in left_over)
            self._needed[step] = [f for f in flights if f.piece.message not in left_over]
        return waited_s

    def _outcome(self, steps: int) -> Outcome:
        spent, wall_s = self._clocks.spent, self._clocks.latest_s()
        scale = wall_s / spent.total_s if spent.total_s else 0.0
        return Outcome(
            steps=steps,
            worker_steps=self._clocks.worker_steps,
            wall_s=wall_s,
            seconds=Seconds(
                compute_s=scale * spent.compute_s,
                coding_s=scale * spent.coding_s,
                slowest_s=scale * spent.slowest_s,
                bandwidth_s=scale * spent.bandwidth_s,
                latency_s=scale * spent.latency_s,
            ),
            wait_s=tuple(self._wait_s),
            round_s=tuple(self._round_s),
            begun_s=tuple(self._begun_s),
            freed_s=tuple(self._freed_s),
            sent_nbytes=self._sent_nbytes,
            received_nbytes=self._received_nbytes,
            peak_sent_nbytes_per_step=self._peak_nbytes,
            peak_bits_per_s=8 * self._peak_nbytes / self.scenario.compute.step_s,
        )
