"""Transports: how payloads get from one worker to the others."""

import warnings
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from thinwire.transport.base import (
    Post,
    Posts,
    RoundTag,
    RunningExchange,
    Transport,
    WrappedTransport,
    to_all,
    wrapped,
)
from thinwire.transport.distributed import Distributed
from thinwire.transport.in_process import in_process
from thinwire.transport.rendezvous import Rendezvous
from thinwire.transport.sealed import Sealed

if TYPE_CHECKING:
    from thinwire.elastic.timeouts import ElasticOptions as ElasticOptions
    from thinwire.elastic.transport import Elastic as Elastic


# The first two import this room; the others are names of earlier versions.
_LATE = {
    "Elastic": "thinwire.elastic.transport:Elastic",
    "ElasticOptions": "thinwire.elastic.timeouts:ElasticOptions",
    "ElasticBucket": "thinwire.elastic.transport:Elastic",
    "default_transport": "thinwire.address:connect",
}
_RENAMED = {"ElasticBucket": "Elastic", "default_transport": "tw.connect"}


def __getattr__(name: str) -> Any:
    if name == "Bucket":
        raise AttributeError("Bucket is Elastic(URL, run=NAME, workers=K, worker=k) from 0.3 on")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _RENAMED:
        warnings.warn(f"{name} is {_RENAMED[name]} from 0.3 on", DeprecationWarning, stacklevel=2)
    return resolve_name(_LATE[name])


__all__ = [
    "Distributed",
    "Elastic",
    "ElasticOptions",
    "Post",
    "Posts",
    "Rendezvous",
    "RoundTag",
    "RunningExchange",
    "Sealed",
    "Transport",
    "WrappedTransport",
    "in_process",
    "to_all",
    "wrapped",
]
