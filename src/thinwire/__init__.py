"""Pre-train language models over thin wires."""

from thinwire import codecs, inner, optim, outer, presets, transport
from thinwire.aggregate import MeanOverWorkers
from thinwire.agreement import digest
from thinwire.errors import (
    CheckpointError,
    ConfigurationError,
    CorpusError,
    ExchangeError,
    ExchangeTimeout,
    MismatchError,
    NonFiniteError,
    ThinwireError,
)
from thinwire.feedback import NoFeedback
from thinwire.fragments import Fragment, Whole
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop, Stats
from thinwire.version import __version__

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "CorpusError",
    "ExchangeError",
    "ExchangeTimeout",
    "Fragment",
    "MeanOverWorkers",
    "Method",
    "MismatchError",
    "NoFeedback",
    "NonFiniteError",
    "OuterLoop",
    "Stats",
    "ThinwireError",
    "Whole",
    "__version__",
    "codecs",
    "digest",
    "inner",
    "optim",
    "outer",
    "presets",
    "transport",
]
