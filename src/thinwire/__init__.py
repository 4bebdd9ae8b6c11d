"""Pre-train language models over thin wires."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Not at import: the command line answers --help and typing errors before it loads torch.
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        # Modules may import each other by name while `api` is still being imported.
        return import_module(f"{__name__}.{name}")
    try:
        value = getattr(import_module("thinwire.api"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("thinwire.api").__all__})
