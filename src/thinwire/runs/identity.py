"""Which run a configuration describes: names as of today, and the fields that decide it."""

from collections.abc import Mapping
from typing import Any, Final

from thinwire.handshake import flatten_description
from thinwire.method import with_present_names

MODEL_CONFIGURATION: Final = "model.configuration."
"""What fields begin with that say what the file of a model says."""

# Where a run happens and what it writes may change when it is resumed; what it computes may not.
_NOT_COMPUTED: Final = (
    "machine.device",
    "machine.outer_device",
    "machine.timeout_s",
    "periods.keep_checkpoints",
    "periods.checkpoint_steps",
    "periods.statistics_steps",
)


def identity_fields(description: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a described configuration that decide what a run computes, flat.

    Two folders whose identity fields are equal hold the same run.

    Args:
        description: nested as in config.json, or flat as in a checkpoint.

    >>> identity_fields({"seed": 3, "machine": {"device": "cpu", "threads": 2}})
    {'seed': '3', 'machine.threads': '2'}
    """
    flat = flatten_description(with_present_names(description))
    return {name: value for name, value in flat.items() if name not in _NOT_COMPUTED}


def identities(
    begun: Mapping[str, Any], asked_for: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """The identity fields of a run that was begun and of the one that is asked for, comparable.

    Runs of earlier versions noted the name of the model's file and not what it said: then that is
    left out of both.

    >>> identities({"model": {"size": "a"}}, {"model": {"size": "a", "configuration": {"b": 1}}})
    ({'model.size': 'a'}, {'model.size': 'a'})
    """
    theirs, mine = identity_fields(begun), identity_fields(asked_for)
    if not any(name.startswith(MODEL_CONFIGURATION) for name in theirs):
        mine = {n: value for n, value in mine.items() if not n.startswith(MODEL_CONFIGURATION)}
    return theirs, mine
