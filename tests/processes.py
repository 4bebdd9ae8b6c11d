"""Real processes joined by gloo on this machine's loopback."""

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forked import Forked

HERE = Path(__file__).parent


def free_port() -> int:
    """A TCP port that no other test and no connection of the system gets meanwhile.

    The UDP port of the same number stays taken until this process ends, which reserves it among
    test processes. SeaweedFS also listens 10,000 above it.
    """
    while True:
        port, mark = 10_000 + secrets.randbelow(10_000), socket.socket(type=socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            for each in (port, port + 10_000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            mark.close()
        else:
            atexit.register(mark.close)
            return port


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


def fork_ranks(ranks: int, *command: str, **environment: str) -> list[Forked]:
    """Start `python COMMAND...` in `ranks` processes, as torchrun would."""
    port = free_port()
    return [
        Forked(command, rank_environment(rank, ranks, port) | environment) for rank in range(ranks)
    ]


def ended(processes: Sequence[Forked], *, timeout_s: float = 120) -> list[Forked]:
    """The same processes, once they have ended, with their output read."""
    why = ""
    try:
        for process in processes:
            try:
                process.communicate(timeout=timeout_s)
            except TimeoutError as error:
                why, timeout_s = why or str(error), 0
    finally:
        for process in processes:
            process.kill()
    if why:
        # Those that still run may be waiting for one that failed.
        raise TimeoutError("\n".join([why, *(process.stderr for process in processes)]))
    return list(processes)


@contextlib.contextmanager
def started(case: str, ranks: int) -> Iterator[list[subprocess.Popen]]:
    """`case` of ranks.py in `ranks` processes with an interpreter of their own."""
    port, command = free_port(), [sys.executable, str(HERE / "ranks.py"), case]
    processes = [start(command, **rank_environment(rank, ranks, port)) for rank in range(ranks)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run_ranks(
    case: str, ranks: int, *, script: str = "ranks.py", timeout_s: float = 120
) -> list[Forked]:
    """Run `case` of `script` in `ranks` processes to the end; returns them with their output."""
    return ended(fork_ranks(ranks, str(HERE / script), case), timeout_s=timeout_s)


def fork_worker(
    script: str, case: str, worker: int, workers: int, *, ranks: int = 1, **environment: str
) -> list[Forked]:
    """Start the ranks of one of several workers, which meet at THINWIRE_AT without numbers."""
    own = {"WORKER": str(worker), "WORKERS": str(workers), **environment}
    if at := environment.get("THINWIRE_AT"):
        own["THINWIRE_AT"] = f"{at}?workers={workers}&worker={worker}"
    return fork_ranks(ranks, str(HERE / script), case, **own)


def run_workers(
    script: str, case: str, workers: int, *, ranks: int = 1, **environment: str
) -> list[Forked]:
    """Run `case` of `script` in every rank of every worker, to the end."""
    started = [
        fork_worker(script, case, worker, workers, ranks=ranks, **environment)
        for worker in range(workers)
    ]
    return ended([process for worker in started for process in worker])


def start(command: list[str], **environment: str) -> subprocess.Popen:
    """Start a command of a page or an example, and keep its output."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )


def start_two(command: list[str]) -> list[subprocess.Popen]:
    """Start a command as two workers that meet at a port on this machine."""
    at = f"tcp://127.0.0.1:{free_port()}?workers=2&worker="
    return [start(command, THINWIRE_AT=f"{at}{worker}") for worker in range(2)]


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait for something to become true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.01)


@contextlib.contextmanager
def promptly(timeout_s: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < timeout_s


def output_of(process: subprocess.Popen) -> str:
    """Standard output of a process, which must succeed."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out
