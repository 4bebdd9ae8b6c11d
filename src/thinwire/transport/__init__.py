"""Transports: how payloads get from one worker to the others."""

from typing import TYPE_CHECKING

from thinwire.lazy_exports import lazy_exports
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
    WrappedTransport,
    attempt,
)
from thinwire.transport.in_process import in_process
from thinwire.transport.metered import Metered, TransportCounters

if TYPE_CHECKING:
    # The room of elastic runs imports this one.
    from thinwire.elastic.bucket.transport import ElasticBucket as ElasticBucket
    from thinwire.elastic.transport import Elastic as Elastic
    from thinwire.elastic.transport import ElasticOptions as ElasticOptions
    from thinwire.transport.bucket import Bucket
    from thinwire.transport.distributed import Distributed, naming_failures
    from thinwire.transport.rendezvous import Rendezvous, default_transport
    from thinwire.transport.replicated import ReplicatedRanks
    from thinwire.transport.sealed import Sealed, sealed_by_default
else:
    # Elastic runs bring servers and torchft along, the others process groups: only a script that
    # names them loads them.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "thinwire.elastic.bucket.transport": ("ElasticBucket",),
            "thinwire.elastic.transport": ("Elastic", "ElasticOptions"),
            "thinwire.transport.bucket": ("Bucket",),
            "thinwire.transport.distributed": ("Distributed", "naming_failures"),
            "thinwire.transport.rendezvous": ("Rendezvous", "default_transport"),
            "thinwire.transport.replicated": ("ReplicatedRanks",),
            "thinwire.transport.sealed": ("Sealed", "sealed_by_default"),
        },
    )

__all__ = [
    "AllGather",
    "AllToAll",
    "Announce",
    "Bucket",
    "Distributed",
    "Elastic",
    "ElasticBucket",
    "ElasticOptions",
    "Metered",
    "Rendezvous",
    "ReplicatedRanks",
    "Request",
    "Requests",
    "Round",
    "RoundTag",
    "Sealed",
    "SharedAnswer",
    "Swap",
    "ToCaller",
    "Transport",
    "TransportCounters",
    "WrappedTransport",
    "attempt",
    "default_transport",
    "in_process",
    "naming_failures",
    "sealed_by_default",
]
