"""Outer optimizers: how a round moves the outer parameters, and when."""

from thinwire.outer.base import OuterOptimizer
from thinwire.outer.by_worker_count import ByWorkerCount
from thinwire.outer.decoupled import DecoupledNesterov
from thinwire.outer.delayed_nesterov import DelayedNesterov
from thinwire.outer.gossip import Gossip
from thinwire.outer.gradient_averaging import GradientAveraging
from thinwire.outer.overlap import Delay, Eager, Overlap
from thinwire.outer.state import FragmentContext, OuterState
from thinwire.outer.torch_optimizers import SGD, AdamW, ElementwiseOptimizer

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
