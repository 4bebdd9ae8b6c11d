"""Several runs at a time, in processes with a share of the cores each."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from thinwire.errors import ConfigurationError, check
from thinwire.experiments.runners import MakeObserver, PlannedRun, carry_out
from thinwire.train.observers import OnRecord
from thinwire.train.workers.group import cores

_PATIENCE_S = 5.0
# Slow to import. On Linux, a server imports them once, and forks a process for each run.
_PRELOADED = [__name__, "transformers.models.llama.modeling_llama", "numba"]


class ParallelRunner:
    """The `Runner` that carries out `jobs` runs at a time.

    Each run has a process and a share of the cores. A run whose process dies continues once from
    its checkpoint, in another process; one that dies twice would die every time.

    Args:
        jobs: number of runs at a time.

    Raises:
        ConfigurationError: jobs is below 1.
    """

    def __init__(self, jobs: int) -> None:
        what, because = f"run {jobs} jobs", "runs need at least one"
        check(jobs >= 1, what, because=because, do="pass jobs >= 1")
        self._jobs = jobs
        method = "forkserver" if sys.platform == "linux" else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        self._context.set_forkserver_preload(_PRELOADED)

    def __call__(self, runs: Sequence[PlannedRun], make_observer: MakeObserver) -> list[str | None]:
        """See `Runner`.

        Raises:
            ConfigurationError: a configuration cannot be sent to another process.
        """
        packed = [_packed(run) for run in runs]
        free = deque(_shares(cores(), self._jobs))
        lock, stopped, processes = threading.Lock(), threading.Event(), list[Any]()

        def attempt(number: int) -> tuple[str | None, bool]:
            """Why a run failed, and whether its process died."""
            with lock:
                if stopped.is_set():
                    return None, False
                observer, share = make_observer(runs[number]), free.popleft()
                pipe, theirs = self._context.Pipe(duplex=False)
                arguments = (theirs, packed[number], share)
                process = self._context.Process(target=_carry_out, args=arguments, daemon=True)
                process.start()
                processes.append(process)
            theirs.close()  # an open copy would hide that the process has ended
            try:
                while isinstance(failure := pipe.recv(), dict):
                    with lock:
                        observer.record(failure)
                process.join()
            except (EOFError, OSError):
                process.join()
                failure = f"killed: its process ended with status {process.exitcode}"
            with lock:
                free.append(share)
                if failure is not None and not stopped.is_set():
                    observer.fail(runs[number].failed(failure))
                observer.close()
            return failure, process.exitcode != 0

        def carry_out_one(number: int) -> str | None:
            failure, has_died = attempt(number)
            return attempt(number)[0] if has_died else failure

        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                return list(threads.map(carry_out_one, range(len(runs))))
            finally:
                with lock:  # no process starts after this
                    stopped.set()
                for process in processes:
                    process.terminate()  # its checkpoint keeps its progress
                for process in processes:
                    process.join(_PATIENCE_S)
                    process.kill()
                for folder in {run.log.parent for run in runs}:
                    with suppress(OSError):  # a folder with logs stays
                        folder.rmdir()


def _packed(run: PlannedRun) -> bytes:
    try:
        return pickle.dumps(run)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"send {run.title} to another process"
        do = "pass --jobs 1, or put what the recipe uses into a module"
        raise ConfigurationError(what, because=str(error), do=do) from error


def _shares(all_cores: list[int], jobs: int) -> list[list[int]]:
    """Some of the cores for each job; with more jobs than cores, some jobs share one.

    >>> _shares([0, 1, 2], 2), _shares([5], 2)
    ([[0, 2], [1]], [[5], [5]])
    """
    return [all_cores[job::jobs] or [all_cores[job % len(all_cores)]] for job in range(jobs)]


# -- in the process of a run -----------------------------------------------------------------------


def _carry_out(pipe: Connection, packed: bytes, share: list[int]) -> None:
    """Carry out a run; send its records, then its failure or None."""
    # Ctrl-C reaches this process as well, but its parent is the one to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Exit through the finalisers: otherwise the terminal gets a warning about semaphores.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share)
    try:
        run: PlannedRun = pickle.loads(packed)
    except Exception as error:  # a class that this process cannot import
        _send(pipe, f"{type(error).__name__}: {error}")
        return
    with suppress(OSError):  # the run itself fails over the disk
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as file:
            # On the terminal, this output would break up the display.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    failure = carry_out(run, OnRecord(partial(_send, pipe)), len(share))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with suppress(OSError):
        if run.log.stat().st_size == 0:
            run.log.unlink()
    _send(pipe, failure)


def _send(pipe: Connection, message: dict[str, Any] | str | None) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        # The parent is gone; its next start continues from the checkpoint.
        raise SystemExit from error
