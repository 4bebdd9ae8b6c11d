"""Transports: how payloads get from one worker to the others."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    SharedAnswer,
    Transport,
    WrappedTransport,
    attempt,
    to_all,
    wrapped,
)
from thinwire.transport.bucket import Bucket
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.in_process import in_process
from thinwire.transport.metered import Metered, TransportCounters
from thinwire.transport.rendezvous import Rendezvous, default_transport
from thinwire.transport.replicated import ReplicatedRanks
from thinwire.transport.sealed import Sealed, sealed_by_default

if TYPE_CHECKING:
    from thinwire.elastic.bucket.transport import ElasticBucket as ElasticBucket
    from thinwire.elastic.transport import Elastic as Elastic
    from thinwire.elastic.transport import ElasticOptions as ElasticOptions


def __getattr__(name: str) -> Any:
    # The room of elastic runs imports this one, and brings servers and torchft along.
    if name == "ElasticBucket":
        return import_module("thinwire.elastic.bucket.transport").ElasticBucket
    if name in ("Elastic", "ElasticOptions"):
        return getattr(import_module("thinwire.elastic.transport"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Bucket",
    "Distributed",
    "Elastic",
    "ElasticBucket",
    "ElasticOptions",
    "Metered",
    "Post",
    "Posts",
    "Received",
    "Rendezvous",
    "ReplicatedRanks",
    "Round",
    "RoundTag",
    "Sealed",
    "SharedAnswer",
    "Transport",
    "TransportCounters",
    "WrappedTransport",
    "attempt",
    "default_transport",
    "in_process",
    "naming_failures",
    "sealed_by_default",
    "to_all",
    "wrapped",
]
