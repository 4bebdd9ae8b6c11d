"""Kernels: row formats in one pass over memory, with the bytes of the plain torch path."""

from thinwire.codecs.kernels.base import (
    AffineSpec,
    E3M0Spec,
    KernelSpec,
    RowKernel,
    TableSpec,
    TopKSpec,
)

__all__ = ["AffineSpec", "E3M0Spec", "KernelSpec", "RowKernel", "TableSpec", "TopKSpec"]
