"""Several runs at a time, each in a process with its share of the cores."""

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, final

from thinwire.errors import ConfigurationError
from thinwire.experiments.runs import Failure, Run, Runner, Tell, carry_out
from thinwire.train.cores import cores
from thinwire.train.observers import Observer

__all__ = ["SideBySide"]

# A run whose process died goes on once from its checkpoint: if it dies again, it would for ever.
_ATTEMPTS = 2


@final
class SideBySide(Runner):
    """`jobs` processes that take one run after the other.

    Each is bound to its share of the cores. A process that dies is replaced, and its run continued.

    Args:
        jobs: how many.

    Raises:
        ConfigurationError: fewer than one.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ConfigurationError(
                f"run {jobs} jobs", because="one at least does the work", do="pass jobs >= 1"
            )
        self._jobs = jobs

    def carry_out(self, runs: Sequence[Run], tell: Tell) -> list[Failure | None]:
        """See `Runner`.

        Raises:
            ConfigurationError: a configuration cannot be sent to another process.
        """
        board = _Board(runs, tell)
        hands = [_Hand(share, board) for share in _shares(cores(), min(self._jobs, len(runs)))]
        try:
            for hand in hands:
                hand.take_next()
            while busy := [hand for hand in hands if hand.run is not None]:
                ready = wait([hand.pipe for hand in busy])
                for hand in busy:
                    if hand.pipe in ready:
                        hand.listen()
        finally:
            for hand in hands:
                hand.dismiss()
        return [board.failures.get(number) for number in range(len(runs))]


def _shares(all_cores: list[int], jobs: int) -> list[list[int]]:
    """A part of the cores for each job; with more jobs than cores, some share one.

    >>> _shares([0, 1, 2], 2), _shares([5], 2)
    ([[0, 2], [1]], [[5], [5]])
    """
    return [all_cores[job::jobs] or [all_cores[job % len(all_cores)]] for job in range(jobs)]


@final
class _Board:
    """Which runs are left, and how the others ended."""

    def __init__(self, runs: Sequence[Run], tell: Tell) -> None:
        self.runs, self.tell = runs, tell
        self.left = deque(range(len(runs)))
        self.attempts = [0] * len(runs)
        self.failures: dict[int, Failure] = {}


@final
class _Hand:
    """A process and what it does now."""

    def __init__(self, share: list[int], board: _Board) -> None:
        self._share, self._board = share, board
        self.run: int | None = None
        self._observer: Observer | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._share), daemon=True)
        self._process.start()
        # So that its death is seen as the end of the pipe.
        theirs.close()

    def take_next(self) -> None:
        """Begin a run, if one is left."""
        self.run = self._board.left.popleft() if self._board.left else None
        if self.run is None:
            return
        self._board.attempts[self.run] += 1
        run = self._board.runs[self.run]
        try:
            self.pipe.send_bytes(_packed(run))
        except OSError:  # it died before it had anything to do
            self._lost()
            return
        self._observer = self._board.tell(run)

    def listen(self) -> None:
        """Take in what the process says."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self._lost()
            return
        if kind == "record" and self._observer is not None:
            self._observer.record(content)
        elif kind == "end":
            self._end(content)

    def _lost(self) -> None:
        self._process.join()
        self.pipe.close()
        status, number = self._process.exitcode, self.run
        self._start()
        if number is None:
            return
        if self._board.attempts[number] < _ATTEMPTS:
            self._board.left.appendleft(number)
            self._end(None)
        else:
            self._end(Failure(kind="killed", why=f"its process ended with status {status}"))

    def _end(self, failure: Failure | None) -> None:
        if failure is not None and self.run is not None:
            self._board.failures[self.run] = failure
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        self.take_next()

    def dismiss(self) -> None:
        """End the process; what it had not finished is in its checkpoint."""
        if self._observer is not None:
            self._observer.close()
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _packed(run: Run) -> bytes:
    try:
        return pickle.dumps(run)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"send {run.title} to another process",
            because=str(error),
            do="pass --jobs 1, or define what the recipe uses in a module that can be imported",
        ) from error


# -- in the other process --------------------------------------------------------------------------


def _serve(pipe: Connection, share: list[int]) -> None:
    # The one who started this ends it, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share)
    while True:
        try:
            packed = pipe.recv_bytes()
        except EOFError:
            return
        _say(pipe, "end", _carry_out(packed, pipe, len(share)))


def _carry_out(packed: bytes, pipe: Connection, share: int) -> Failure | None:
    try:
        run = pickle.loads(packed)
    except Exception as error:  # of a class that is not there
        return Failure(kind=type(error).__name__, why=str(error))
    return carry_out(run, lambda: _Messenger(pipe), share)


@final
class _Messenger(Observer):
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def record(self, record: dict[str, Any]) -> None:
        _say(self._pipe, "record", record)


def _say(pipe: Connection, kind: str, content: Any) -> None:
    try:
        pipe.send((kind, content))
    except OSError as error:
        # Whoever started this is gone, and its next start goes on from the checkpoint.
        raise SystemExit from error
