"""Kernels: rows of 4096 numbers in one pass over memory, with the bytes of the plain torch path.

A backend (numba on CPUs, Triton on GPUs) is a module `<name>_backend` in this folder with `NAME`
(with its version), `supports(device)` and `build(codec)`, which returns a `RowKernel`. It is
imported when a kernel is first needed, so that no run waits for a compiler it does not use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, check, unknown_name

if TYPE_CHECKING:
    from thinwire.codecs.row_format import GroupedCodec

__all__ = ["VARIABLE", "RowKernel", "find_kernel", "kernel_backend"]

VARIABLE = "THINWIRE_KERNELS"
"""The environment variable that names the backend to use on every device."""

_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}


class RowKernel(NamedTuple):
    """Functions that encode rows of 4096 numbers to records, and add decoded records.

    A codec's `write` and `read` are the reference: bytes, residuals and means match it bit for bit.
    Kernels must not fuse a product with a sum or reorder a sum: sums are taken by halves
    (`thinwire.codecs.levels`). They keep no state between calls, and threads may call one
    concurrently. All tensors of a call are on one device. Rows of numbers (fp32 [rows, 4096]) and
    records (uint8 [rows, nbytes]) are contiguous; records may begin at any byte. Zero rows are
    fine.

    Args:
        encode: (x, out, delta, decay): x = decay * x + delta; out = records of x;
            x = x - decode(out). The product is rounded before the sum; without a delta x is
            encoded as it is, whatever the decay. The caller ensures that the sum is finite: a row
            that is not gets arbitrary bytes and residuals, but does not affect other rows.
        add: (out, records, weight, counts): out += weight * decode(r) for the records of each
            worker in turn (one at least), the product rounded first; and counts += 1 wherever a
            worker's decoded number is not zero, unless counts is None. `ExchangeError` if a record
            is invalid; `out` and `counts` are then unusable.
        largest: (records): a bound on |decoded number| found without decoding: the largest level of
            the records, infinite or NaN if any level is; 0 for no rows. `ExchangeError` as above.
            The field is None where torch reads the levels of records just as fast.
    """

    encode: Callable[[Tensor, Tensor, Tensor | None, float], None]
    add: Callable[[Tensor, Sequence[Tensor], float, Tensor | None], None]
    largest: Callable[[Tensor], Tensor] | None = None


def find_kernel(codec: GroupedCodec, device: torch.device) -> RowKernel | None:
    """The compiled kernel for `codec`; None if plain torch has to do the work.

    Raises:
        ConfigurationError: THINWIRE_KERNELS names a backend that is unknown, not installed or not
            for this device.
    """
    backend = _backend(device.type) if codec.has_kernel else None
    return None if backend is None else backend.build(codec)


def kernel_backend(device: torch.device) -> str:
    """The name of a device's backend, with its version: "torch" where there is no other.

    Raises:
        ConfigurationError: as `find_kernel`.
    """
    backend = _backend(device.type)
    return "torch" if backend is None else backend.NAME


@cache
def _backend(device_type: str) -> Any:
    """The backend's module, chosen once for each type of device; None is torch."""
    forced = os.environ.get(VARIABLE, "")
    known = ["torch", *_BY_DEVICE.values()]
    if forced and forced not in known:
        raise unknown_name(f"encode with {VARIABLE}={forced}", forced, known)
    name = forced or _BY_DEVICE.get(device_type, "torch")
    if name == "torch":
        return None
    try:
        backend = import_module(f"thinwire.codecs.kernels.{name}_backend")
    except ImportError as error:
        if not forced:
            return None
        raise ConfigurationError(
            f"encode with {VARIABLE}={forced}",
            because=f"it cannot be imported ({error})",
            do="pip install 'thinwire[fast]' (numba; triton comes with torch for GPUs), or unset "
            f"{VARIABLE}",
        ) from error
    is_supported = backend.supports(torch.device(device_type))
    check(
        is_supported or not forced,
        f"encode with {VARIABLE}={forced} on {device_type}",
        because=f"{backend.NAME} does not run there",
        do=f"unset {VARIABLE}: then each device has its own kernels",
    )
    return backend if is_supported else None
