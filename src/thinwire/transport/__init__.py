"""Transports: how payloads get from one worker to the others."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigurationError
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
    SharedAnswer,
    Transport,
    WrappedTransport,
    attempt,
    to_all,
    wrapped,
)
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.in_process import in_process
from thinwire.transport.metered import Metered, TransportCounters
from thinwire.transport.rendezvous import Rendezvous
from thinwire.transport.replicated import ReplicatedRanks
from thinwire.transport.sealed import Sealed, sealed_by_default

if TYPE_CHECKING:
    from thinwire.elastic.timeouts import ElasticOptions as ElasticOptions
    from thinwire.elastic.transport import Elastic as Elastic


def __getattr__(name: str) -> Any:
    # The room of elastic runs imports this one, and brings obstore along.
    if name == "ElasticOptions":
        return import_module("thinwire.elastic.timeouts").ElasticOptions
    if name == "ElasticBucket":
        warnings.warn("ElasticBucket is Elastic from 0.3 on", DeprecationWarning, stacklevel=2)
    if name == "default_transport":
        warnings.warn("default_transport is tw.connect", DeprecationWarning, stacklevel=2)
        return import_module("thinwire.address").connect
    if name in ("Elastic", "ElasticBucket"):
        return import_module("thinwire.elastic.transport").Elastic
    if name == "Bucket":
        raise ConfigurationError(
            "exchange over tw.transport.Bucket",
            because="a fixed number of workers meet by Elastic from 0.3 on",
            do="write Elastic(URL, run=NAME, workers=K, worker=k) in place of "
            "Bucket(URL, run=NAME, workers=K, rank=k)",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Distributed",
    "Elastic",
    "ElasticOptions",
    "Metered",
    "Post",
    "Posts",
    "Received",
    "Rendezvous",
    "ReplicatedRanks",
    "Round",
    "RoundTag",
    "RunningExchange",
    "Sealed",
    "SharedAnswer",
    "Transport",
    "TransportCounters",
    "WrappedTransport",
    "attempt",
    "in_process",
    "naming_failures",
    "sealed_by_default",
    "to_all",
    "wrapped",
]
