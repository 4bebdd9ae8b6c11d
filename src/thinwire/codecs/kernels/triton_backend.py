"""Triton's kernels for NVIDIA GPUs: which of them a description gets."""

import torch
import triton
from triton import knobs

from thinwire.codecs.kernels.base import (
    AffineSpec,
    E3M0Spec,
    KernelSpec,
    RowKernel,
    TableSpec,
    TopKSpec,
)
from thinwire.codecs.kernels.triton_e3m0 import TritonE3M0
from thinwire.codecs.kernels.triton_quantise import TritonAffine, TritonTable, supports_grid
from thinwire.codecs.kernels.triton_topk import TritonTopK

NAME = f"triton {triton.__version__}"

_OLDEST = (3, 6)


def supports(device: torch.device) -> bool:
    """Whether kernels run there: on NVIDIA GPUs, and where TRITON_INTERPRET=1 is set, on CPUs.

    Before 3.6 Triton's divisions and roots take subnormal numbers for 0, so other bytes come out.

    >>> supports(torch.device("meta"))
    False
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST:
        return False
    if device.type == "cpu":
        return knobs.runtime.interpret
    return device.type == "cuda" and torch.version.hip is None


def build(spec: KernelSpec, device: torch.device) -> RowKernel | None:
    """The kernel for a description; Triton compiles it for each GPU when it is first called.

    Returns:
        None for a k that is not a power of two from 16 to 2048, and for grids of other packages.

    >>> build(TopKSpec(k=100, two_levels=True, nbytes=124), torch.device("cuda")) is None
    True
    """
    del device
    match spec:
        case TopKSpec() if TritonTopK.supports(spec):
            return TritonTopK(spec)
        case TableSpec(grid=grid) if supports_grid(grid):
            return TritonTable(spec)
        case AffineSpec(grid=grid) if supports_grid(grid):
            return TritonAffine(spec)
        case E3M0Spec():
            return TritonE3M0()
        case _:
            return None
