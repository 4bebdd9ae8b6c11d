"""Steps of an optimizer that are called by another step of the same optimizer."""

from __future__ import annotations

import inspect
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_HOOKED_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step whose hooks run now was called by another step of `optimizer`.

    torch puts the hooks around the `step` of every class of which an optimizer was made. A class
    whose `step` calls `super().step()` so runs them twice a step, but only if an optimizer of its
    base class was made in the process, too. Hooks that count or change something ask here, so that
    they do it once a step, around the whole of it.

    Args:
        optimizer: the one that the hook was called with.

    Returns:
        False outside hooks, too.

    Raises:
        ConfigurationError: one step calls another, and both were compiled.

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
    found = False
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code.co_qualname == _HOOKED_STEP:
            # The innermost is the one whose hooks run.
            if found and _stepped(frame) is optimizer:
                return True
            found = True
    return False


def _stepped(frame: FrameType) -> object:
    if "self" not in frame.f_locals:
        raise ConfigurationError(
            "tell whether this step of the optimizer is part of another one",
            because="a step() calls another step() here, and torch.compile hides whose",
            do="compile the model, and leave optimizer.step() as it is",
        )
    return frame.f_locals["self"]
