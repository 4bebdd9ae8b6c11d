"""Comparisons one can defend: a grid of runs at equal tokens, searched alike, over several seeds.

description    what is compared (an Experiment) and how it may be tuned
arms           its rows
records        of a run's folder, read and checked
standing       what a run folder holds, by these records
comparable     what runs must have in common to be compared
runs           carries runs out, here or side by side
tuning         the same search for every row
statistics     means, standard errors, paired differences
comparison     all of it together
"""

from thinwire.experiments.comparison import Comparison, Row, compare
from thinwire.experiments.description import Experiment, Settings, Tuning, find, product
from thinwire.experiments.runs import InTurn, Runner
from thinwire.experiments.side_by_side import SideBySide
from thinwire.experiments.standing import Standing, State
from thinwire.experiments.statistics import Estimate, estimate, paired_difference, standard_error

__all__ = [
    "Comparison",
    "Estimate",
    "Experiment",
    "InTurn",
    "Row",
    "Runner",
    "Settings",
    "SideBySide",
    "Standing",
    "State",
    "Tuning",
    "compare",
    "estimate",
    "find",
    "paired_difference",
    "product",
    "standard_error",
]
