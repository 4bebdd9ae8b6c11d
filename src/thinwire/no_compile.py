"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_untraced: Callable[..., Any] | None = None


def no_compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run as it is written also where its caller is compiled.

    What torch.compile traces may round otherwise: the bits of a round, and of what is sent, would
    depend on whether and where a worker compiles. Holds from `prepare_no_compile()` on.

    Args:
        function: any; what it calls is not traced, either.

    >>> prepare_no_compile()
    >>> no_compile(round)(2.5)
    2
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _untraced is None:
            return function(*args, **kwargs)
        return _untraced(function, *args, **kwargs)

    return run


def prepare_no_compile() -> None:
    """Make ready what `no_compile` needs: a second's import, as for any optimizer."""
    global _untraced
    if _untraced is None:
        _untraced = torch.compiler.disable(_call)


def _call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return function(*args, **kwargs)
