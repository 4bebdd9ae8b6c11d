"""Codecs: what a vector of numbers looks like on the wire."""

from thinwire.codecs.base import Codec
from thinwire.codecs.cast import CastBF16, CastFP16
from thinwire.codecs.identity import Identity

__all__ = ["CastBF16", "CastFP16", "Codec", "Identity"]
