"""What a worker computes: inner steps, and the coding of what it sends and receives."""

import math
from dataclasses import dataclass
from typing import final

from thinwire.errors import ConfigurationError

__all__ = ["Coding", "Compute"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """One inner step of a worker of normal speed.

    Args:
        step_s: forward, backward and the inner optimizer.
        forward_share: of it; the rest is backward.

    Raises:
        ConfigurationError: a step of no time or of infinite time, or a share outside of [0, 1].

    >>> Compute(step_s=0.8).forward_share
    0.3333333333333333
    """

    step_s: float
    forward_share: float = 1 / 3

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            raise ConfigurationError(
                f"plan with steps of {self.step_s:g} s",
                because="utilisation is the share of the time in which steps are computed",
                do="pass a step time above 0 s",
            )
        if not 0 <= self.forward_share <= 1:
            raise ConfigurationError(
                f"plan with {self.forward_share:g} of a step spent forward",
                because="it is a share",
                do="pass forward_share from 0 to 1; a third if backward costs twice as much",
            )

    @classmethod
    def of_flops(
        cls, parameters: float, tokens: float, flops_per_s: float, mfu: float
    ) -> "Compute":
        """A step of 6 N D floating-point operations: step_s = 6 N D / (flops_per_s mfu).

        Args:
            parameters: N.
            tokens: D, of one worker in one step.
            flops_per_s: at the accelerator's peak; of all accelerators of a worker.
            mfu: share of the peak that training reaches, in (0, 1].

        Raises:
            ConfigurationError: a quantity that is not above 0, or an `mfu` above 1.

        >>> Compute.of_flops(1e9, 1e6, 1e15, 0.5).step_s
        12.0
        """
        if not (min(parameters, tokens, flops_per_s) > 0 and 0 < mfu <= 1):
            raise ConfigurationError(
                f"work out the time of a step from {parameters:g} parameters, {tokens:g} tokens, "
                f"{flops_per_s:g} flop/s and an MFU of {mfu:g}",
                because="all of them are above 0, and the MFU is at most 1",
                do="correct the one that is not",
            )
        return cls(step_s=6 * parameters * tokens / (flops_per_s * mfu))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """What it takes to make messages and to use them: `thinwire bench codecs` measures it.

    Args:
        encode_s_per_parameter: with error feedback.
        decode_s_per_parameter: of one worker's payload; the benchmark has that of all workers'
            together.
        outer_s_per_parameter: for all that follows once: the outer optimizer and the merge.

    Raises:
        ConfigurationError: a time that is negative or infinite.

    >>> Coding(encode_s_per_parameter=1e-9).encode_s(5e9)
    5.0
    """

    encode_s_per_parameter: float = 0.0
    decode_s_per_parameter: float = 0.0
    outer_s_per_parameter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("encode", "decode", "outer"):
            seconds: float = getattr(self, f"{name}_s_per_parameter")
            if not 0 <= seconds < math.inf:
                raise ConfigurationError(
                    f"plan with {name}_s_per_parameter={seconds:g}",
                    because="it is a time",
                    do="pass 0 or more, as measured by thinwire bench codecs",
                )

    def encode_s(self, parameters: float) -> float:
        """For the messages of a pseudo-gradient."""
        return self.encode_s_per_parameter * parameters

    def decode_s(self, parameters: float, payloads: float = 1) -> float:
        """For `payloads` of `parameters` each, and their mean."""
        return self.decode_s_per_parameter * parameters * payloads

    def outer_s(self, parameters: float) -> float:
        """For the outer step of `parameters`."""
        return self.outer_s_per_parameter * parameters
