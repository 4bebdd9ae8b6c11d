"""Outer optimizers: how a round moves the outer parameters."""

from thinwire.outer.base import OuterOptimizer, OuterState
from thinwire.outer.direct import Direct
from thinwire.outer.displacement import SGD, AdamW
from thinwire.outer.per_workers import PerWorkers

__all__ = ["SGD", "AdamW", "Direct", "OuterOptimizer", "OuterState", "PerWorkers"]
