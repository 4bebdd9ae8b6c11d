"""Real processes joined by gloo on this machine's loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start_ranks(case: str, ranks: int, *, script: str = "ranks.py") -> list[subprocess.Popen]:
    """Start `case` of `script` in `ranks` processes."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), case],
            env=rank_environment(rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def run_ranks(
    case: str, ranks: int, *, script: str = "ranks.py", timeout_s: float = 120
) -> list[subprocess.Popen]:
    """Run `case` of `script` in `ranks` processes; returns them ended, with their output read."""
    processes = start_ranks(case, ranks, script=script)
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            process.stdout, process.stderr = out, err
    finally:
        for process in processes:
            process.kill()
    return processes
