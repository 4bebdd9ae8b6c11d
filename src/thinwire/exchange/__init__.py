"""Exchanges: from the workers' pseudo-gradients to the mean that moves an anchor.

gather          every worker sends its payload to all others: K - 1 payloads received, encoded once
reduce-scatter  every worker sends each shard to its owner, who combines, encodes again and sends
                the result to all: two payloads' worth received, encoded twice
pairs           every worker swaps with one other, drawn at random each round: one payload received
"""

from thinwire.exchange.state import (
    Automatic,
    Exchange,
    ExchangeContext,
    ExchangeState,
    Gather,
    Pairs,
    Pattern,
    ReduceScatter,
    RoundResult,
    Sizes,
)

__all__ = [
    "Automatic",
    "Exchange",
    "ExchangeContext",
    "ExchangeState",
    "Gather",
    "Pairs",
    "Pattern",
    "ReduceScatter",
    "RoundResult",
    "Sizes",
]
