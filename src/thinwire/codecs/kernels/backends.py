"""Which kernels encode and decode on a device: numba's on CPUs, Triton's on GPUs, or torch's own.

Bytes are the same with all of them. A backend is a module `<name>_backend` beside this file with
`NAME` (with its version), `supports(device)` and `build(spec, device)`; it is imported when a
kernel is first asked for, so that no run waits for a compiler without need.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from thinwire.codecs.kernels.base import RowKernel
from thinwire.errors import ConfigurationError, unknown_name
from thinwire.fragments.layout import CHUNK

if TYPE_CHECKING:
    from thinwire.codecs.row_format import RowFormat

VARIABLE = "THINWIRE_KERNELS"
"""The environment variable that names the backend to use on every device."""

_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}


def find_kernel(format: RowFormat, columns: int, device: torch.device) -> RowKernel | None:
    """The kernel that does what `format` does, compiled; None if torch has to.

    Args:
        format: of the rows.
        columns: numbers in a row; kernels know rows of 4096.
        device: of the rows.

    Raises:
        ConfigurationError: THINWIRE_KERNELS names a backend that is unknown, not installed or not
            for this device.
    """
    spec = format.kernel_spec()
    if spec is None or columns != CHUNK:
        return None
    backend = _backend(device.type)
    return None if backend is None else backend.build(spec, device)


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
    if forced not in ("", "torch", *_BY_DEVICE.values()):
        raise unknown_name(
            f"encode with {VARIABLE}={forced}", forced, ["torch", *_BY_DEVICE.values()]
        )
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
    if backend.supports(torch.device(device_type)):
        return backend
    if not forced:
        return None
    raise ConfigurationError(
        f"encode with {VARIABLE}={forced} on {device_type}",
        because=f"{backend.NAME} does not run there",
        do=f"unset {VARIABLE}: then each device has its own kernels",
    )
