"""Kernels: row formats in one pass over memory, with the bytes of the plain torch path."""

from thinwire.codecs.kernels.backends import VARIABLE, find_kernel, kernel_backend
from thinwire.codecs.kernels.base import (
    AffineSpec,
    E3M0Spec,
    KernelSpec,
    RowKernel,
    TableSpec,
    TopKSpec,
)

__all__ = [
    "VARIABLE",
    "AffineSpec",
    "E3M0Spec",
    "KernelSpec",
    "RowKernel",
    "TableSpec",
    "TopKSpec",
    "find_kernel",
    "kernel_backend",
]
