"""Variants of a comparison: runs that differ only in their seed."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from thinwire.runs.schema import FinishedRun, RunConfig, RunRecord, identity_fields
from thinwire.runs.statistics import Estimate, estimate, mean_curve
from thinwire.transport.metered import times_fewer, up_and_down

# The seed, the method's name and the threads do not make another variant.
_NOT_OF_A_VARIANT: Final = ("seed", "method.name", "machine.threads")
_SYMBOLS: Final = {"workers": "K", "method.sync_every": "H"}
_FEW: Final = 3

_Key: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Runs that differ only in their seed, and their statistics.

    Args:
        label: name in charts and tables; unique in a comparison.
        runs: at least one, in order of their seeds.
    """

    label: str
    runs: tuple[FinishedRun, ...]

    @property
    def config(self) -> RunConfig:
        """Configuration of the first run: the others differ in the seed only."""
        return self.runs[0].config

    @property
    def settings(self) -> dict[str, str]:
        """Fields of the configuration, flat, without those that may differ within a variant."""
        return _settings(self.runs[0])

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss at the end, by seed."""
        return {run.config.seed: run.summary.val_loss for run in self.runs}

    @property
    def loss(self) -> Estimate:
        """Mean validation loss at the end."""
        return estimate(self.losses)

    def up_and_down(self, *, relayed: bool) -> tuple[float, float]:
        """Bytes of a worker in the whole run, mean over seeds.

        Args:
            relayed: whether through a store or a hub, instead of point to point.
        """
        sent = self.mean(lambda run: run.summary.sent_bytes_per_worker)
        received = self.mean(lambda run: run.summary.received_bytes_per_worker)
        by_server = "asynchronous" in self.runs[0].summary.described
        return up_and_down(sent, received, relayed=relayed or by_server)

    @property
    def moved_bytes(self) -> float:
        """Bytes up + down through a store."""
        return sum(self.up_and_down(relayed=True))

    @property
    def times_fewer(self) -> tuple[float | None, float | None]:
        """How many times fewer bytes than an all-reduce of 16-bit gradients: by store, direct."""
        its = self.runs[0].summary
        size = {"workers": its.workers, "parameters": its.parameters, "steps": its.steps}
        store, direct = (self.up_and_down(relayed=relayed) for relayed in (True, False))
        return times_fewer(*store, **size), times_fewer(*direct, **size)

    def mean(self, quantity: Callable[[FinishedRun], float]) -> float:
        """A quantity of a run, mean over seeds."""
        return statistics.fmean(quantity(run) for run in self.runs)

    @property
    def memory_ratio(self) -> float | None:
        """Bytes of all states of a worker over those of its weights; None if not recorded."""
        held = [run.records[-1].state_bytes for run in self.runs]
        if not all(held):
            return None
        return statistics.fmean(sum(its.values()) / its["live_weights"] for its in held)

    def curve(self, quantity: Callable[[RunRecord], float | None]) -> dict[int, Estimate]:
        """A quantity of a record, averaged over seeds, at the steps where all runs have it.

        Args:
            quantity: reads it from a record; None if the record lacks it.
        """
        by_seed = {
            run.config.seed: {
                record.step: value
                for record in run.records
                if (value := quantity(record)) is not None
            }
            for run in self.runs
        }
        return mean_curve(by_seed)


def repeated_runs(runs: Sequence[FinishedRun]) -> dict[Path, str]:
    """Folders of runs that repeat an earlier run's configuration and seed, and why.

    A copy says nothing about the spread over seeds.
    """
    first: dict[tuple[_Key, int], FinishedRun] = {}
    repeated: dict[Path, str] = {}
    for run in runs:
        kept = first.setdefault((_key(run), run.config.seed), run)
        if kept is not run:
            why = f"the same configuration and seed as {kept.folder}, which is shown"
            repeated[run.folder] = why
    return repeated


def variants_of(runs: Sequence[FinishedRun]) -> list[Variant]:
    """Group `runs` into variants: methods in the order of their first runs, then by K and H.

    Args:
        runs: runs of which no two have the same configuration and seed.
    """
    methods = list(dict.fromkeys(run.config.method for run in runs))

    def place(run: FinishedRun) -> tuple[int, int, int]:
        return methods.index(run.config.method), run.config.workers, run.config.sync_every

    together: dict[_Key, list[FinishedRun]] = {}
    for run in sorted(runs, key=place):
        together.setdefault(_key(run), []).append(run)
    groups = [sorted(group, key=lambda run: run.config.seed) for group in together.values()]
    labels = _labels([group[0] for group in groups])
    return [
        Variant(label=label, runs=tuple(group)) for label, group in zip(labels, groups, strict=True)
    ]


def _settings(run: FinishedRun) -> dict[str, str]:
    return {
        name: value
        for name, value in identity_fields(run.config.described).items()
        if name not in _NOT_OF_A_VARIANT and not name.startswith("periods.")
    }


def _key(run: FinishedRun) -> _Key:
    return tuple(sorted(_settings(run).items()))


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the fields that are not the same in all of `settings`, sorted.

    >>> differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    ['b']
    """
    names = sorted({name for its in settings for name in its})
    return [name for name in names if len({its.get(name) for its in settings}) > 1]


def _labels(runs: Sequence[FinishedRun]) -> list[str]:
    """The method of each run, and what sets it apart from others of that method; all unique."""
    settings: dict[str, list[dict[str, str]]] = {}
    for run in runs:
        settings.setdefault(run.config.method, []).append(_settings(run))
    different = {name: differing(its) for name, its in settings.items()}
    labels: list[str] = []
    for run in runs:
        name = run.config.method
        label = _label(name, _settings(run), different[name])
        twins = sum(given == label or given.startswith(f"{label} (") for given in labels)
        labels.append(f"{label} ({twins + 1})" if twins else label)
    return labels


def _label(name: str, its: Mapping[str, str], different: Collection[str]) -> str:
    first = [*(f for f in _SYMBOLS if f in different), *(f for f in different if f not in _SYMBOLS)]
    shown = [f"{_SYMBOLS.get(f, f.rpartition('.')[2])}={its.get(f, 'none')}" for f in first[:_FEW]]
    return " ".join([name, *shown])
