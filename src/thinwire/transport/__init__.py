"""Transports: how payloads get from one worker to the others."""

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


# Imported late, because these modules import this package.
_LATE = {
    "Elastic": "thinwire.elastic.transport:Elastic",
    "ElasticOptions": "thinwire.elastic.timeouts:ElasticOptions",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
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
