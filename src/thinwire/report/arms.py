"""Runs by what was trained, and what their differences are."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from thinwire.experiments.records import Finished
from thinwire.experiments.standing import Standing, State
from thinwire.report.folders import LeftOut
from thinwire.train.run_folder import what_counts

__all__ = [
    "Arm",
    "arms_of",
    "differing",
    "styles_of",
    "without_doubles",
]

# Where, how often something was noted, and which draw: not what was trained.
_NOT_OF_AN_ARM: Final = ("seed", "method.name", "machine.threads")
_WORDS: Final = {"workers": "K", "method.sync_every": "H"}
_FEW: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Runs that differ in nothing but their seed.

    Args:
        label: of charts and tables; no two arms have the same.
        fields: of their configuration, flat, without seed and name.
        runs: by rising seed.
    """

    label: str
    fields: Mapping[str, str]
    runs: tuple[Finished, ...]

    @property
    def first(self) -> Finished:
        """Any of them, where they are alike."""
        return self.runs[0]

    @property
    def workers(self) -> int:
        """K."""
        return int(self.first.config["workers"])

    @property
    def sync_every(self) -> int:
        """H."""
        return int(self.first.config["method"]["sync_every"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of its runs."""
        return tuple(run.seed for run in self.runs)


def without_doubles(runs: Sequence[Finished]) -> tuple[list[Finished], list[LeftOut]]:
    """`runs` with one of each configuration and seed: a copy says nothing about the spread.

    Args:
        runs: the first of each is kept.
    """
    kept: dict[tuple[object, ...], Finished] = {}
    left_out: list[LeftOut] = []
    for run in runs:
        first = kept.setdefault((_arm_key(run), run.seed), run)
        if first is not run:
            reason = f"the same configuration and seed as {first.folder}, which is shown"
            standing = Standing(state=State.STRANGER, why=reason)
            left_out.append(LeftOut(folder=run.folder, standing=standing))
    return list(kept.values()), left_out


def arms_of(runs: Sequence[Finished]) -> list[Arm]:
    """`runs` by what was trained: methods in the order of their first runs, then by K and H.

    Args:
        runs: of which no two have one configuration and seed.
    """
    together: dict[tuple[object, ...], list[Finished]] = {}
    first = list(dict.fromkeys(run.method for run in runs))
    for run in sorted(runs, key=lambda run: _place(run, first)):
        together.setdefault(_arm_key(run), []).append(run)
    groups = [sorted(group, key=lambda run: run.seed) for group in together.values()]
    fields = [_fields(group[0]) for group in groups]
    names = [group[0].method for group in groups]
    labels = _labels(names, fields)
    return [
        Arm(label=label, fields=its, runs=tuple(group))
        for label, its, group in zip(labels, fields, groups, strict=True)
    ]


def _place(run: Finished, methods: Sequence[str]) -> tuple[int, int, int]:
    config = run.config
    return methods.index(run.method), config["workers"], config["method"]["sync_every"]


def styles_of(arms: Sequence[Arm]) -> list[dict[str, int]]:
    """A colour for each method's name, and a dash for each arm of it, as traces have them.

    Args:
        arms: all.
    """
    names = list(dict.fromkeys(arm.first.method for arm in arms))
    alone, before = len(names) == len(arms), dict.fromkeys(names, 0)
    styles: list[dict[str, int]] = []
    for index, arm in enumerate(arms):
        name = arm.first.method
        variant = index if alone else before[name]
        styles.append({"arm": index, "series": names.index(name), "variant": variant})
        before[name] += 1
    return styles


def _fields(run: Finished) -> dict[str, str]:
    counted = what_counts(dict(run.config))
    return {
        field: value
        for field, value in counted.items()
        if field not in _NOT_OF_AN_ARM and not field.startswith("periods.")
    }


def _arm_key(run: Finished) -> tuple[object, ...]:
    return tuple(sorted(_fields(run).items()))


def differing(fields: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the fields that are not the same in all of `fields`, sorted.

    >>> differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    ['b']
    """
    names = sorted({name for its in fields for name in its})
    return [name for name in names if len({its.get(name) for its in fields}) > 1]


def _labels(names: Sequence[str], fields: Sequence[Mapping[str, str]]) -> list[str]:
    labels: list[str] = []
    for name, its in zip(names, fields, strict=True):
        same = [other for n, other in zip(names, fields, strict=True) if n == name]
        label = _label(name, its, differing(same))
        twins = sum(given == label or given.startswith(f"{label} (") for given in labels)
        labels.append(f"{label} ({twins + 1})" if twins else label)
    return labels


def _label(name: str, its: Mapping[str, str], different: Collection[str]) -> str:
    first = [*(f for f in _WORDS if f in different), *(f for f in different if f not in _WORDS)]
    told = [f"{_WORDS.get(f, f.rpartition('.')[2])}={its.get(f, 'none')}" for f in first[:_FEW]]
    return " ".join([name, *told])
