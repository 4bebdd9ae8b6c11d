"""One process writes a run's folder: a lock that the kernel releases however the process ends."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.errors import ConfigurationError

__all__ = ["locked"]

_LOG = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold `folder`, which is created, against all other processes; leaves no trace of the lock.

    Raises:
        ConfigurationError: another process holds it, or it cannot be written.
    """
    file = folder / "lock"
    descriptor = _open(folder, file)
    try:
        yield
    finally:
        # First the file and then the lock: who opened it meanwhile finds that it is gone.
        with suppress(OSError):
            file.unlink()
            # A start that failed leaves no empty folder; one with anything in it stays.
            folder.rmdir()
        os.close(descriptor)


def _open(folder: Path, file: Path) -> int:
    """A descriptor of the lock file, locked."""
    while True:
        descriptor = _create(folder, file)
        try:
            _take(descriptor, folder)
            if _is(descriptor, file):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _create(folder: Path, file: Path) -> int:
    # Whoever held the folder before may remove it, empty, between the two calls.
    for last in (False, False, True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if last or not isinstance(error, FileNotFoundError):
                raise ConfigurationError(
                    f"start a run in {folder}", because=str(error), do="pass another --out"
                ) from error
    raise AssertionError("unreachable")


def _take(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        _LOG.warning("nothing keeps a second process out of %s: this system has no flock", folder)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"start a run in {folder}",
            because="another process is writing a run there now",
            do="pass another --out, or wait for that one to end or stop it",
        ) from error
    except OSError as error:
        # A file system without locks, as some network ones are: no reason not to train there.
        _LOG.warning("nothing keeps a second process out of %s: %s", folder, error)


def _is(descriptor: int, file: Path) -> bool:
    """Whether `file` still is what was opened: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False
