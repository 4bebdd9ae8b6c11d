"""The runs below some folders, and what else is there."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from thinwire.runs.status import RunStatus, has_files_of_run, read_run

_DEEPEST: Final = 3


def find_runs(paths: Sequence[Path]) -> dict[Path, RunStatus]:
    """The run folders in `paths`, each once, and the status of each.

    Args:
        paths: folders of runs, or folders that hold some; a path without any is listed itself.
    """
    folders = dict.fromkeys(folder for path in paths for folder in _folders(path))
    return {folder: read_run(folder) for folder in folders}


def _folders(path: Path) -> list[Path]:
    try:
        return list(_below(path, _DEEPEST)) or [path]
    except OSError:
        return [path]


def _below(path: Path, depth: int) -> Iterable[Path]:
    if not path.is_dir():
        return
    if has_files_of_run(path):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            yield from _below(child, depth - 1)
