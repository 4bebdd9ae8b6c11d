"""Codecs: byte formats for the vectors of numbers that workers exchange."""

from thinwire.codecs.base import BoundCodec, Codec, PerRole, check_payload
from thinwire.codecs.cast import CastBF16, CastFP16, Identity
from thinwire.codecs.grouping import Blocks, Chunks, Grouping, Rows, Tensors
from thinwire.codecs.levels import (
    Levels,
    Linear,
    MidRise,
    Nearest,
    Rounding,
    Statistical,
    Stochastic,
)
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.sparse import RandomK, TopK, k_for_density
from thinwire.codecs.transforms import DCT, Hadamard, Transform
from thinwire.codecs.values import BF16, F32, SignLevels, SignMean, TensorLevels, Values

__all__ = [
    "BF16",
    "DCT",
    "E3M0",
    "F32",
    "Blocks",
    "BoundCodec",
    "CastBF16",
    "CastFP16",
    "Chunks",
    "Codec",
    "Grouping",
    "Hadamard",
    "Identity",
    "Levels",
    "Linear",
    "MidRise",
    "Nearest",
    "PerRole",
    "Quantise",
    "RandomK",
    "Rounding",
    "Rows",
    "SignLevels",
    "SignMean",
    "Statistical",
    "Stochastic",
    "TensorLevels",
    "Tensors",
    "TopK",
    "Transform",
    "Values",
    "check_payload",
    "k_for_density",
]
