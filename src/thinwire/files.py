"""Files and folders that are replaced as a whole: a reader finds the old one or the new one.

Also checks names of runs, which become part of the names of objects and folders.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from thinwire.errors import check


def replace_file(path: Path, write: Callable[[Path], object], *, suffix: str = ".partial") -> None:
    """Let `write` fill a temporary file beside `path`, then put it in the place of `path`.

    When this returns, the file and its name are on the disk and survive a loss of power. If `write`
    raises, `path` is as it was and the temporary file is gone; a killed process may leave the
    temporary file, which the next write of `path` replaces.

    Args:
        path: the file to replace; its folder exists.
        write: called with the temporary file's path.
        suffix: suffix of the temporary file's name; must be unique if several processes may write
            `path` at once.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        # An incomplete file takes room that the next attempt needs.
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with `text` in UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_text(Path(folder) / "a", "new")
    ...     [file.name for file in Path(folder).iterdir()]
    ['a']
    """
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def replace_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` put files into a new folder beside `path`, then put it in the place of `path`.

    If `fill` raises or the process is killed in it, `path` is as it was. No portable system call
    exchanges two folders: between two renames only `path` + ".old" exists for a moment.

    Args:
        path: the folder to replace, with everything in it; its parents are created.
        fill: called with the new folder's path.

    Raises:
        OSError: it cannot be written.
    """
    complete, earlier = (path.with_name(path.name + ending) for ending in (".tmp", ".old"))
    shutil.rmtree(complete, ignore_errors=True)
    complete.mkdir(parents=True)
    fill(complete)
    shutil.rmtree(earlier, ignore_errors=True)
    if path.exists():  # a folder that is not empty cannot be replaced in one step
        os.replace(path, earlier)
    os.replace(complete, path)
    _sync_folder(path.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_run_name(run: str, cannot: str = "") -> None:
    """Raise `ConfigurationError` if `run` cannot name a run, as part of the names of objects.

    Args:
        run: the name.
        cannot: what the error says cannot be done; default to call a run by this name.
    """
    check(
        bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run)),
        cannot or f"call a run {run[:100]!r}",
        because=f"{run[:100]!r} cannot name a run: its name is part of the names of objects",
        do="pass up to 100 letters, digits, dots, underscores and hyphens",
    )
