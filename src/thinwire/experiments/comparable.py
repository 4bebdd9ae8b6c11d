"""What all runs of a comparison must have in common, before and after they have run."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.experiments.records import Finished
from thinwire.handshake import flatten_description
from thinwire.train.config import TrainConfig

__all__ = ["apart", "check_comparable", "common_fields", "common_ground", "most_common"]

_COMMON = ("model", "data", "steps", "global_batch")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def common_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a described configuration that all runs of a comparison share, flat.

    They fix the model, the tokens that are read in all and in a step, and what is validated on.
    """
    return flatten_description({name: config.get(name) for name in _COMMON})


def common_ground(run: Finished) -> dict[str, str]:
    """What runs must have in common for their losses to be compared, flat.

    Besides `common_fields`, what only the run itself knew.
    """
    versions = run.summary.get("versions", {})
    # The built-in corpora are files of an installation: another Python, other tokens.
    unknown = f"not recorded (Python {versions.get('python', 'unknown')})"
    return common_fields(run.config) | {
        "parameters": str(run.summary["parameters"]),
        "tokens": str(run.summary["tokens"]),
        "corpus fingerprint": unknown if run.corpus is None else run.corpus,
        "elastic": "yes" if run.is_elastic else "no",
    }


def most_common(grounds: Sequence[Mapping[str, str]]) -> Mapping[str, str] | None:
    """The one that most of `grounds` are, and of several the first; None of none."""
    counted = Counter(tuple(sorted(ground.items())) for ground in grounds).most_common(1)
    return dict(counted[0][0]) if counted else None


def apart(its: Mapping[str, str], others: Mapping[str, str]) -> str:
    """All fields in which a run's ground is not that of the others.

    >>> apart({"steps": "3", "tokens": "9"}, {"steps": "3", "tokens": "6", "corpus": "x"})
    'corpus is none, not x; tokens is 9, not 6'
    """
    return "; ".join(
        f"{field} is {_shown(its.get(field))}, not {_shown(others.get(field))}"
        for field in sorted(its.keys() | others.keys())
        if its.get(field) != others.get(field)
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value[:12] if _FINGERPRINT.fullmatch(value) else value


def check_comparable(configs: Mapping[str, TrainConfig]) -> None:
    """Refuse rows of different tokens, models or data.

    Args:
        configs: by what messages call them.

    Raises:
        ConfigurationError: two differ; names the fields and both values.
    """
    (first, config), *others = configs.items()
    reference = common_fields(config.describe())
    for label, other in others:
        fields = common_fields(other.describe())
        if fields != reference:
            raise ConfigurationError(
                f"compare {label} with {first}",
                because=f"{apart(fields, reference)}, and all runs of a comparison have one model, "
                "one corpus and as many tokens",
                do="let the recipe give all methods the same model, data, steps and global batch",
            )
