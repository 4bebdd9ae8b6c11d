"""Run folders of a report: whose runs can be shown together, and why the rest is not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from thinwire.experiments.comparable import apart, common_ground, most_common
from thinwire.experiments.records import Finished, has_records
from thinwire.experiments.standing import Standing, State, judge

__all__ = ["Found", "LeftOut", "comparable", "find_runs"]

_DEEPEST: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A folder that is not shown among the others.

    Args:
        folder: where it lies.
        standing: why.
    """

    folder: Path
    standing: Standing

    @property
    def reason(self) -> str:
        """For people."""
        return f"{self.standing.state}: {self.standing.why}"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What folders hold.

    Args:
        runs: complete and sound.
        left_out: all others.
    """

    runs: tuple[Finished, ...]
    left_out: tuple[LeftOut, ...]


def find_runs(paths: Sequence[Path]) -> Found:
    """The runs in `paths`, each of which is a run's folder or holds some.

    Args:
        paths: as given; a folder that is met twice counts once.
    """
    folders = dict.fromkeys(folder for path in paths for folder in _folders(path))
    judged = [(folder, judge(folder)) for folder in folders]
    return Found(
        runs=tuple(run for _, run in judged if isinstance(run, Finished)),
        left_out=tuple(
            LeftOut(folder=folder, standing=standing)
            for folder, standing in judged
            if isinstance(standing, Standing)
        ),
    )


def _folders(path: Path) -> list[Path]:
    try:
        found = list(_below(path, _DEEPEST))
    except OSError:
        found = []
    return found or [path]


def _below(path: Path, depth: int) -> Iterable[Path]:
    if not path.is_dir():
        return
    if has_records(path):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            yield from _below(child, depth - 1)


def comparable(runs: Sequence[Finished]) -> tuple[list[Finished], list[LeftOut]]:
    """The most runs that have their ground in common, and the others with what sets them apart.

    Args:
        runs: of which, if two groups are as large, the one that begins first is taken.
    """
    grounds = [(run, common_ground(run)) for run in runs]
    ground = most_common([its for _, its in grounds])
    kept = [run for run, its in grounds if its == ground]
    left_out = [
        LeftOut(folder=run.folder, standing=Standing(state=State.STRANGER, why=apart(its, ground)))
        for run, its in grounds
        if ground is not None and its != ground
    ]
    return kept, left_out
