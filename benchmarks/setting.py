"""On what a result was measured: part of every result, so that it can be doubted."""

import importlib.metadata
import os
import platform
from typing import Any


def setting() -> dict[str, Any]:
    """Cores, machine and versions."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }
