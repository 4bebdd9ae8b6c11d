"""Comparisons one can defend: a grid of runs at equal tokens, searched alike, over several seeds.

experiment    what is compared (an Experiment) and how its rates may be tuned
grid          the rows of a comparison, and the configuration of each run
runners       which runs are missing, and how they are carried out, one after the other
parallel      several runs at a time, each in a process of its own
comparison    the same search for every row, and all of it together

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
