"""torch, loaded when something of it is first used.

Importing torch takes seconds, and to describe, plan or report needs none of it. A module that
`thinwire plan`, `thinwire report` or `--help` imports takes it from here,

    from thinwire.lazy_torch import Tensor, nn, torch

and uses none of these while it is imported: annotations are not evaluated (`from __future__ import
annotations`), `no_grad` stands in for the decorator `torch.no_grad()`, and a class that inherits
from one of torch's has a module of its own, which is imported where the class is needed. All other
modules import torch itself. `tests/test_import.py` keeps the rule.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, final

__all__ = ["FP32_MAX", "F", "Tensor", "dist", "nn", "no_grad", "torch"]

FP32_MAX: Final = (1 - 2**-24) * 2.0**128
"""`torch.finfo(torch.float32).max`, without torch."""

P = ParamSpec("P")
R = TypeVar("R")


@final
class _Lazy:
    """Stands in for torch or a part of it until an attribute is asked for.

    Then the real one takes its place in all modules of this package, and costs nothing more.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        # typing and inspect look for such names in whatever they are given, and do without.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(_load()[self.name], attribute)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _load()[self.name])


def _load() -> Mapping[str, Any]:
    module = import_module("torch")
    found = {
        "F": module.nn.functional,
        "Tensor": module.Tensor,
        "dist": module.distributed,
        "nn": module.nn,
        "torch": module,
    }
    package, _, _ = __name__.partition(".")
    for name, user in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for variable, value in list(vars(user).items()):
                if isinstance(value, _Lazy):
                    setattr(user, variable, found[value.name])
    return found


if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
else:
    _names = ("F", "Tensor", "dist", "nn", "torch")
    _found = _load() if "torch" in sys.modules else {name: _Lazy(name) for name in _names}
    F, Tensor, dist, nn, torch = (_found[name] for name in _names)


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without gradients, as the decorator `torch.no_grad()` makes it.

    >>> @no_grad
    ... def double(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> double(torch.ones(1, requires_grad=True)).requires_grad
    False
    """

    @functools.wraps(function)
    def without_gradients(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradients
