"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, homes: Mapping[str, Iterable[str]], *, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Type checkers read the same imports under `if TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        homes: names by the module that has them.
        modules: names that are modules of the package themselves.

    >>> get, _ = lazy_exports("thinwire", {"thinwire.version": ["__version__"]})
    >>> get("__version__") == sys.modules["thinwire.version"].__version__
    True
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    own = frozenset(modules)

    def get(name: str) -> Any:
        if name in own:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        # Next time it is found as if it had been imported.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *own})

    return get, names
