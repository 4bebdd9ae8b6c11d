"""One fragment on one worker: its outer state, its exchange, and what is under way."""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from thinwire.errors import MismatchError
from thinwire.exchange import ExchangeState, InFlight, Place, RoundResult
from thinwire.exchange.message import anchor_digest
from thinwire.fragments import Fragment
from thinwire.fragments.layout import Layout
from thinwire.outer import OuterState
from thinwire.rejection import RejectReason
from thinwire.transport import Label

__all__ = ["FragmentState", "PendingRound"]

_REMEMBERED_ROUNDS = 8


@final
@dataclass(kw_only=True, slots=True, eq=False)  # state: a flight may be called in before it is due
class PendingRound:
    """An exchange under way.

    Args:
        exchange: to be finished.
        sent_at_step: inner step after which it was sent.
        due_step: inner step after which it is applied.
        before: feedback before it was encoded; None where a round that was sent always counts.
    """

    exchange: InFlight
    sent_at_step: int
    due_step: int
    before: Mapping[str, Tensor] | None = None

    @property
    def round(self) -> int:
        """Its number among the fragment's."""
        return self.exchange.place.label.round


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _AbandonedRound:
    """A round that this worker gave up, and the feedback it would have had, had it counted."""

    round: int
    after: Mapping[str, Tensor]


