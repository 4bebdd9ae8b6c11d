"""Outer optimizers: how a round moves the outer parameters, and when."""

from thinwire.outer.base import OuterOptimizer
from thinwire.outer.direct import Direct
from thinwire.outer.displacement import SGD, AdamW
from thinwire.outer.overlap import Delay, Eager, Overlap
from thinwire.outer.per_workers import PerWorkers
from thinwire.outer.state import OuterState, Seat

__all__ = [
    "SGD",
    "AdamW",
    "Delay",
    "Direct",
    "Eager",
    "OuterOptimizer",
    "OuterState",
    "Overlap",
    "PerWorkers",
    "Seat",
]
