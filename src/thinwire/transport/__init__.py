"""Transports: how payloads get from one worker to the others."""

from thinwire.transport.base import (
    Convened,
    Inspect,
    Label,
    Occasion,
    Pending,
    Reduce,
    Transport,
    accept_all,
)
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.elastic import Elastic, Terms
from thinwire.transport.in_process import in_process
from thinwire.transport.meter import Metered, Traffic

__all__ = [
    "Convened",
    "Distributed",
    "Elastic",
    "Inspect",
    "Label",
    "Metered",
    "Occasion",
    "Pending",
    "Reduce",
    "Terms",
    "Traffic",
    "Transport",
    "accept_all",
    "in_process",
    "naming_failures",
]
