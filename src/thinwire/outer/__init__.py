"""Outer optimizers: how a round moves the outer parameters, and when."""

from thinwire.outer.gradient_averaging import GradientAveraging
from thinwire.outer.optimizers import (
    SGD,
    AdamW,
    ByWorkerCount,
    DecoupledNesterov,
    DelayedNesterov,
    ElementwiseOptimizer,
    Gossip,
    OuterOptimizer,
)
from thinwire.outer.overlap import Delay, Eager, FragmentContext, OuterState, Overlap

__all__ = [
    "SGD",
    "AdamW",
    "ByWorkerCount",
    "DecoupledNesterov",
    "Delay",
    "DelayedNesterov",
    "Eager",
    "ElementwiseOptimizer",
    "FragmentContext",
    "Gossip",
    "GradientAveraging",
    "OuterOptimizer",
    "OuterState",
    "Overlap",
]
