"""The machine behind a result, and the format of results, so that readers can doubt a result."""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Left out: these do not identify a run, and differ at every repetition.
_TIMES = ("wall_s", "tokens_per_s", "wait_s", "versions")


def setting() -> dict[str, Any]:
    """Cores, machine and versions."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }


def kind_of_machine() -> str:
    """The machine's kind, torch and processor model: within it losses agree to the last digit.

    Vector width alone is not enough: processors with the same AVX512 differ in bf16 products.
    """
    info = Path("/proc/cpuinfo")
    known = re.findall(r"^(?:cpu family|model)\s*: (.*)$", info.read_text(), re.M)[:2]
    processor = [platform.machine(), *known] if info.exists() else [platform.processor()]
    if torch.cuda.is_available():  # runs use it if there is one
        processor = [torch.cuda.get_device_name()]
    return f"torch {importlib.metadata.version('torch')}, {' '.join(processor)}"


def write_runs(
    script: str, what: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], **findings: Any
) -> None:
    """Write the findings and runs of `script`, a file of this folder, to results/NAME.json."""
    path = Path(script)
    result = {
        "what": what,
        "command": f"python benchmarks/{path.name} OUT",
        **setting(),
        **findings,
        "runs": {
            name: [{k: v for k, v in run.items() if k not in _TIMES} for run in same]
            for name, same in runs.items()
        },
    }
    out = path.parent / "results" / f"{path.stem.replace('_', '-')}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
