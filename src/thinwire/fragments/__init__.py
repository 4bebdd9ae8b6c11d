"""Which parameters travel together, in which order of bytes, and after which inner steps."""

from thinwire.fragments.layers import Part
from thinwire.fragments.offsets import At, Offsets, Spread
from thinwire.fragments.rules import (
    Balanced,
    ByModule,
    Fragment,
    Fragments,
    Sequential,
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
