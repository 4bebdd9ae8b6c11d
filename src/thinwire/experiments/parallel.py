"""Several runs at a time, in processes that each have a share of the cores."""

import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from thinwire.errors import ConfigurationError
from thinwire.experiments.runners import MakeObserver, PlannedRun, RunFailure, Runner, carry_out
from thinwire.train.observers import Observer
from thinwire.train.workers.group import cores

# A run whose process died is continued once from its checkpoint; if it dies again, it always would.
_ATTEMPTS = 2
_PATIENCE_S = 5.0


class ParallelRunner(Runner):
    """Carries out `jobs` runs at a time.

    Each in one of so many processes, which is bound to a share of the cores and takes one run after
    the other: to import torch and transformers takes seconds. A run whose process dies is continued
    once, in another one.

    Args:
        jobs: how many.

    Raises:
        ConfigurationError: fewer than one.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ConfigurationError(
                f"run {jobs} jobs", because="runs need at least one", do="pass jobs >= 1"
            )
        self._jobs = jobs

    def carry_out(
        self, runs: Sequence[PlannedRun], make_observer: MakeObserver
    ) -> list[RunFailure | None]:
        """See `Runner`.

        Raises:
            ConfigurationError: a configuration cannot be sent to another process.
        """
        packed: list[bytes] = []
        for run in runs:
            try:
                packed.append(pickle.dumps(run))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigurationError(
                    f"send {run.title} to another process",
                    because=str(error),
                    do="pass --jobs 1, or put what the recipe uses into a module",
                ) from error
        left = deque(range(len(runs)))
        attempts = [0] * len(runs)
        failures: list[RunFailure | None] = [None] * len(runs)
        shares = _shares(cores(), min(self._jobs, len(runs)))
        running: dict[Connection, _Process] = {}
        idle: list[_Process] = []
        try:
            while left or running:
                while left and (idle or shares):
                    process = idle.pop() if idle else _Process(shares.pop(0))
                    number = left.popleft()
                    attempts[number] += 1
                    process.begin(number, packed[number], make_observer(runs[number]))
                    running[process.pipe] = process
                for pipe in wait(list(running)):
                    process = running[cast(Connection, pipe)]
                    if process.is_busy():
                        continue
                    del running[process.pipe]
                    failures[process.number] = process.failure
                    if not process.died:
                        idle.append(process)
                        continue
                    shares.append(process.share)
                    if attempts[process.number] < _ATTEMPTS:
                        left.appendleft(process.number)
        finally:
            for process in idle:
                process.leave()
            for process in [*running.values(), *idle]:
                process.stop()
            for folder in {run.log.parent for run in runs}:
                with suppress(OSError):  # it stays where there are logs
                    folder.rmdir()
        return failures


def _shares(all_cores: list[int], jobs: int) -> list[list[int]]:
    """A part of the cores for each job; with more jobs than cores, some share one.

    >>> _shares([0, 1, 2], 2), _shares([5], 2)
    ([[0, 2], [1]], [[5], [5]])
    """
    return [all_cores[job::jobs] or [all_cores[job % len(all_cores)]] for job in range(jobs)]


class _Process:
    """A process that carries out runs and tells their records through a pipe.

    Args:
        share: cores for it.
    """

    def __init__(self, share: list[int]) -> None:
        self.share, self.number = share, -1
        self.failure: RunFailure | None = None
        self.died = False
        self._observer: Observer | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_carry_out_all, args=(theirs, share), daemon=True)
        self._process.start()
        # Held here as well, it would hide that the process has ended: the pipe would stay open.
        theirs.close()

    def begin(self, number: int, packed: bytes, observer: Observer) -> None:
        """Begin run `number`, which is `packed`, and show `observer` its records."""
        self.number, self.failure, self._observer = number, None, observer
        with suppress(OSError):  # it has died meanwhile, and its pipe says so when it is read
            self.pipe.send_bytes(packed)

    def is_busy(self) -> bool:
        """Take one message of the process; False after the last one of its run."""
        try:
            message: dict[str, Any] | RunFailure | None = self.pipe.recv()
        except (EOFError, OSError):
            self.died = True
            self._process.join()
            status = self._process.exitcode
            message = RunFailure(kind="killed", why=f"its process ended with status {status}")
        if isinstance(message, dict):
            if self._observer is not None:
                self._observer.record(message)
            return True
        self.failure = message
        if self._observer is not None and message is not None:
            self._observer.fail(str(message))
        self._close_observer()
        if self.died:
            self.stop()
        return False

    def leave(self) -> None:
        """Let the process, which carries out no run, end by itself in a few seconds."""
        self.pipe.close()
        # Terminated, it would leave semaphores behind, and a warning about them on the terminal.
        self._process.join(_PATIENCE_S)

    def stop(self) -> None:
        """End the process; what it had not finished is in its checkpoint."""
        self._close_observer()
        self._process.terminate()
        self._process.join(_PATIENCE_S)
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _close_observer(self) -> None:
        if self._observer is not None:
            self._observer.close()
        self._observer = None


# -- in the other process --------------------------------------------------------------------------


def _carry_out_all(pipe: Connection, share: list[int]) -> None:
    """Carry out the runs that come, send the records of each and last its failure, if any."""
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
                _send(pipe, RunFailure(kind=type(error).__name__, why=str(error)))
                continue
            with _output_in(run.log):
                failure = carry_out(run, _Messenger(pipe), len(share))
            _send(pipe, failure)


@contextmanager
def _output_in(log: Path) -> Generator[None]:
    """Inside, what this process prints goes into `log`, which is there only if it prints something.

    On the terminal, lines of several processes would tear what the first one shows there.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError:  # the run itself says what is wrong with the disk
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


class _Messenger(Observer):
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def record(self, record: dict[str, Any]) -> None:
        _send(self._pipe, record)


def _send(pipe: Connection, message: dict[str, Any] | RunFailure | None) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        # The process that started this one is gone; its next start continues from the checkpoint.
        raise SystemExit from error
