"""What accelerators can do at most: floating-point operations a second, dense, bf16, one device.

Sparsity, which data sheets like to count, is not in it, nor is a clock above the sheet's.

Source: the makers' data sheets. NVIDIA: A100, A30, A10, L4, L40, L40S, H100, H200, HGX B200 and
B300, GB200, GB300, and the Ampere, Ada and Blackwell white papers for RTX (bf16 summed in fp32);
half of the figure wherever only the one with sparsity is printed. AMD: Instinct MI250X, MI300A,
MI300X, MI325X, MI350X, MI355X.
"""

from collections.abc import Mapping
from typing import Final

from thinwire.errors import unknown_name

PEAK_TFLOPS_PER_S: Final[Mapping[str, float]] = {
    "A10": 125,
    "A30": 165,
    "A100": 312,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "GH200": 989.4,
    "B200": 2250,
    "B300": 2250,
    "GB200": 2500,
    "GB300": 2500,
    "RTX 3090": 71,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "MI250X": 383,
    "MI300A": 980.6,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI350X": 2306.9,
    "MI355X": 2516.6,
}
"""Tera-operations a second by name, as the maker writes it; "H100" and "H200" are SXM modules."""


def peak_flops_per_s(name: str) -> float:
    """The peak of the accelerator called `name`; capitals, spaces and dashes do not matter.

    Args:
        name: without the maker's.

    Raises:
        ConfigurationError: its peak is not known here.

    >>> peak_flops_per_s("h100-nvl")
    835500000000000.0
    """
    for known, tflops_per_s in PEAK_TFLOPS_PER_S.items():
        if _plain(known) == _plain(name):
            return tflops_per_s * 1e12
    raise unknown_name(
        f"plan for accelerator {name!r}",
        name,
        PEAK_TFLOPS_PER_S,
        because="its peak is not known here",
        do="measure a step and pass --step-time, or pass one of " + ", ".join(PEAK_TFLOPS_PER_S),
    )


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
