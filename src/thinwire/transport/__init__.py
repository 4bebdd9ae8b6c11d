"""Transports: how payloads get from one worker to the others."""

from typing import TYPE_CHECKING, Any

from thinwire.transport.base import (
    Inspect,
    Label,
    Pending,
    Phase,
    Reduce,
    RoundPlan,
    Transport,
    accept_all,
)
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.in_process import in_process
from thinwire.transport.metered import Metered, TransportCounters

if TYPE_CHECKING:
    from thinwire.elastic.transport import Elastic, ElasticOptions

__all__ = [
    "Distributed",
    "Elastic",
    "ElasticOptions",
    "Inspect",
    "Label",
    "Metered",
    "Pending",
    "Phase",
    "Reduce",
    "RoundPlan",
    "Transport",
    "TransportCounters",
    "accept_all",
    "in_process",
    "naming_failures",
]


def __getattr__(name: str) -> Any:
    # Elastic runs bring servers and torchft with them: only who uses them loads them.
    if name in ("Elastic", "ElasticOptions"):
        from thinwire.elastic import transport

        return getattr(transport, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
