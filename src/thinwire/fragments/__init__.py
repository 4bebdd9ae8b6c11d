"""Which parameters travel together, in which order of bytes, and after which inner steps."""

from thinwire.fragments.layers import Part
from thinwire.fragments.rules import (
    At,
    Balanced,
    ByModule,
    Fragment,
    Fragments,
    Offsets,
    Sequential,
    Spread,
    Strided,
    Whole,
)

__all__ = [
    "At",
    "Balanced",
    "ByModule",
    "Fragment",
    "Fragments",
    "Offsets",
    "Part",
    "Sequential",
    "Spread",
    "Strided",
    "Whole",
]
