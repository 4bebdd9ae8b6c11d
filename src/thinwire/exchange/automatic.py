"""Which exchange is the cheaper one."""

from dataclasses import dataclass, field
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange, ExchangeContext, ExchangeState
from thinwire.exchange.gather import Gather
from thinwire.exchange.reduce_scatter import ReduceScatter

__all__ = ["Automatic"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic(Exchange):
    """Gather up to a few workers, or while what arrives is no more than the vector in fp32.

    gather receives (K - 1) B bytes for payloads of B; reduce-scatter 2 B, but encodes twice.

    Args:
        few: K up to which the answer is always gather.
        otherwise: the reduce-scatter for the other cases.

    Raises:
        ConfigurationError: `few` is below 1.

    >>> Automatic().few
    4
    """

    few: int = 4
    otherwise: ReduceScatter = field(default_factory=ReduceScatter)

    def __post_init__(self) -> None:
        if self.few < 1:
            raise ConfigurationError(
                f"choose an exchange with few={self.few}",
                because="there is at least one worker",
                do="pass few >= 1, or ReduceScatter() to fix the choice",
            )

    def bind(self, wiring: ExchangeContext) -> ExchangeState:
        """Whatever the sizes say."""
        return self.choose(wiring).bind(wiring)

    def choose(self, wiring: ExchangeContext) -> Exchange:
        """`Gather` or the reduce-scatter."""
        workers = wiring.workers
        received_bytes = (workers - 1) * wiring.codec.bind(wiring.layout).nbytes
        if workers <= self.few or received_bytes <= 4 * wiring.layout.numel:
            return Gather()
        return self.otherwise
