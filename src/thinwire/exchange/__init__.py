"""Exchanges: how the workers' pseudo-gradients become one mean that all of them hold.

gather          everyone sends its payload to everyone: K - 1 payloads received, encoded once
reduce-scatter  everyone sends each shard to its owner, who combines, encodes again and sends the
                result to everyone: two payloads' worth received, encoded twice
"""

from thinwire.exchange.automatic import Automatic
from thinwire.exchange.base import (
    Exchange,
    ExchangeContext,
    ExchangeState,
    InFlight,
    Pattern,
    Place,
    RoundResult,
)
from thinwire.exchange.gather import Gather
from thinwire.exchange.reduce_scatter import ReduceScatter

__all__ = [
    "Automatic",
    "Exchange",
    "ExchangeContext",
    "ExchangeState",
    "Gather",
    "InFlight",
    "Pattern",
    "Place",
    "ReduceScatter",
    "RoundResult",
]
