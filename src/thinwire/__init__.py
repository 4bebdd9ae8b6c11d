"""Pre-train language models over thin wires."""

from typing import TYPE_CHECKING

from thinwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from thinwire import codecs, inner, optim, outer, presets, transport
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
        ThinwireError,
    )
    from thinwire.exchange import Automatic, Gather, Pairs, ReduceScatter
    from thinwire.feedback import DecoupledMomentum, ErrorFeedback, NoFeedback
    from thinwire.fragments import (
        At,
        Balanced,
        ByModule,
        Fragment,
        Sequential,
        Spread,
        Strided,
        Whole,
    )
    from thinwire.handshake import digest
    from thinwire.method import Method
    from thinwire.outer import Delay, Eager
    from thinwire.outer_loop import OuterLoop
    from thinwire.stats import Stats
    from thinwire.version import __version__
else:
    # What a command or a script does not use is not imported, least of all torch.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "thinwire.aggregate": (
                "ClipNorms",
                "DropOutliers",
                "MeanOverSenders",
                "MeanOverWorkers",
                "MedianNormClip",
                "TrimmedMean",
            ),
            "thinwire.errors": (
                "CheckpointError",
                "ConfigurationError",
                "CorpusError",
                "ExchangeError",
                "ExchangeTimeout",
                "LossyReduceScatterWarning",
                "MismatchError",
                "NonFiniteError",
                "ThinwireError",
            ),
            "thinwire.exchange": ("Automatic", "Gather", "Pairs", "ReduceScatter"),
            "thinwire.feedback": ("DecoupledMomentum", "ErrorFeedback", "NoFeedback"),
            "thinwire.fragments": (
                "At",
                "Balanced",
                "ByModule",
                "Fragment",
                "Sequential",
                "Spread",
                "Strided",
                "Whole",
            ),
            "thinwire.handshake": ("digest",),
            "thinwire.method": ("Method",),
            "thinwire.outer": ("Delay", "Eager"),
            "thinwire.outer_loop": ("OuterLoop",),
            "thinwire.stats": ("Stats",),
            "thinwire.version": ("__version__",),
        },
        modules=("codecs", "inner", "optim", "outer", "presets", "transport"),
    )

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
    "Sequential",
    "Spread",
    "Stats",
    "Strided",
    "ThinwireError",
    "TrimmedMean",
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
