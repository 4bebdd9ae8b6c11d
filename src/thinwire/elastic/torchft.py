"""torchft, imported when it is needed, and silent."""

import importlib
import os
from typing import Any

from thinwire.errors import ConfigurationError


def load(module: str, *, to: str = "join an elastic run") -> Any:
    """Import `torchft.MODULE`.

    Args:
        module: its name.
        to: what it is needed for, for the error message.

    Raises:
        ConfigurationError: torchft is not installed.
    """
    # Set before torchft is imported, which logs every request otherwise.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        return importlib.import_module(f"torchft.{module}")
    except ImportError as error:
        raise ConfigurationError(
            to,
            because=f"torchft cannot be imported ({error})",
            do="pip install 'thinwire[elastic]' (Linux on x86-64, CPython 3.11 to 3.13)",
        ) from error
