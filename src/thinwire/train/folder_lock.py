"""One process writes a run's folder: a lock that the kernel releases however the process ends."""

import errno
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from thinwire.errors import ConfigurationError

_LOG = logging.getLogger(__name__)
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold `folder`, which is created, against all other processes; leaves no trace of the lock.

    Raises:
        ConfigurationError: another process holds it, or it cannot be written.
    """
    # A file that its last holder just removed is found out only after it was locked: one more try.
    lock = FileLock(folder / "lock", timeout=0.1, poll_interval=0.02, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(
            f"start a run in {folder}",
            because="another process is writing a run there now",
            do="pass another --out, or wait for that one to end or stop it",
        ) from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise ConfigurationError(
                f"start a run in {folder}", because=str(error), do="pass another --out"
            ) from error
        # A file system without locks, as some network ones are: no reason not to train there.
        _LOG.warning("nothing keeps a second process out of %s: %s", folder, error)
    try:
        yield
    finally:
        # Removed while it is held: a process that opened it meanwhile sees that it has no name.
        with suppress(OSError):
            (folder / "lock").unlink()
            folder.rmdir()  # only a start that failed left it empty
        lock.release()
