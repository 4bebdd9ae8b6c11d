"""Which exchange is the cheaper one."""

from dataclasses import dataclass, field

from thinwire.aggregate import Aggregate
from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange, ExchangeContext, ExchangeState, Sizes
from thinwire.exchange.gather import Gather
from thinwire.exchange.reduce_scatter import ReduceScatter
from thinwire.fragments.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic(Exchange):
    """Gathers up to a few workers, or while what arrives is no more than the vector in fp32.

    gather receives (K - 1) B bytes for payloads of B; reduce-scatter 2 B, but encodes twice. An
    aggregate that is not elementwise is always gathered: it needs whole tensors.

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
                because="few counts workers and must be 1 or more",
                do="pass few >= 1, or ReduceScatter() to fix the choice",
            )

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state of the exchange that `choose` returns."""
        chosen = self.choose(context.codec, context.layout, context.aggregate, context.workers)
        return chosen.bind(context)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """The sizes of the exchange that `choose` returns."""
        chosen = self.choose(codec, layout, aggregate, workers)
        return chosen.sizes(codec, layout, aggregate, workers=workers, rank=rank)

    def choose(self, codec: Codec, layout: Layout, aggregate: Aggregate, workers: int) -> Exchange:
        """The exchange for so many workers: `Gather` or `otherwise`."""
        received_bytes = (workers - 1) * codec.payload_nbytes(layout)
        few = workers <= self.few or received_bytes <= 4 * layout.numel
        return Gather() if few or not aggregate.elementwise else self.otherwise
