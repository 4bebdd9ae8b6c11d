"""Whether a step of an optimizer was called by another step of the same optimizer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["is_nested_step"]

_HOOKED_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hooks run now was called by another step of `optimizer`.

    torch puts the hooks around the `step` of every class of which an optimizer was made. A class
    whose `step` calls `super().step()` so runs them twice a step, but only if an optimizer of its
    base class was made in the process, too. Hooks that count or change something ask here, so that
    they do it once a step, around the whole of it.

    Args:
        optimizer: the one that the hook was called with.

    Returns:
        False outside hooks, too.

    >>> import torch
    >>> class Counting(torch.optim.SGD):
    ...     def step(self, closure=None):
    ...         return super().step(closure)
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> _ = torch.optim.SGD([weight])
    >>> optimizer, found = Counting([weight]), []
    >>> _ = optimizer.register_step_post_hook(lambda o, *_: found.append(is_nested_step(o)))
    >>> _ = optimizer.step()
    >>> found
    [True, False]
    """
    steps, frame = 0, inspect.currentframe()
    while frame is not None and steps < 2:
        # Reading f_locals costs more than the walk does: only where the name fits.
        if frame.f_code.co_qualname == _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps > 1
