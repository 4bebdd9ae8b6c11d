"""Transports: how payloads get from one worker to the others."""

from typing import TYPE_CHECKING, Any

from thinwire.transport.base import (
    AllGather,
    AllToAll,
    Announce,
    Request,
    Requests,
    Round,
    RoundTag,
    SharedAnswer,
    Swap,
    ToCaller,
    Transport,
    attempt,
)
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.in_process import in_process
from thinwire.transport.metered import Metered, TransportCounters
from thinwire.transport.rendezvous import Rendezvous, default_transport
from thinwire.transport.replicated import ReplicatedRanks

if TYPE_CHECKING:
    # The room of elastic runs imports this one.
    from thinwire.elastic.transport import Elastic as Elastic
    from thinwire.elastic.transport import ElasticOptions as ElasticOptions

__all__ = [
    "AllGather",
    "AllToAll",
    "Announce",
    "Distributed",
    "Elastic",
    "ElasticOptions",
    "Metered",
    "Rendezvous",
    "ReplicatedRanks",
    "Request",
    "Requests",
    "Round",
    "RoundTag",
    "SharedAnswer",
    "Swap",
    "ToCaller",
    "Transport",
    "TransportCounters",
    "attempt",
    "default_transport",
    "in_process",
    "naming_failures",
]


def __getattr__(name: str) -> Any:
    # Elastic runs bring servers and torchft along: only a script that names them loads them.
    if name in ("Elastic", "ElasticOptions"):
        from importlib import import_module

        return getattr(import_module("thinwire.elastic.transport"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
