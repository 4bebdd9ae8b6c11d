"""An outer loop and the optimizer it goes with: counting its steps, sharing its checkpoints."""

import inspect
from collections.abc import Callable, Sequence
from traceback import walk_stack
from types import CodeType
from typing import Any, cast

import torch

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.nested_steps import is_nested_step
from thinwire.no_compile import no_compile

_KEY = "thinwire"
_SCALED_STEP: CodeType = torch.amp.GradScaler.step.__code__


class OptimizerHooks:
    """What an outer loop has hung on the last of its optimizers, and how to take it off.

    Args:
        optimizers: of the worker, in the order in which they are stepped.

    >>> hooks = OptimizerHooks([])
    >>> hooks.is_following
    False
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._following: torch.utils.hooks.RemovableHandle | None = None
        self._carrying: list[torch.utils.hooks.RemovableHandle] = []
        self._is_inside = False

    @property
    def is_following(self) -> bool:
        """Whether steps of the optimizer are counted."""
        return self._following is not None

    def check_may_step(self) -> None:
        """Raise `ConfigurationError` if a step by hand would count twice."""
        if self.is_following and not self._is_inside:
            raise ConfigurationError(
                "step an outer loop that follows its optimizer",
                because="it counts the optimizer's steps by itself, and this one would count twice",
                do="leave out either outer.step() or the with block (or outer.follow())",
            )

    def follow(self, step: Callable[[], None]) -> None:
        """Call `step` after every step of the last optimizer.

        Raises:
            ConfigurationError: there is no optimizer, or it is followed already. The optimizer's
                step does where a GradScaler calls it, and may skip it.
        """
        last = self._last("follow an optimizer")
        if self.is_following:
            raise ConfigurationError(
                "follow the optimizer a second time",
                because="this outer loop does already, and every inner step would count twice",
                do="leave out one of the two with blocks (or outer.follow())",
            )

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
        """Count no more steps."""
        if self._following is not None:
            self._following.remove()
            self._following = None

    def carry(self, loop: Any) -> None:
        """Have the optimizer's state dict hold that of `loop`, and load it from there.

        Raises:
            ConfigurationError: there is no optimizer, or it carries the state already.
        """
        last = self._last("carry the outer state in an optimizer's state dict")
        if self._carrying:
            return

        def save(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, _KEY: loop.state_dict()}

        def load(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            if _KEY not in state:
                raise CheckpointError(
                    "go on from this optimizer's checkpoint",
                    because="it has no outer state, which would begin anew",
                    do="load one written with save_with_optimizer(), or begin a new run",
                )
            loop.load_state_dict(state[_KEY])
            return {key: value for key, value in state.items() if key != _KEY}

        self._carrying = [
            last.register_state_dict_post_hook(save),
            last.register_load_state_dict_pre_hook(load),
        ]

    def remove(self) -> None:
        """Give the optimizer back as it was."""
        self.unfollow()
        for handle in self._carrying:
            handle.remove()
        self._carrying.clear()

    def _last(self, what: str) -> torch.optim.Optimizer:
        if not self._optimizers:
            raise ConfigurationError(
                what,
                because="this outer loop was built without one",
                do="pass the optimizer to OuterLoop, or keep outer.state_dict() yourself",
            )
        return self._optimizers[-1]


def _check_never_skipped(optimizer: torch.optim.Optimizer) -> None:
    # Fused optimizers are called for every step, and skip it by themselves.
    if not getattr(optimizer, "_step_supports_amp_scaling", False) and _is_scaled():
        raise ConfigurationError(
            "follow an optimizer that a GradScaler steps",
            because="it skips steps whose gradients overflow: workers would count differently",
            do="call outer.step() after every scaler.step(optimizer), or train in bf16",
        )


def _is_scaled() -> bool:
    """Whether an enabled GradScaler has called what runs: an optimizer has no trace of it."""
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code is _SCALED_STEP:
            return cast(torch.amp.GradScaler, frame.f_locals["self"]).is_enabled()
    return False
