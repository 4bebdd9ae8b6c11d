"""The runs below some folders, and runs that a comparison there is yet to begin."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from thinwire.errors import CheckpointError
from thinwire.runs.folder import write_json
from thinwire.runs.schema import read_object
from thinwire.runs.status import RunState, RunStatus, has_files_of_run, read_run

_DEEPEST: Final = 3
_FILE: Final = "planned.json"
_GO_ON: Final = (RunState.UNFINISHED, RunState.ABSENT)


def find_runs(paths: Sequence[Path]) -> dict[Path, RunStatus]:
    """The run folders in `paths`, each once, and the status of each.

    Args:
        paths: folders of runs, or folders that hold some; a path without any is listed itself.
    """
    folders: list[Path] = []
    for path in paths:
        try:
            folders += list(_below(path, _DEEPEST)) or [path]
        except OSError:
            folders.append(path)
    return {folder: read_run(folder) for folder in dict.fromkeys(folders)}


def _below(path: Path, depth: int) -> Iterable[Path]:
    if not path.is_dir():
        return
    if has_files_of_run(path):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            yield from _below(child, depth - 1)


# -- comparisons ---------------------------------------------------------------------------------


def note_planned_runs(out: Path, runs: Collection[str], *, is_over: bool) -> None:
    """Note in a comparison's folder which runs it consists of.

    Args:
        out: the comparison's folder.
        runs: names of the run folders that are known so far; a search adds others.
        is_over: whether nothing is left to do.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / _FILE, {"runs": sorted(runs), "is_over": is_over})


def find_planned_runs(paths: Sequence[Path]) -> dict[Path, RunStatus]:
    """The runs of `find_runs`, and those that comparisons in `paths` have not begun.

    Args:
        paths: folders of runs, or folders that hold some.
    """
    noted = {path: _read(path).get("runs") for path in paths}
    planned = [p / str(name) for p, its in noted.items() if isinstance(its, list) for name in its]
    waiting = RunStatus(state=RunState.ABSENT, why="its turn has not come")
    return find_runs(paths) | {folder: waiting for folder in planned if not folder.exists()}


def is_over(paths: Sequence[Path]) -> bool:
    """True if all runs in `paths` have ended.

    A comparison records this itself, since some of its runs may not have begun. A run whose process
    was killed has not ended: it may be resumed.

    Args:
        paths: folders of runs, or folders that hold some.
    """
    return all(_is_over(path) for path in paths)


def _is_over(path: Path) -> bool:
    noted = _read(path).get("is_over")
    if isinstance(noted, bool):
        return noted
    return all(status.state not in _GO_ON for status in find_runs([path]).values())


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_object(path / _FILE))
    except CheckpointError:  # no comparison's folder, or one that an earlier version wrote
        return {}
