"""torchft, when it is needed, and quiet."""

import importlib
import os
from typing import Any

from thinwire.errors import ConfigurationError

__all__ = ["load"]


def load(module: str) -> Any:
    """Import `torchft.MODULE`.

    Raises:
        ConfigurationError: torchft is not installed.
    """
    # Before anything of it is imported: it tells of every request otherwise.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        return importlib.import_module(f"torchft.{module}")
    except ImportError as error:
        raise ConfigurationError(
            "join an elastic run",
            because=str(error),
            do="pip install 'thinwire[elastic]' (Linux on x86-64)",
        ) from error
