"""The public names of `thinwire`, which imports this module at the first use of one of them."""

from thinwire import codecs, inner, optim, outer, presets, transport
from thinwire.address import connect
from thinwire.aggregate import (
    ClipNorms,
    DropOutliers,
    MeanOverSenders,
    MeanOverWorkers,
    MedianNormClip,
    TrimmedMean,
)
from thinwire.errors import (
    CheckpointError,
    ConfigurationError,
    CorpusError,
    ExchangeError,
    ExchangeTimeout,
    LossyReduceScatterWarning,
    MismatchError,
    NonFiniteError,
    SameWorkWarning,
    ThinwireError,
)
from thinwire.exchange import Automatic, Gather, Pairs, ReduceScatter
from thinwire.feedback import DecoupledMomentum, ErrorFeedback, NoFeedback
from thinwire.fragments import At, Balanced, ByModule, Fragment, Sequential, Spread, Strided, Whole
from thinwire.handshake import digest
from thinwire.method import Method
from thinwire.outer import Delay, Eager
from thinwire.outer_loop import OuterLoop, Stats
from thinwire.version import __version__

__all__ = [
    "At",
    "Automatic",
    "Balanced",
    "ByModule",
    "CheckpointError",
    "ClipNorms",
    "ConfigurationError",
    "CorpusError",
    "DecoupledMomentum",
    "Delay",
    "DropOutliers",
    "Eager",
    "ErrorFeedback",
    "ExchangeError",
    "ExchangeTimeout",
    "Fragment",
    "Gather",
    "LossyReduceScatterWarning",
    "MeanOverSenders",
    "MeanOverWorkers",
    "MedianNormClip",
    "Method",
    "MismatchError",
    "NoFeedback",
    "NonFiniteError",
    "OuterLoop",
    "Pairs",
    "ReduceScatter",
    "SameWorkWarning",
    "Sequential",
    "Spread",
    "Stats",
    "Strided",
    "ThinwireError",
    "TrimmedMean",
    "Whole",
    "__version__",
    "codecs",
    "connect",
    "digest",
    "inner",
    "optim",
    "outer",
    "presets",
    "transport",
]
