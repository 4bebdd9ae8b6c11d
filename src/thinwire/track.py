"""One fragment on one worker: its outer state, its exchange, and what is under way."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from thinwire.exchange import ExchangeState, InFlight, Place
from thinwire.fragments import Fragment
from thinwire.layout import Layout
from thinwire.outer import OuterState
from thinwire.transport import Label

__all__ = ["Flight", "Track"]


@final
@dataclass(kw_only=True, slots=True)  # state: a flight may be called in before it is due
class Flight:
    """An exchange under way.

    Args:
        exchange: to be finished.
        sent_at_step: inner step after which it was sent.
        due_step: inner step after which it is applied.
    """

    exchange: InFlight
    sent_at_step: int
    due_step: int


@final
class Track:
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
        self.sent_at_step = self.sends = 0
        self.flights: deque[Flight] = deque()
        self._slots = slots

    def send(self, delta: Tensor, *, anchor: bytes, step: int, due_step: int) -> None:
        """Send `delta`, taken from the outer parameters with digest `anchor` after inner `step`."""
        self.sends += 1
        place = Place(label=Label(what=self.fragment.name, round=self.sends), anchor=anchor)
        flight = self.exchange.start(delta, place)
        self.flights.append(Flight(exchange=flight, sent_at_step=step, due_step=due_step))
        self.sent_at_step = step

    def prefetch_send(self) -> None:
        """Begin to bring to the device what sending needs."""
        self.outer.prefetch_collect()
        self.exchange.prefetch()

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
        self.sent_at_step, self.sends = int(state["sent_at_step"]), int(state["sends"])
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
            Flight(
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


def _saved(flight: Flight) -> dict[str, Any]:
    place = flight.exchange.place
    return {
        "messages": dict(flight.exchange.messages),
        "anchor": torch.tensor(list(place.anchor.ljust(8, b"\0")), dtype=torch.uint8),
        "round": place.label.round,
        "sent_at_step": flight.sent_at_step,
        "due_step": flight.due_step,
    }
