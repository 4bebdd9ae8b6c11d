"""What all runs of a comparison must have in common, before and after they have run."""

from collections.abc import Mapping
from typing import Any

from thinwire.agreement import first_difference, flatten_description
from thinwire.errors import ConfigurationError
from thinwire.train.config import TrainConfig

__all__ = ["check_comparable", "common_fields"]

_COMMON = ("model", "data", "steps", "global_batch")


def common_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a described configuration that all runs of a comparison share, flat.

    They fix the model, the tokens that are read in all, and what is validated on.
    """
    return flatten_description({name: config.get(name) for name in _COMMON})


def check_comparable(configs: Mapping[str, TrainConfig]) -> None:
    """Refuse rows of different tokens, models or data.

    Args:
        configs: by what messages call them.

    Raises:
        ConfigurationError: two differ; names the field and both values.
    """
    (first, config), *others = configs.items()
    reference = common_fields(config.describe())
    for label, other in others:
        fields = common_fields(other.describe())
        field = first_difference(reference, fields)
        if field is not None:
            raise ConfigurationError(
                f"compare {first} with {label}",
                because=f"{field} is {reference.get(field, 'none')} of the one and "
                f"{fields.get(field, 'none')} of the other, and all runs of a comparison have one "
                "model, one corpus and as many tokens",
                do="let the recipe give all methods the same model, data, steps and global batch",
            )
