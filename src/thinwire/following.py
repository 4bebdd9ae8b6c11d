"""Hooks of an outer loop on an optimizer: they count its steps, and extend its state dict."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from traceback import walk_stack
from types import CodeType
from typing import Any, cast

import torch

from thinwire.errors import CheckpointError, check

_KEY = "thinwire"
_HOOKED_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
# Code that torch.compile traces may round differently: the bits of a round, and of its messages,
# would depend on whether and where a worker compiles. torch.compiler.disable is slow to import.
no_compile = torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_SCALED_STEP: CodeType = torch.amp.GradScaler.step.__code__


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step whose hooks run now was called by another step of `optimizer`.

    torch wraps hooks around the `step` of every class that an optimizer was made of. A class whose
    `step` calls `super().step()` therefore runs them twice per step, but only if an optimizer of
    its base class was made in the process, too. Hooks that count or change something ask this, so
    that they act once per step, around the whole of it.

    Args:
        optimizer: the optimizer that the hook was called with.

    Returns:
        False also outside hooks.

    Raises:
        ConfigurationError: one step calls another, and torch.compile hides which optimizer's.

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
            # The innermost frame is the step whose hooks run now.
            check(
                not found or "self" in frame.f_locals,
                "tell whether this step of the optimizer is part of another one",
                because="a step() calls another step() here, and torch.compile hides whose",
                do="compile the model, and leave optimizer.step() as it is",
            )
            if found and frame.f_locals["self"] is optimizer:
                return True
            found = True
    return False


class OptimizerHooks:
    """Hooks of an outer loop on the last of its optimizers.

    Args:
        optimizers: the worker's, in the order in which they are stepped.

    Attributes:
        awaits_first_step: whether no optimizer has stepped since `before_first_step`.

    >>> OptimizerHooks([]).check_counts_once()
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._following: torch.utils.hooks.RemovableHandle | None = None
        self._carrying: list[torch.utils.hooks.RemovableHandle] = []
        self._first: list[torch.utils.hooks.RemovableHandle] = []
        self.awaits_first_step = False
        self._is_inside = False

    def check_counts_once(self) -> None:
        """Raise `ConfigurationError` if a step by hand would count twice."""
        check(
            self._following is None or self._is_inside,
            "step an outer loop that follows its optimizer",
            because="it counts the optimizer's steps itself, and each would count twice",
            do="leave out outer.step(), or all but one with block",
        )

    def before_first_step(self, start: Callable[[], None]) -> None:
        """Call `start`, a method that is held weakly, before the first step of any optimizer.

        Steps with a learning rate of 0, which move nothing, are not the last to call it.
        """
        method, self.awaits_first_step = weakref.WeakMethod(start), bool(self._optimizers)

        @no_compile
        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self.awaits_first_step and (call := method()) is not None:
                call()
                # torch.distributed.checkpoint steps with rate 0 to make an optimizer's state.
                rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
                self.awaits_first_step = not any(rates)

        self._first = [each.register_step_pre_hook(before_step) for each in self._optimizers]

    def forget_first_step(self) -> None:
        """Remove the hooks of `before_first_step`; a hook cannot remove itself."""
        self.awaits_first_step = False
        for handle in self._first:
            handle.remove()
        self._first.clear()

    def follow(self, step: Callable[[], None]) -> None:
        """Call `step` after every step of the last optimizer.

        Raises:
            ConfigurationError: there is no optimizer, or the loop follows it already. The
                optimizer's step raises it later if a GradScaler, which may skip steps, calls it.
        """
        last = self._last("follow an optimizer")
        self.check_counts_once()

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # The outer step may step the optimizer itself, which must not start another round.
            if self._is_inside or is_nested_step(optimizer):
                return
            # A GradScaler calls fused optimizers for every step; they skip steps themselves.
            check(
                getattr(optimizer, "_step_supports_amp_scaling", False) or not _is_scaled(),
                "follow an optimizer that a GradScaler steps",
                because="it skips steps whose gradients overflow: workers would count differently",
                do="call outer.step() after every scaler.step(optimizer), or train in bf16",
            )
            self._is_inside = True
            try:
                step()
            finally:
                self._is_inside = False

        # If step() is compiled, its hooks would be, too.
        untraced: Any = torch.compiler.disable(after_step)
        self._following = last.register_step_post_hook(untraced)

    def unfollow(self) -> None:
        """Stop counting steps."""
        if self._following is not None:
            self._following.remove()
            self._following = None

    def carry(self, loop: Any) -> torch.optim.Optimizer:
        """Add the state of `loop` to the state dict of the last optimizer; returns this optimizer.

        Raises:
            ConfigurationError: there is no optimizer.
        """
        last = self._last("save the outer state with an optimizer")
        if self._carrying:
            return last

        def save(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, _KEY: loop.state_dict()}

        def load(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            check(
                _KEY in state,
                "resume from this optimizer's checkpoint",
                because="it has no outer state, and the outer loop would start over",
                do="load one written with save_with_optimizer(), or begin a new run",
                kind=CheckpointError,
            )
            loop.load_state_dict(state[_KEY])
            return {key: value for key, value in state.items() if key != _KEY}

        self._carrying = [
            last.register_state_dict_post_hook(save),
            last.register_load_state_dict_pre_hook(load),
        ]
        return last

    def remove(self) -> None:
        """Remove all hooks."""
        self.unfollow()
        self.forget_first_step()
        for handle in self._carrying:
            handle.remove()
        self._carrying.clear()

    def _last(self, what: str) -> torch.optim.Optimizer:
        check(
            bool(self._optimizers),
            what,
            because="this outer loop was built without one",
            do="pass the optimizer to OuterLoop, or save outer.state_dict() yourself",
        )
        return self._optimizers[-1]


def _is_scaled() -> bool:
    """Whether an enabled GradScaler is among the callers; the optimizer itself does not tell."""
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code is _SCALED_STEP:
            return cast(torch.amp.GradScaler, frame.f_locals["self"]).is_enabled()
    return False
