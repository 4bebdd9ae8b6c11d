"""Several runs at a time, in processes with a share of the cores each."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from thinwire.errors import ConfigurationError, check
from thinwire.experiments.runners import MakeObserver, PlannedRun, carry_out
from thinwire.train.observers import Observer, OnRecord
from thinwire.train.workers.group import cores

# A run whose process died is continued once from its checkpoint; if it dies again, it always would.
_ATTEMPTS = 2
_PATIENCE_S = 5.0


class ParallelRunner:
    """The `Runner` that carries out `jobs` runs at a time.

    Each of as many processes has a share of the cores and carries out one run after the other:
    importing torch and transformers takes seconds. A run whose process dies is continued once, in
    another process.

    Args:
        jobs: how many.

    Raises:
        ConfigurationError: fewer than one.
    """

    def __init__(self, jobs: int) -> None:
        what, because = f"run {jobs} jobs", "runs need at least one"
        check(jobs >= 1, what, because=because, do="pass jobs >= 1")
        self._jobs = jobs

    def __call__(self, runs: Sequence[PlannedRun], make_observer: MakeObserver) -> list[str | None]:
        """See `Runner`.

        Raises:
            ConfigurationError: a configuration cannot be sent to another process.
        """
        left = deque((number, _packed(run)) for number, run in enumerate(runs))
        failures: list[str | None] = [None] * len(runs)
        processes = [_Process(share) for share in _shares(cores(), min(self._jobs, len(runs)))]
        lock, stopped = threading.Lock(), threading.Event()

        def work(process: _Process) -> None:
            while True:
                with lock:
                    if stopped.is_set() or not left:
                        return
                    number, packed = left.popleft()
                for _ in range(_ATTEMPTS):
                    with lock:
                        observer = make_observer(runs[number])
                    failures[number] = failure = process.carry_out(packed, observer, lock)
                    with lock:
                        if failure is not None and not stopped.is_set():
                            observer.fail(runs[number].failed(failure))
                        observer.close()
                        if stopped.is_set() or process.is_alive():
                            break
                        process.start()

        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                for worked in as_completed(threads.submit(work, each) for each in processes):
                    worked.result()
            finally:
                with lock:  # no process is started after it
                    stopped.set()
                for process in processes:
                    process.stop()
                for folder in {run.log.parent for run in runs}:
                    with suppress(OSError):  # it stays if it has logs
                        folder.rmdir()
        return failures


def _packed(run: PlannedRun) -> bytes:
    try:
        return pickle.dumps(run)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"send {run.title} to another process"
        do = "pass --jobs 1, or put what the recipe uses into a module"
        raise ConfigurationError(what, because=str(error), do=do) from error


def _shares(all_cores: list[int], jobs: int) -> list[list[int]]:
    """A part of the cores for each job; with more jobs than cores, some share one.

    >>> _shares([0, 1, 2], 2), _shares([5], 2)
    ([[0, 2], [1]], [[5], [5]])
    """
    return [all_cores[job::jobs] or [all_cores[job % len(all_cores)]] for job in range(jobs)]


class _Process:
    """A process that carries out runs, one after the other, and sends their records.

    Args:
        share: its cores.
    """

    def __init__(self, share: list[int]) -> None:
        self._share, self._is_busy = share, False
        self.start()

    def start(self) -> None:
        """Start it, or another one in its place."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._share)
        self._process = context.Process(target=_carry_out_all, args=arguments, daemon=True)
        self._process.start()
        # An open copy would hide that the process has ended.
        theirs.close()

    def is_alive(self) -> bool:
        """True if it can carry out another run."""
        return self._process.exitcode is None

    def carry_out(self, packed: bytes, observer: Observer, lock: threading.Lock) -> str | None:
        """Carry out a run, and show `observer` its records; returns why it failed.

        Args:
            packed: the run.
            observer: receives its records.
            lock: held while `observer` is called.
        """
        self._is_busy = True
        try:
            self._pipe.send_bytes(packed)
            while isinstance(message := self._pipe.recv(), dict):
                with lock:
                    observer.record(cast(dict[str, Any], message))
        except (EOFError, OSError):
            self._process.join()
            message = f"killed: its process ended with status {self._process.exitcode}"
        self._is_busy = False
        return message

    def stop(self) -> None:
        """End the process; what it has not finished is in its checkpoint."""
        if self._is_busy:
            self._process.terminate()
        else:
            # Terminated, it would leave semaphores behind, and a warning about them.
            self._pipe.close()
        self._process.join(_PATIENCE_S)
        self._process.kill()
        self._process.join()


# -- in the other process --------------------------------------------------------------------------


def _carry_out_all(pipe: Connection, share: list[int]) -> None:
    """Carry out the runs that arrive; sends the records of each, and its failure or None."""
    # Ctrl-C reaches this process as well; the one that started it ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It leaves by way of its finalisers: else the terminal gets a warning about its semaphores.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share)
    with suppress(EOFError):  # the process that started this one is gone
        while True:
            packed = pipe.recv_bytes()
            try:
                run = pickle.loads(packed)
            except Exception as error:  # a class that this process cannot import
                _send(pipe, f"{type(error).__name__}: {error}")
                continue
            with _output_in(run.log):
                failure = carry_out(run, OnRecord(partial(_send, pipe)), len(share))
            _send(pipe, failure)


@contextmanager
def _output_in(log: Path) -> Generator[None]:
    """Redirects the output of this process into `log`, which is removed if it is empty.

    On the terminal, it would tear the display of the process that started this one.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError:  # the run itself fails over the disk
        yield
        return
    with file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(OSError):
                if log.stat().st_size == 0:
                    log.unlink()


def _send(pipe: Connection, message: dict[str, Any] | str | None) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        # The process that started this one is gone; its next start continues from the checkpoint.
        raise SystemExit from error
