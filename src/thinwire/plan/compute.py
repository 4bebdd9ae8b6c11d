"""What a worker computes: inner steps, and the coding of what it sends and receives."""

import math
from dataclasses import dataclass

from thinwire.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """One inner step of a worker.

    Args:
        step_s: forward, backward and the inner optimizer.

    Raises:
        ConfigurationError: a step of no time or of infinite time.
    """

    step_s: float

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            raise ConfigurationError(
                f"plan with steps of {self.step_s:g} s",
                because="it must be above 0 s and finite",
                do="pass a finite step time above 0 s",
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
            ConfigurationError: a quantity of 0 or less, or an `mfu` above 1.

        >>> Compute.of_flops(1e9, 1e6, 1e15, 0.5).step_s
        12.0
        """
        if not (min(parameters, tokens, flops_per_s) > 0 and 0 < mfu <= 1):
            raise ConfigurationError(
                f"work out the time of a step from {parameters:g} parameters, {tokens:g} tokens, "
                f"{flops_per_s:g} flop/s and an MFU of {mfu:g}",
                because="each must be above 0, and the MFU at most 1",
                do="correct the number that is not",
            )
        return cls(step_s=6 * parameters * tokens / (flops_per_s * mfu))


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """Seconds to make messages and to use them: `benchmarks/bench.py codecs` measures them.

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
                    because="it is a time in seconds, and cannot be negative or infinite",
                    do="pass 0 or more, as measured by benchmarks/bench.py codecs",
                )

    def encode_s(self, parameters: float) -> float:
        """Seconds to encode the messages of a pseudo-gradient."""
        return self.encode_s_per_parameter * parameters

    def decode_s(self, parameters: float, payloads: float = 1) -> float:
        """Seconds to decode `payloads` of `parameters` each, and to average them."""
        return self.decode_s_per_parameter * parameters * payloads

    def outer_s(self, parameters: float) -> float:
        """Seconds of the outer step of `parameters`."""
        return self.outer_s_per_parameter * parameters
