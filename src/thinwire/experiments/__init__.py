"""Comparisons: a grid of runs at equal tokens, with the same search for rates, over several seeds.

experiment    an Experiment, and the search for its rates
grid          the rows of a comparison, and the configuration of each run
runners       carry out the missing runs, one after the other
parallel      carries out several runs at a time, in processes
comparison    the search, the rows and their differences

Run folders are read by `thinwire.runs`.
"""

from thinwire.experiments.comparison import Comparison, ComparisonRow, compare
from thinwire.experiments.experiment import Experiment, Rates, Tuning, load_experiment, product
from thinwire.experiments.parallel import ParallelRunner
from thinwire.experiments.runners import Runner, SequentialRunner
from thinwire.runs.statistics import Estimate, estimate, paired_difference, standard_error
from thinwire.runs.status import RunState, RunStatus

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Estimate",
    "Experiment",
    "ParallelRunner",
    "Rates",
    "RunState",
    "RunStatus",
    "Runner",
    "SequentialRunner",
    "Tuning",
    "compare",
    "estimate",
    "load_experiment",
    "paired_difference",
    "product",
    "standard_error",
]
