"""Triton's kernels for NVIDIA GPUs."""

import torch
import triton
from triton import knobs

from thinwire.codecs.kernels import KernelSpec, RowKernel, triton_dense, triton_topk

NAME = f"triton {triton.__version__}"

_OLDEST = (3, 6)


def supports(device: torch.device) -> bool:
    """True for NVIDIA GPUs, and with TRITON_INTERPRET=1 for CPUs.

    Before 3.6 Triton's divisions and roots take subnormal numbers for 0, so other bytes come out.

    >>> supports(torch.device("meta"))
    False
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST:
        return False
    if device.type == "cpu":
        return knobs.runtime.interpret
    return device.type == "cuda" and torch.version.hip is None


def build(spec: KernelSpec) -> RowKernel | None:
    """The kernel for a spec; Triton compiles it for each GPU when it is first called.

    Returns:
        None for a k that is not a power of two from 16 to 2048, and for grids of other packages.

    >>> build(KernelSpec("topk", nbytes=124, number=100, two_levels=True)) is None
    True
    """
    return triton_topk.build(spec) if spec.family == "topk" else triton_dense.build(spec)
