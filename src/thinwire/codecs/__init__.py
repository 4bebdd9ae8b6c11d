"""Codecs: what a vector of numbers looks like on the wire."""

from thinwire.codecs.base import Codec, Coder
from thinwire.codecs.elementwise import CastBF16, CastFP16, Identity
from thinwire.codecs.grids import Grid, Linear, MidRise, Statistical
from thinwire.codecs.groups import Blocks, Chunks, Groups, Rows, Tensors
from thinwire.codecs.per_role import PerRole
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.registry import from_id, register
from thinwire.codecs.rounding import Nearest, Rounding, Stochastic
from thinwire.codecs.sparse import RandomK, TopK, k_for_density
from thinwire.codecs.values import BF16, F32, SignLevels, SignMean, Values

__all__ = [
    "BF16",
    "E3M0",
    "F32",
    "Blocks",
    "CastBF16",
    "CastFP16",
    "Chunks",
    "Codec",
    "Coder",
    "Grid",
    "Groups",
    "Identity",
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
    "Tensors",
    "TopK",
    "Values",
    "from_id",
    "k_for_density",
    "register",
]
