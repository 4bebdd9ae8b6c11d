"""Speed on this machine, as ratios against a named baseline in the same run."""

from thinwire.bench.outer_step import outer_step
from thinwire.bench.result import Result, compare_alternating
from thinwire.bench.simulation import simulation

__all__ = ["Result", "compare_alternating", "outer_step", "simulation"]
