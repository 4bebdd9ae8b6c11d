"""Which run a configuration describes: names as of today, and the fields that decide it."""

from collections.abc import Mapping
from typing import Any, Final

from thinwire.handshake import flatten_description
from thinwire.method import with_present_names

__all__ = ["identity_fields"]

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
