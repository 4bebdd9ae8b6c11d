"""One fragment on one worker: its outer state, its exchange, and what is under way."""

from collections.abc import Mapping
from typing import Any, final

from thinwire.exchange import ExchangeState, InFlight
from thinwire.fragments import Fragment
from thinwire.layout import Layout
from thinwire.outer import OuterState

__all__ = ["Track"]


@final
class Track:
    """A fragment and its states.

    Args:
        fragment: which parameters.
        layout: of their vector.
        outer: moves them.
        exchange: averages what they moved by.
    """

    def __init__(
        self, fragment: Fragment, layout: Layout, outer: OuterState, exchange: ExchangeState
    ) -> None:
        self.fragment, self.layout = fragment, layout
        self.outer, self.exchange = outer, exchange
        self.sent_at_step = 0
        self.in_flight: InFlight | None = None

    @property
    def name(self) -> str:
        """What error messages call it."""
        names = self.fragment.names
        return f"fragment {self.fragment.index} ({len(names)} parameters from {names[0]!r})"

    def state_dict(self) -> dict[str, Any]:
        """Everything that is kept between rounds."""
        return {
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "sent_at_step": self.sent_at_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.outer.load_state_dict(state["outer"])
        self.exchange.load_state_dict(state["exchange"])
        self.sent_at_step = int(state["sent_at_step"])

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor`, `outer state` and `feedback`."""
        outer = {name: tensor.nbytes for name, tensor in self.outer.state_dict().items()}
        anchor = outer.pop("anchor", 0)
        feedback = sum(tensor.nbytes for tensor in self.exchange.state_dict().values())
        return {"anchor": anchor, "outer state": sum(outer.values()), "feedback": feedback}
