"""Transports: how payloads get from one worker to the others."""

from thinwire.transport.base import Label, Pending, Reduce, Transport
from thinwire.transport.distributed import Distributed, naming_failures
from thinwire.transport.in_process import in_process
from thinwire.transport.meter import Metered, Traffic

__all__ = [
    "Distributed",
    "Label",
    "Metered",
    "Pending",
    "Reduce",
    "Traffic",
    "Transport",
    "in_process",
    "naming_failures",
]
