"""`thinwire` as a separate process that trains a tiny model on a text in its folder."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = [
    "--sequence-length", "16", "--threads", "1", "--global-batch", "4", "--workers", "2",
    "--warmup-steps", "2", "--sync-every", "2", "--corpus", "corpus.txt",
]  # fmt: skip


def start(folder: Path, *arguments: str, **where: Any) -> subprocess.Popen:
    (folder / "corpus.txt").write_text("thin wires carry little " * 600)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire", *arguments, *RUN],
        cwd=folder,
        env=os.environ | quiet,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | where,
    )
