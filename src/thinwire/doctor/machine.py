"""Findings, running checks that may hang, and checks of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from thinwire.codecs.kernels import VARIABLE, kernel_backend
from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.plan.advice import Advice
from thinwire.plan.job import Job
from thinwire.security.token import find_token
from thinwire.version import __version__

Status: TypeAlias = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_LITTLE_BYTES, _NOTHING_BYTES = 10 * _GIB, 1 * _GIB
_INSTALL_ELASTIC = "pip install 'thinwire[elastic]'"


class RunAdvice(NamedTuple):
    """Advice for a measured link.

    Args:
        advice: methods that elastic workers can train with.
        job: the job that it is for.
        model: value of --model; None if only the size of the model is known.
    """

    advice: Advice
    job: Job
    model: str | None


class Finding(NamedTuple):
    """The result of a check.

    Args:
        status: `fail` if no run can work like this.
        found: the result, in words.
        do: remedy; empty without one.
        run: advice, from the check of methods.
        name: name of the check.
    """

    status: Status
    found: str
    do: str = ""
    run: RunAdvice | None = None
    name: str = ""


Check: TypeAlias = Callable[[], Finding]
"""Checks one thing."""


def examine(name: str, check: Check, *, limit_s: float = 5.0) -> Finding:
    """The finding of `check`, or a warning that it failed or took longer than `limit_s`.

    Args:
        name: name of the check.
        check: runs in a thread.
        limit_s: seconds after which the check is abandoned.

    >>> examine("it", lambda: Finding("ok", "there")).name
    'it'
    """
    why, do = f"no answer within {limit_s:g} s", "run it again while the machine is idle"
    found = [Finding("warn", f"not established: {why}", f"{do}; no answer then either: it hangs")]

    def look() -> None:
        try:
            found.append(check())
        except ThinwireError as error:
            found.append(Finding("fail", error.because, error.do))
        except Exception as error:
            do = "report this line as a bug"
            found.append(Finding("warn", f"not established: {error!r}", do))

    # A name look-up cannot be interrupted, but a daemon thread does not keep the process alive.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[-1]._replace(name=name)


def machine_checks(*, lacking: Status, token_file: Path | None = None) -> Mapping[str, Check]:
    """Checks that need no network, by name.

    Args:
        lacking: status of a missing package that only elastic runs need.
        token_file: holds the token; default THINWIRE_TOKEN.
    """
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return {
        "python": lambda: Finding("ok", python),
        "thinwire": lambda: Finding("ok", __version__),
        "torch": partial(_package, "torch", (2, 9), "fail", "pip install 'torch>=2.9'"),
        "kernels": _kernels,
        "obstore": partial(_package, "obstore", (0, 12), lacking, _INSTALL_ELASTIC),
        "token": partial(_token, token_file),
        "folder": partial(_folder, Path.cwd()),
    }


def _package(name: str, lowest: tuple[int, ...], lacking: Status, do: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(lacking, "not installed", do)
    # Drop what follows the release: 2.13.0+cpu is (2, 13, 0).
    release = re.match(r"\d+(\.\d+)*", version)
    if release and tuple(map(int, release[0].split("."))) >= lowest:
        return Finding("ok", version)
    return Finding(lacking, f"{version}; {'.'.join(map(str, lowest))} or newer is needed", do)


def _kernels() -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = kernel_backend(device)
    found = f"{backend}, for {device.type}"
    if backend != "torch" or os.environ.get(VARIABLE):
        return Finding("ok", found)
    install = "thinwire[fast]" if device.type == "cpu" else "triton"
    return Finding(
        "warn", found, f"pip install '{install}': codecs then take a fraction of the time"
    )


def _token(file: Path | None) -> Finding:
    try:
        find_token(file)
    except ConfigurationError as error:
        # Without a token, whoever can read the store can read what workers write.
        return Finding("warn" if file is None else "fail", error.because, error.do)
    # Only the run can tell whether it is the right token.
    where = "THINWIRE_TOKEN or the address" if file is None else str(file)
    return Finding("ok", f"of the right form, in {where}")


def _folder(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    found = f"{folder}: {free_bytes / _GIB:.1f} GiB free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        do = "start from a folder that you may write to, or give train one with --out"
        return Finding("fail", f"{found}, but nothing can be written: {error}", do)
    if free_bytes >= _LITTLE_BYTES:
        return Finding("ok", found)
    do = "make room for checkpoints"
    return Finding("fail" if free_bytes < _NOTHING_BYTES else "warn", found, do)
