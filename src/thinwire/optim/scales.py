"""Length of an orthogonal update, by the shape of the matrix."""

import math
from collections.abc import Callable


def _spectral(fan_out: int, fan_in: int) -> float:
    return math.sqrt(fan_out / fan_in)


def _rms(fan_out: int, fan_in: int) -> float:
    return 0.2 * math.sqrt(max(fan_out, fan_in))


SCALES: dict[str, Callable[[int, int], float]] = {"spectral": _spectral, "rms": _rms}
"""The length of an update by its name, given fan_out and fan_in."""
