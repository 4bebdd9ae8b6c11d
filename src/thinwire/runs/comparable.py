"""Conditions under which the losses of runs can be compared, before and after the runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.handshake import flatten_description
from thinwire.method import migrate_names
from thinwire.runs.schema import FinishedRun

_COMMON = ("model", "data", "steps", "global_batch")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def common_fields(described: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a described configuration that all runs of a comparison share, flat.

    They fix the model, the tokens read in total and per step, and the validation data.
    """
    return flatten_description(migrate_names({name: described.get(name) for name in _COMMON}))


def common_ground(run: FinishedRun) -> dict[str, str]:
    """Fields that runs must share for their losses to be compared, flat.

    These are `common_fields`, and what only a finished run knows.
    """
    # Built-in corpora are files of the installation: another Python has other tokens.
    unknown = f"not recorded (Python {run.summary.versions.get('python', 'unknown')})"
    return common_fields(run.config.described) | {
        "parameters": str(run.summary.parameters),
        "tokens": str(run.summary.tokens),
        "corpus fingerprint": unknown if run.corpus is None else run.corpus,
        "elastic": "yes" if run.summary.is_elastic else "no",
    }


def not_comparable(runs: Sequence[FinishedRun]) -> dict[Path, str]:
    """Folders of the runs that cannot be compared with most of `runs`, and why not.

    Args:
        runs: of two equally large groups, the one that comes first is the majority.
    """
    grounds = {run.folder: common_ground(run) for run in runs}
    each = list(grounds.values())
    majority = max(each, key=each.count, default={})
    return {
        folder: differences(ground, majority)
        for folder, ground in grounds.items()
        if ground != majority
    }


def differences(its: Mapping[str, str], others: Mapping[str, str]) -> str:
    """All fields in which a run's ground differs from that of the others.

    >>> differences({"steps": "3", "tokens": "9"}, {"steps": "3", "tokens": "6", "corpus": "x"})
    'corpus is missing, not x; tokens is 9, not 6'
    """
    return "; ".join(
        f"{field} is {_shown(its.get(field))}, not {_shown(others.get(field))}"
        for field in sorted(its.keys() | others.keys())
        if its.get(field) != others.get(field)
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "missing"
    return value[:12] if _FINGERPRINT.fullmatch(value) else value


def check_comparable(described: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse runs of different tokens, models or data before they are trained.

    Args:
        described: configurations, by the labels that messages use.

    Raises:
        ConfigurationError: two differ; the error names the fields and both values.
    """
    (first, config), *others = described.items()
    reference = common_fields(config)
    for label, other in others:
        fields = common_fields(other)
        if fields != reference:
            what = f"compare {label} with {first}"
            do = "let the recipe give all methods the same model, data, steps and global batch"
            raise ConfigurationError(what, because=differences(fields, reference), do=do)
