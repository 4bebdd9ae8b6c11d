"""Data parallelism: the mean *gradient* goes to the worker's own optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.blocks import LazyVector, StreamedVector, block_numel, spans
from thinwire.checksums import column_sums, digest_of
from thinwire.errors import ConfigurationError, check
from thinwire.following import is_nested_step
from thinwire.live_weights import LiveVector, LiveWeights, local_shard, whole_tensor
from thinwire.outer.optimizers import OuterOptimizer
from thinwire.outer.overlap import Delay, FragmentContext, OuterState, Overlap

_Settings = list[dict[str, Any]]

# The state that takes an optimizer's gradients, by the optimizer's id: two would each find half of
# them. A live state holds its optimizers, so their ids are not reused.
_OWNERS = weakref.WeakValueDictionary[int, "_GradientState"]()


class _GradientState(OuterState):
    """Takes gradients out of `optimizer.step()` and puts their mean in before the real step.

    A pre-hook keeps the gradients and leaves None behind, so the user's own call of `step()` finds
    nothing to do, whatever the optimizer. The settings of that moment are kept too: a scheduler may
    have moved the learning rate on before the mean arrives.
    """

    def __init__(self, live: LiveWeights, names: Sequence[str], clip_norm: float | None) -> None:
        self.live, self._names, self._clip_norm = live, tuple(names), clip_norm
        self._vector = LiveVector(live, names)
        self._captured: dict[torch.optim.Optimizer, _Settings] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self._sent: list[Tensor] = []
        self._stepping = False
        for optimizer in live.optimizers:
            check(
                id(optimizer) not in _OWNERS,
                "average the gradients of this optimizer",
                because="another outer loop does so already",
                do="call close() of that loop first, or build a new optimizer",
            )
            _OWNERS[id(optimizer)] = self
        # Weak, so that a dropped loop lets go of its optimizers.
        capture = weakref.WeakMethod(self._capture)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            method = capture()
            if method is not None:
                method(optimizer, args, kwargs)

        # A compiled step() would compile its hooks, too.
        untraced: Any = torch.compiler.disable(hook)
        self._hooks = [o.register_step_pre_hook(untraced) for o in live.optimizers]
        live.to_release.add(self)

    def _capture(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._stepping or is_nested_step(optimizer):
            return
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                "average gradients of an optimizer that is stepped with a closure",
                because="the closure computes them after the exchange",
                do="call backward() first and step() without arguments",
            )
        self._check_capture(optimizer)
        self._captured[optimizer] = [_settings(group) for group in optimizer.param_groups]
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._gradients[parameter], parameter.grad = parameter.grad, None

    def _check_capture(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._captured:
            raise ConfigurationError(
                "step an optimizer twice under ddp",
                because="the gradients of its last step were not exchanged yet",
                do="call outer.step() after every optimizer.step()",
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigurationError(
                "average gradients of a fused optimizer under a GradScaler",
                because="they are unscaled inside its step, after the exchange",
                do="build the optimizer with fused=False, or train in bf16",
            )
        if any(p.grad is not None and p.grad.is_sparse for p in _parameters(optimizer)):
            raise ConfigurationError(
                "average sparse gradients",
                because="payloads are dense vectors",
                do="build the embedding with sparse=False",
            )

    @contextmanager
    def measure(self) -> Generator[LazyVector]:
        if len(self._captured) < len(self.live.optimizers):
            raise ConfigurationError(
                "exchange gradients",
                because="not every optimizer was stepped since the last exchange "
                "(a GradScaler skips the step when a gradient overflows)",
                do="call optimizer.step() before outer.step(); prefer bf16 to fp16 with ddp",
            )
        tensors = [self.live.parameters[name] for name in self._names]
        found, self._gradients = self._gradients, {}
        # Kept, because `apply` writes the mean into their memory.
        self._sent = [found[p] if p in found else torch.zeros_like(p) for p in tensors]
        vector = self._vector.over(list(map(local_shard, self._sent)))
        if self._clip_norm is None or not found:
            yield vector
            return
        norm = whole_tensor(nn.utils.get_total_norm(found.values()))
        scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        yield LazyVector(
            vector.numel, vector.device, lambda part, out: vector.read(part, out).mul_(scale)
        )

    def apply(self, mean: StreamedVector) -> None:
        parameters = [self.live.parameters[name] for name in self._names]
        # A worker that resumed with a round in flight has none.
        gradients, self._sent = self._sent or list(map(torch.empty_like, parameters)), []
        means = self._vector.over(list(map(local_shard, gradients)))
        for part, values in mean.blocks():
            means.mix(part, values, 0.0)
        means.close()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._stepping = True
        try:
            for optimizer, settings in self._captured.items():
                _step_with(optimizer, settings)
        finally:
            self._stepping = False
            self._captured = {}
        for name in self._names:
            self.live.parameters[name].grad = None

    def flat_anchor(self) -> Tensor:
        return self.live.read(self._names)

    def digest(self) -> bytes:
        weights = self._vector.open()
        sums = column_sums(torch.empty(0, device=weights.device))
        # Block by block, without a copy of the weights: a block is a number of whole rows.
        for part in spans(0, weights.numel, block_numel(weights.device)):
            sums += column_sums(weights.read(part))
        return digest_of(sums)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass

    def release(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.live.optimizers:
            _OWNERS.pop(id(optimizer), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientAveraging(OuterOptimizer):
    """g = (1/K) sum_k g_k; theta = InnerOpt(theta, g): the corner where every step is a round.

    Workers exchange the gradient itself, and each worker's own optimizer takes the outer step, so
    no anchor is kept. Clipping in an optimizer pre-hook acts on the mean, as in DDP.

    Args:
        clip_norm: each worker's gradient is clipped to this norm before it is sent,
            g_k min(1, clip_norm / |g_k|), with the norm over all parameters; None does not clip.

    Raises:
        ConfigurationError: a norm that is not above 0.

    Differs: a parameter without a gradient counts as one of zeros, so weight decay acts on it.

    >>> GradientAveraging(clip_norm=1.0)
    GradientAveraging(clip_norm=1.0)
    """

    clip_norm: float | None = field(default=None, metadata={"describe_default": False})

    elastic_refusal = "a newcomer needs the state of the others' optimizers, which no round carries"

    def __post_init__(self) -> None:
        check(
            self.clip_norm is None or self.clip_norm > 0,
            f"clip gradients to a norm of {self.clip_norm}",
            because="nothing would be sent",
            do="pass a number above 0, such as 1.0, or None for no clipping",
        )

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Gradients are averaged at every step or not at all."""
        check(
            sync_every == 1 and overlap == Delay(),
            f"average gradients every {sync_every} steps with {overlap}",
            because="every step waits for the mean of its own gradients",
            do="pass sync_every=1 without overlap, or an outer optimizer such as tw.outer.SGD",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """An outer state that hooks the worker's optimizers."""
        if not context.live.optimizers:
            raise ConfigurationError(
                "average gradients without an optimizer",
                because="the worker's own optimizer takes the step",
                do="pass the optimizer to OuterLoop",
            )
        check(
            len(context.names) == len(context.live.parameters),
            "average gradients fragment by fragment",
            because="the optimizer steps all parameters at once, and there are several fragments: "
            "the method asks for them, or some parameters are sharded over the ranks of a worker "
            "and others are not",
            do="leave fragments out, or take an outer optimizer such as tw.outer.SGD",
        )
        return _GradientState(context.live, context.names, self.clip_norm)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in cast(list[Tensor], group["params"])]


def _step_with(optimizer: torch.optim.Optimizer, settings: _Settings) -> None:
    """Step with the settings that held when the gradients were taken, then put today's back."""
    today = [_settings(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, settings, strict=True):
        group.update(then)
    try:
        optimizer.step()
    finally:
        for group, now in zip(optimizer.param_groups, today, strict=True):
            group.update(now)
