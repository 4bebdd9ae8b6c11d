"""A worker's computation: inner steps, and encoding and decoding messages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from thinwire.errors import check, unknown_name

# fmt: off
PEAK_TFLOPS_PER_S: Final[Mapping[str, float]] = {
    "A10": 125, "A30": 165, "A100": 312, "L4": 121, "L40": 181, "L40S": 362,
    "H100": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H200": 989.4, "H200 NVL": 835.5,
    "GH200": 989.4, "B200": 2250, "B300": 2250, "GB200": 2500, "GB300": 2500,
    "RTX 3090": 71, "RTX 4090": 165.2, "RTX 5090": 209.5, "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "MI250X": 383, "MI300A": 980.6, "MI300X": 1307.4, "MI325X": 1307.4, "MI350X": 2306.9,
    "MI355X": 2516.6,
}
# fmt: on
"""Dense bf16 teraflop/s of one device, without sparsity, by the maker's name; "H100" and "H200" are
SXM modules.

Source: the makers' data sheets. NVIDIA: A100, A30, A10, L4, L40, L40S, H100, H200, HGX B200 and
B300, GB200, GB300, and the Ampere, Ada and Blackwell white papers for RTX (bf16 summed in fp32);
half of the figure wherever only the one with sparsity is printed. AMD: Instinct MI250X, MI300A,
MI300X, MI325X, MI350X, MI355X.
"""


def peak_flops_per_s(name: str) -> float:
    """The peak flop/s of the accelerator called `name`; case, spaces and dashes do not matter.

    Args:
        name: name without that of the maker.

    Raises:
        ConfigurationError: an unknown accelerator.

    >>> peak_flops_per_s("h100-nvl")
    835500000000000.0
    """
    peaks = {_plain(known): tflops_per_s for known, tflops_per_s in PEAK_TFLOPS_PER_S.items()}
    if _plain(name) in peaks:
        return peaks[_plain(name)] * 1e12
    what, because = PEAK_TFLOPS_PER_S, "its peak is not known"
    do = "measure a step and pass --step-time, or pass one of " + ", ".join(PEAK_TFLOPS_PER_S)
    raise unknown_name(f"plan for accelerator {name!r}", name, what, because=because, do=do)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """One inner step of a worker, and seconds per parameter to encode and decode its messages.

    `benchmarks/bench.py codecs` measures the latter.

    Args:
        step_s: time for forward, backward and the inner optimizer.
        encode_s_per_parameter: time to encode, with error feedback.
        decode_s_per_parameter: time to decode one worker's payload; the benchmark measures all
            workers' payloads together.
        outer_s_per_parameter: time for the outer optimizer and the merge.

    Raises:
        ConfigurationError: step_s is not above 0 or not finite.
    """

    step_s: float
    encode_s_per_parameter: float = 0.0
    decode_s_per_parameter: float = 0.0
    outer_s_per_parameter: float = 0.0

    def __post_init__(self) -> None:
        because, do = "it must be above 0 s and finite", "pass a finite step time above 0 s"
        what = f"plan with steps of {self.step_s:g} s"
        check(0 < self.step_s < math.inf, what, because=because, do=do)

    @classmethod
    def of_flops(
        cls, parameters: float, tokens: float, flops_per_s: float, mfu: float
    ) -> "Compute":
        """A step of 6 N D floating-point operations: step_s = 6 N D / (flops_per_s mfu).

        Args:
            parameters: N.
            tokens: D, tokens of one worker in one step.
            flops_per_s: peak of all of a worker's accelerators together.
            mfu: share of the peak that training reaches, in (0, 1].

        >>> Compute.of_flops(1e9, 1e6, 1e15, 0.5).step_s
        12.0
        """
        return cls(step_s=6 * parameters * tokens / (flops_per_s * mfu))
