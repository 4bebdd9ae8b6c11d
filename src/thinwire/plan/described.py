"""From a description back to the method it is of: a run's folder has it as plain data."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from thinwire import aggregate, codecs, exchange, feedback, fragments, inner, outer
from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.handshake import first_difference, flatten_description
from thinwire.method import Method

__all__ = ["method_of"]

# An inner and an outer optimizer may have one name, so each slot knows only what may be in it.
_SLOTS: Final[Mapping[str, Sequence[ModuleType]]] = {
    "inner": (inner,),
    "outer": (outer,),
    "overlap": (outer,),
    "codec": (codecs,),
    "feedback": (feedback,),
    "fragments": (fragments,),
    "aggregate": (aggregate,),
    "exchange": (exchange, feedback),
}


def method_of(description: Mapping[str, Any]) -> Method:
    """The method that `describe` was given.

    Args:
        description: of a `Method`, with its name, perhaps read from JSON.

    Raises:
        ConfigurationError: something in it is not part of this package, or is of another version
            of it.

    >>> from thinwire import presets
    >>> from thinwire.method import describe
    >>> method = presets.muloco(sync_every=7)
    >>> method_of(describe(method)) == method
    True
    """
    try:
        fields = {
            slot: _made(value, _SLOTS.get(slot, ()))
            for slot, value in description.items()
            if slot != "kind"
        }
        method = Method(**fields)
    except _UnknownError as unknown:
        raise _foreign(f"{unknown} is no part of this package") from unknown
    except (TypeError, ValueError, AttributeError, ThinwireError) as error:
        raise _foreign(f"it is of another version of this package: {error}") from error
    return _checked(method, description)


class _UnknownError(LookupError):
    """A kind of which nothing is known here."""


def _made(value: Any, modules: Sequence[ModuleType]) -> Any:
    if isinstance(value, Mapping) and "kind" in value:
        fields = {name: _made(held, modules) for name, held in value.items() if name != "kind"}
        return _kind(value["kind"], modules)(**fields)
    if isinstance(value, list | tuple):
        return tuple(_made(item, modules) for item in value)
    return value


def _kind(name: str, modules: Sequence[ModuleType]) -> Any:
    # Nothing but descriptions, whatever a file says: a folder may come from anybody.
    found = (getattr(module, name, None) for module in modules if name in module.__all__)
    for kind in found:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    raise _UnknownError(name)


def _checked(method: Method, description: Mapping[str, Any]) -> Method:
    """`method`, if it says of itself what was said of it: no field was added since."""
    said = {key: value for key, value in description.items() if key not in {"kind", "name"}}
    mine, theirs = flatten_description(method.describe()), flatten_description(said)
    different = first_difference(mine, theirs)
    if different is not None:
        raise _foreign(f"it is of another version of this package, whose {different} differs")
    return method


def _foreign(because: str) -> ConfigurationError:
    return ConfigurationError(
        "make out the method of a run",
        because=because,
        do="plan for a preset instead, with the step time of the run",
    )
