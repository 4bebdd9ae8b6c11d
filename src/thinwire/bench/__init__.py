"""Speed on this machine, as ratios against a named baseline in the same run."""

from thinwire.bench.codecs import CodecReport, CodecTimes, codecs
from thinwire.bench.outer_step import outer_step
from thinwire.bench.result import BenchReport, BenchResult, BenchTable, compare_alternating
from thinwire.bench.simulation import simulation, stacked_simulation

__all__ = [
    "BenchReport",
    "BenchResult",
    "BenchTable",
    "CodecReport",
    "CodecTimes",
    "codecs",
    "compare_alternating",
    "outer_step",
    "simulation",
    "stacked_simulation",
]
