"""Speed on this machine, as ratios against a named baseline in the same run."""

from thinwire.bench.codecs import CodecReport, CodecTimes, codecs
from thinwire.bench.outer_step import outer_step
from thinwire.bench.result import Report, Result, Table, compare_alternating
from thinwire.bench.simulation import simulation, stacked_simulation

__all__ = [
    "CodecReport",
    "CodecTimes",
    "Report",
    "Result",
    "Table",
    "codecs",
    "compare_alternating",
    "outer_step",
    "simulation",
    "stacked_simulation",
]