@final
class FragmentState:
    """A fragment and its states.

    Args:
        fragment: which parameters.
        layout: of their vector.
        outer: moves them.
        exchange: averages what they moved by.
        slots: flights for which a checkpoint has room.
    """

    def __init__(
        self,
        fragment: Fragment,
        layout: Layout,
        outer: OuterState,
        exchange: ExchangeState,
        *,
        slots: int,
    ) -> None:
        self.fragment, self.layout = fragment, layout
        self.outer, self.exchange = outer, exchange
        # What was sent until counted_at_step is in outer steps: giving up flights goes back to it.
        self.sent_at_step = self.counted_at_step = self.sends = 0
        self.flights: deque[PendingRound] = deque()
        self.counted: dict[int, Sequence[str]] = {}
        self.watcher: Callable[[Tensor], None] | None = None
        self._slots = slots
        self._lost: _AbandonedRound | None = None
        # Of another K's outer optimizer: it is gone only when one without it has taken a step.
        self._dormant: dict[str, Tensor] = {}

    # -- a round -----------------------------------------------------------------------------------

    def send(
        self,
        delta: Tensor,
        *,
        step: int,
        due_step: int,
        anchor: bytes = b"",
        before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send `delta`, taken from the outer parameters with digest `anchor` after inner `step`."""
        if self.watcher is not None:
            self.watcher(delta)
        place = self._next_place(anchor)
        messages = self.exchange.encode(delta, place)
        self._fly(messages, place, step=step, due_step=due_step, before=before)

    def send_nothing(self, *, anchor: bytes, step: int, due_step: int) -> None:
        """Take part in a round without a pseudo-gradient."""
        place = self._next_place(anchor)
        messages = self.exchange.empty_messages(place)
        self._fly(messages, place, step=step, due_step=due_step, before=self.feedback())

    def _next_place(self, anchor: bytes) -> Place:
        return Place(label=Label(what=self.fragment.name, round=self.sends + 1), anchor=anchor)

    def _fly(
        self,
        messages: Mapping[str, Tensor],
        place: Place,
        *,
        step: int,
        due_step: int,
        before: Mapping[str, Tensor] | None,
    ) -> None:
        self.sends += 1
        flight = self.exchange.send(messages, place)
        self.flights.append(
            PendingRound(exchange=flight, sent_at_step=step, due_step=due_step, before=before)
        )
        self.sent_at_step = step

    def prefetch_send(self) -> None:
        """Begin to bring to the device what sending needs."""
        self.outer.prefetch_collect()
        self.exchange.prefetch()

    def apply(self, flight: PendingRound, outcome: RoundResult, *, rank: int) -> None:
        """Take the outer step of `flight`, in which this worker has `rank`.

        Work that was damaged on the way is done again: it was left out, and nothing is wrong with
        it.
        """
        self.flights.remove(flight)
        self.counted_at_step = flight.sent_at_step
        self._lost = None  # what was lost has been sent again since
        mine = outcome.left_out.get(rank)
        again = mine is not None and mine.keeps_work and not self.flights
        unsent = self.outer.unsent() if again else None
        self.outer.apply(outcome.mean)
        self._dormant = {}
        if unsent is not None:
            self.outer.place(unsent)
        spoilt = mine is not None and mine.fault is not RejectReason.NOTHING
        if spoilt and flight.before is not None and not self.flights:
            self.exchange.load_state_dict(flight.before)

    # -- rounds that do not count, or counted without this worker ----------------------------------

    def feedback(self) -> dict[str, Tensor]:
        """A copy of what is left to be sent."""
        return self.exchange.feedback()

    def abandon(self) -> None:
        """Give up what is in flight: the next round sends it with what was done since."""
        if not self.flights:
            return
        first, *later = self.flights
        after = later[0].before if later else self.feedback()
        self._lost = _AbandonedRound(round=first.round, after=after or {})
        if first.before is not None:
            self.exchange.load_state_dict(first.before)
        self.sends -= len(self.flights)
        self.sent_at_step = self.counted_at_step
        self.flights.clear()
        self.outer.abandon()

    def remember_counted(self, round: int, names: Sequence[str]) -> None:
        """Whose pseudo-gradients are in the mean of `round`."""
        self.counted[round] = names
        for old in sorted(self.counted)[:-_REMEMBERED_ROUNDS]:
            del self.counted[old]

    def settle(self, name: str, unsent: Tensor | None) -> None:
        """Go on from outer parameters that others moved.

        Args:
            name: this worker's.
            unsent: what it did that is in no outer step it knew of.
        """
        lost, self._lost = self._lost, None
        if lost is not None and self._may_have_counted(lost.round, name):
            # It counted after all. What was done after it was sent cannot be told apart any more.
            self.exchange.load_state_dict(lost.after)
            unsent = None
        finite = unsent is not None and bool(torch.isfinite(unsent).all())
        self.outer.place(unsent if finite else None)

    def _may_have_counted(self, round: int, name: str) -> bool:
        # Of a round that nobody remembers any more it is better to lose work than to send it twice.
        return round <= self.sends and name in self.counted.get(round, (name,))

    def shared(self) -> dict[str, Tensor]:
        """What is equal on all workers; it shares memory with this track."""
        return self._dormant | self.outer.shared()

    def check_shared(self, shared: Mapping[str, Tensor], outer: OuterState) -> None:
        """Raise `MismatchError` unless `shared` has what `outer` needs, and in that shape."""
        mine, theirs = _forms(outer.shared()), _forms(shared)
        if mine != {key: theirs.get(key) for key in mine}:
            raise MismatchError(
                f"take over the outer parameters of {self.fragment.name}",
                because=f"they have {theirs} and here are {mine}",
                do="give all workers the same model and method",
            )

    def adopt(self, shared: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take over what was checked, and what is known of rounds; `settle` must follow."""
        mine = self.outer.shared().keys()
        self.outer.adopt({key: value for key, value in shared.items() if key in mine})
        self._dormant = {k: v.clone() for k, v in shared.items() if k not in mine}
        self.sends = int(facts["sends"])
        self.sent_at_step = self.counted_at_step = int(facts["sent_at_step"])
        self.counted = {int(round): names for round, names in facts["counted"]}

    def advance(self, mean: Tensor, facts: Mapping[str, Any]) -> None:
        """Take the outer step of a round that this worker missed; `settle` must follow."""
        self.outer.advance(mean)
        self._dormant = {}
        self.sends = int(facts["round"])
        self.sent_at_step = self.counted_at_step = int(facts["sent_at_step"])
        self.remember_counted(self.sends, facts["counted"])

    def reseat_outer(self, outer: OuterState) -> None:
        """Go on with `outer`, made for another number of workers."""
        if outer is self.outer:
            return
        old, new, unsent = self.shared(), outer.shared(), self.outer.unsent()
        # What this K's outer optimizer keeps and the other did not begins as it does in a new run.
        outer.adopt({key: old.get(key, value) for key, value in new.items()})
        self._dormant = {key: value.clone() for key, value in old.items() if key not in new}
        self.outer.close()
        self.outer = outer
        self.outer.place(unsent)

    def reseat_exchange(self, exchange: ExchangeState) -> None:
        """Go on with `exchange`, made for other workers, and with what is left to be sent."""
        residual = self.exchange.residual()
        if residual is not None:
            exchange.take_residual(residual)
        self.exchange = exchange

    def digest(self) -> bytes:
        """Eight bytes that tell outer parameters apart."""
        return anchor_digest(self.outer.flat_anchor())

    def unsent_feedback(self) -> Mapping[str, Tensor]:
        """Feedback as it is if nothing that is in flight counts."""
        before = self.flights[0].before if self.flights else None
        return self.feedback() if before is None else before

    def shared_digest(self) -> bytes:
        """The same of all that workers share.

        A buffer of zeros may be there for one number of workers and not for another.
        """
        held = ((key, value.reshape(-1).float()) for key, value in sorted(self.shared().items()))
        parts = (key.encode() + anchor_digest(v) for key, v in held if bool(v.any()))
        return hashlib.sha256(b"".join(parts)).digest()[:8]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that is kept between rounds, and what is in flight."""
        blanks = (self._blank() for _ in range(self._slots))
        flights = [_saved(flight) for flight in self.flights]
        return {
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "sent_at_step": self.sent_at_step,
            "sends": self.sends,
            # Always as many: torch.distributed.checkpoint fills what is there, and nothing else.
            "in_flight": [*flights, *blanks][: self._slots],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
        """Continue from `state`; returns (step, saved flight) of all that is to be sent again."""
        self.outer.load_state_dict(state["outer"])
        self.exchange.load_state_dict(state["exchange"])
        self.sent_at_step = self.counted_at_step = int(state["sent_at_step"])
        self.sends = int(state["sends"])
        self.flights.clear()
        saved = [flight for flight in state["in_flight"] if int(flight["round"]) > 0]
        return [(int(flight["sent_at_step"]), flight) for flight in saved]

    def send_again(self, saved: Mapping[str, Any]) -> None:
        """Send what was in flight when the state was saved."""
        label = Label(what=self.fragment.name, round=int(saved["round"]))
        place = Place(label=label, anchor=bytes(saved["anchor"].tolist()))
        # Who loaded the state may reuse its memory before the messages have left.
        messages = {name: message.clone() for name, message in saved["messages"].items()}
        flight = self.exchange.send(messages, place)
        self.flights.append(
            PendingRound(
                exchange=flight,
                sent_at_step=int(saved["sent_at_step"]),
                due_step=int(saved["due_step"]),
            )
        )

    def _blank(self) -> dict[str, Any]:
        anchor = torch.zeros(8, dtype=torch.uint8)
        steps = {"round": 0, "sent_at_step": 0, "due_step": 0}
        return {"messages": self.exchange.blank(), "anchor": anchor, **steps}

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor`, `outer state` and `feedback`."""
        feedback = sum(tensor.nbytes for tensor in self.exchange.state_dict().values())
        return {**self.outer.memory(), "feedback": feedback}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: f"{value.dtype} {list(value.shape)}" for key, value in tensors.items()}


def _saved(flight: PendingRound) -> dict[str, Any]:
    place = flight.exchange.place
    return {
        "messages": dict(flight.exchange.messages),
        "anchor": torch.tensor(list(place.anchor.ljust(8, b"\0")), dtype=torch.uint8),
        "round": place.label.round,
        "sent_at_step": flight.sent_at_step,
        "due_step": flight.due_step,
    }
