"""Checks of this machine, without a network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from thinwire.codecs.kernels import VARIABLE, kernel_backend
from thinwire.doctor.finding import Check, Finding, Status
from thinwire.errors import ConfigurationError
from thinwire.security.token import find_token
from thinwire.version import __version__

_PYTHON = (3, 11)
_GIB = 1 << 30
_LITTLE_BYTES, _NOTHING_BYTES = 10 * _GIB, 1 * _GIB
_INSTALL_ELASTIC = "pip install 'thinwire[elastic]' on Linux with CPython 3.11 to 3.13"


def machine_checks(*, lacking: Status, token_file: Path | None = None) -> Mapping[str, Check]:
    """Checks that need no network, by name.

    Args:
        lacking: status where something is missing that only an elastic run needs.
        token_file: holds the token; default THINWIRE_TOKEN.
    """
    return {
        "python": _python,
        "thinwire": lambda: Finding(name="thinwire", status="ok", found=__version__),
        "torch": partial(_package, "torch", (2, 9), (3,), "fail", "pip install 'torch>=2.9'"),
        "kernels": _kernels,
        "torchft": partial(_package, "torchft", (0, 2), (0, 3), lacking, _INSTALL_ELASTIC),
        "safetensors": partial(_package, "safetensors", (0,), (1,), lacking, _INSTALL_ELASTIC),
        "token": partial(_token, lacking, token_file),
        "folder": partial(_folder, Path.cwd()),
    }


def _python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info >= _PYTHON:
        return Finding(name="python", status="ok", found=found)
    return Finding(name="python", status="fail", found=found, do="use Python 3.11 or newer")


def _package(
    name: str, lowest: tuple[int, ...], below: tuple[int, ...], lacking: Status, do: str
) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, status=lacking, found="not installed", do=do)
    if lowest <= _numbers(version) < below:
        return Finding(name=name, status="ok", found=version)
    wanted = f"{_text(lowest)} or newer, below {_text(below)}, is needed"
    return Finding(name=name, status=lacking, found=f"{version}; {wanted}", do=do)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what follows it: 2.13.0+cpu is (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _kernels() -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backend = kernel_backend(device)
    except ConfigurationError as error:
        return Finding(name="kernels", status="fail", found=error.because, do=error.do)
    found = f"{backend}, for {device.type}"
    if backend != "torch" or os.environ.get(VARIABLE):
        return Finding(name="kernels", status="ok", found=found)
    install = "thinwire[fast]" if device.type == "cpu" else "triton"
    do = f"pip install '{install}': codecs then take a fraction of the time"
    return Finding(name="kernels", status="warn", found=found, do=do)


def _token(lacking: Status, file: Path | None) -> Finding:
    try:
        find_token(file)
    except ConfigurationError as error:
        return Finding(name="token", status=lacking, found=error.because, do=error.do)
    where = "in THINWIRE_TOKEN" if file is None else f"in {file}"
    return Finding(name="token", status="ok", found=where)


def _folder(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    found = f"{folder}: {free_bytes / _GIB:.1f} GiB free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return Finding(
            name="folder",
            status="fail",
            found=f"{found}, but nothing can be written: {error}",
            do="start from a folder that you may write to, or give train one with --out",
        )
    if free_bytes >= _LITTLE_BYTES:
        return Finding(name="folder", status="ok", found=found)
    status: Status = "fail" if free_bytes < _NOTHING_BYTES else "warn"
    return Finding(name="folder", status=status, found=found, do="make room for checkpoints")
