"""What accelerators can do at most: floating-point operations a second, dense, bf16, one device.

Sparsity, which data sheets like to count, is not in it, nor is a clock above the sheet's.

Source: the makers' data sheets. NVIDIA: A100, A30, A10, L4, L40, L40S, H100, H200, HGX B200 and
B300, GB200, GB300, and the Ampere, Ada and Blackwell white papers for RTX (bf16 summed in fp32);
half of the figure wherever only the one with sparsity is printed. AMD: Instinct MI250X, MI300A,
MI300X, MI325X, MI350X, MI355X.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import final

from thinwire.errors import ConfigurationError

__all__ = ["ACCELERATORS", "Accelerator", "accelerator"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A device.

    Args:
        name: as its maker writes it.
        flops_per_s: peak, dense, bf16.
    """

    name: str
    flops_per_s: float


_TFLOPS_PER_S: Mapping[str, float] = {
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

ACCELERATORS: tuple[Accelerator, ...] = tuple(
    Accelerator(name=name, flops_per_s=tflops * 1e12) for name, tflops in _TFLOPS_PER_S.items()
)
"""All that are known; an H100 or H200 without a word more is the SXM one."""


def accelerator(name: str) -> Accelerator:
    """The accelerator called `name`; capitals, spaces and dashes do not matter.

    Args:
        name: without its maker's.

    Raises:
        ConfigurationError: it is not known here.

    >>> accelerator("h100-nvl").flops_per_s
    835500000000000.0
    """
    known = {_plain(device.name): device for device in ACCELERATORS}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    close = get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f" (the closest is {known[close[0]].name})" if close else ""
    raise ConfigurationError(
        f"plan for accelerator {name!r}",
        because="its peak is not known here",
        do=f"measure a step and pass --step-time, or pass one of "
        f"{', '.join(device.name for device in ACCELERATORS)}{hint}",
    )


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
