"""Comparisons: a grid of runs at equal tokens, with the same search for rates, over several seeds.

experiment    an Experiment, and the search for its rates
grid          the rows of a comparison, and the configuration of each run
runners       carry out the missing runs, one after the other
parallel      carries out several runs at a time, in processes
comparison    the search, the rows and their differences

`thinwire.runs` reads run folders.
"""

from thinwire.experiments.comparison import Comparison, compare
from thinwire.experiments.experiment import Experiment, Rates, Tuning, load_experiment, product

__all__ = ["Comparison", "Experiment", "Rates", "Tuning", "compare", "load_experiment", "product"]
