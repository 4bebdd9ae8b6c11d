"""The inner learning rate over a run."""

import math
from dataclasses import dataclass

from thinwire.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """Linear from 0 to 1 over the warm-up, then half a cosine down to `final_fraction`.

    Args:
        warmup_steps: inner steps of warm-up; two to four rounds suit DiLoCo.
        final_fraction: what is left of the learning rate at the end.

    Source: the schedules of DiLoCo (arXiv 2311.08105) and MuLoCo (arXiv 2505.23725).

    >>> [round(WarmupCosine(warmup_steps=2).factor(t, steps=4), 2) for t in range(4)]
    [0.5, 1.0, 0.55, 0.1]
    """

    warmup_steps: int = 20
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0.0 <= self.final_fraction <= 1.0:
            raise ConfigurationError(
                f"warm up for {self.warmup_steps} steps and decay to {self.final_fraction}",
                because="a warm-up is not negative and a fraction lies between 0 and 1",
                do="pass warmup_steps >= 0 and 0 <= final_fraction <= 1",
            )

    def factor(self, step: int, *, steps: int) -> float:
        """The factor on the learning rate of inner step `step` (from 0) out of `steps`."""
        t = step + 1
        if t <= self.warmup_steps:
            return t / self.warmup_steps
        progress = min(1.0, (t - self.warmup_steps) / max(1, steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )
