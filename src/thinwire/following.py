"""Hooks of an outer loop on an optimizer: they count its steps, and extend its state dict."""

import inspect
from collections.abc import Callable, Sequence
from traceback import walk_stack
from types import CodeType
from typing import Any, cast

import torch

from thinwire.errors import CheckpointError, check
from thinwire.nested_steps import is_nested_step
from thinwire.no_compile import no_compile

_KEY = "thinwire"
_SCALED_STEP: CodeType = torch.amp.GradScaler.step.__code__


class OptimizerHooks:
    """Hooks of an outer loop on the last of its optimizers.

    Args:
        optimizers: of the worker, in the order in which they are stepped.

    >>> OptimizerHooks([]).check_counts_once()
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._following: torch.utils.hooks.RemovableHandle | None = None
        self._carrying: list[torch.utils.hooks.RemovableHandle] = []
        self._is_inside = False

    def check_counts_once(self) -> None:
        """Raise `ConfigurationError` if a step by hand would count twice."""
        check(
            self._following is None or self._is_inside,
            "step an outer loop that follows its optimizer",
            because="it counts the optimizer's steps itself, and each would count twice",
            do="leave out outer.step(), or all but one with block",
        )

    def follow(self, step: Callable[[], None]) -> None:
        """Call `step` after every step of the last optimizer.

        Raises:
            ConfigurationError: there is no optimizer, or the loop follows it already. Later, the
                optimizer's step raises it if a GradScaler calls it, which may skip steps.
        """
        last = self._last("follow an optimizer")
        self.check_counts_once()

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # The outer step may itself step the optimizer, which must not start another round.
            if self._is_inside or is_nested_step(optimizer):
                return
            _check_never_skipped(optimizer)
            self._is_inside = True
            try:
                step()
            finally:
                self._is_inside = False

        # Where step() is compiled, its hooks would be, too.
        self._following = last.register_step_post_hook(no_compile(after_step))

    def unfollow(self) -> None:
        """Stop counting steps."""
        if self._following is not None:
            self._following.remove()
            self._following = None

    def carry(self, loop: Any) -> torch.optim.Optimizer:
        """Add the state of `loop` to the state dict of the last optimizer, which is returned.

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


def _check_never_skipped(optimizer: torch.optim.Optimizer) -> None:
    # Fused optimizers are called for every step, and skip it themselves.
    check(
        getattr(optimizer, "_step_supports_amp_scaling", False) or not _is_scaled(),
        "follow an optimizer that a GradScaler steps",
        because="it skips steps whose gradients overflow: workers would count differently",
        do="call outer.step() after every scaler.step(optimizer), or train in bf16",
    )


def _is_scaled() -> bool:
    """Whether an enabled GradScaler is among the callers: nothing in an optimizer shows it."""
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code is _SCALED_STEP:
            return cast(torch.amp.GradScaler, frame.f_locals["self"]).is_enabled()
    return False
