"""Models of equal shape as one model, whose weights have a dimension of workers before the others.

Only modules that own parameters are changed: each computes for its worker's rows with its worker's
weights. What lies between them (attention, activations, residuals) has no weights and sees K times
the rows. That is exact as long as nothing mixes rows, which is tried out before it is used.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from thinwire.errors import ConfigurationError
from thinwire.train.workers.random_stream import draws_random_numbers
from thinwire.train.workers.worker import token_losses

# Weights that differ so much change a loss by far more than this share of it; rounding by far less.
_NOISE, _TOLERANCE = 0.1, 1e-3


def cannot_stack(because: str) -> ConfigurationError:
    """The error of a model or a run whose workers cannot be stacked."""
    return ConfigurationError(
        "simulate the workers stacked", because=because, do="pass --simulation threads"
    )


class ModelStack:
    """K models as one; afterwards the weights of each are views into the stack's.

    Args:
        models: of equal structure, on one device, in training mode.
            `own` has their parameters by name, `parameters` those of the stack.
        windows: int64 [n, time + 1], n >= 1; what the stack is tried out on, against the models.

    Raises:
        ConfigurationError: the models cannot be stacked; names the module or parameter and why.
    """

    def __init__(self, models: Sequence[nn.Module], windows: Tensor) -> None:
        self._models = list(models)
        first = self._models[0]
        _check_draws_nothing(first, windows)
        names = [name for name, _ in first.named_parameters()]
        self.own = {name: [m.get_parameter(name) for m in self._models] for name in names}
        self.parameters = {name: _stacked(self.own[name]) for name in names}
        tied = {id(first.get_parameter(name)): p for name, p in self.parameters.items()}
        self._module = copy.deepcopy(first, tied)
        self._owners = list(_wrap(self._module, len(self._models)))
        self._try_out(windows)

    @property
    def size(self) -> int:
        """K."""
        return len(self._models)

    def losses(self, windows: Tensor) -> Tensor:
        """The mean loss of each model: fp32 [K].

        Args:
            windows: int64 [K, batch, time + 1].
        """
        rows = windows.flatten(0, 1)
        for owner in self._owners:
            owner.rows = len(rows)
        return token_losses(self._module, rows).view(self.size, -1).mean(1)

    def share_gradients(self) -> None:
        """Give every model its part of the gradients, as views."""
        for name, stacked in self.parameters.items():
            parts = [None] * self.size if stacked.grad is None else stacked.grad.unbind()
            for parameter, part in zip(self.own[name], parts, strict=True):
                parameter.grad = part

    def drop_gradients(self) -> None:
        """Forget the stack's gradients; those of the models are theirs to forget."""
        for stacked in self.parameters.values():
            stacked.grad = None

    @torch.no_grad()
    def _try_out(self, windows: Tensor) -> None:
        """Compare with the models one by one, while no two of them have the same weights."""
        sample = windows[torch.arange(2 * self.size) % len(windows)].unflatten(0, (self.size, 2))
        sample = sample.to(next(iter(self.parameters.values())).device)
        before = {name: p.clone() for name, p in self.parameters.items()}
        held = [buffer.clone() for buffer in self._module.buffers()]
        generator = torch.Generator().manual_seed(0)
        try:
            for p in self.parameters.values():
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=_NOISE)
            found = self._attempt(sample)
            pairs = zip(self._models, sample, strict=True)
            wanted = torch.stack([token_losses(model, w).mean() for model, w in pairs])
        finally:
            for name, p in self.parameters.items():
                p.copy_(before[name])
        for (name, buffer), old in zip(self._module.named_buffers(), held, strict=True):
            if not torch.equal(buffer, old):
                raise cannot_stack(f"a step changes buffer {name!r}, of which each has its own")
        if not bool(((found - wanted).abs() <= _TOLERANCE * wanted.abs()).all()):
            raise cannot_stack(
                f"stacked, their losses are {found.tolist()} and not {wanted.tolist()}: a part of "
                "the model mixes the sequences of a batch"
            )

    def _attempt(self, sample: Tensor) -> Tensor:
        try:
            return self.losses(sample)
        except ConfigurationError:
            raise
        except Exception as error:  # a foreign model fails in any way it likes
            first = str(error).strip().partition("\n")[0]
            raise cannot_stack(f"the model raised {type(error).__name__}: {first}") from error


class _StackedModule(nn.Module):
    """A module that owns parameters [K, ...], applied to K equal blocks of rows."""

    def __init__(self, name: str, module: nn.Module, workers: int) -> None:
        super().__init__()
        self.name, self.workers, self.rows = name, workers, 0
        self.module: Any = module

    def blocks(self, value: Any) -> Any:
        """`value` [rows, ...] as [K, rows / K, ...]; what is alike for all rows is repeated."""
        if not isinstance(value, Tensor):
            return value
        if value.ndim and len(value) == 1:  # positions, say
            value = value.expand(self.rows, *value.shape[1:])
        if not value.ndim or len(value) % self.rows:
            raise cannot_stack(
                f"module {self.name!r} is given a tensor of shape {list(value.shape)}, "
                f"and the batch has {self.rows} sequences"
            )
        return value.unflatten(0, (self.workers, -1))


class _MappedModule(_StackedModule):
    """Any module, by torch's own map over the workers, or without it where that is the same.

    The weights of a norm, [K, n], broadcast as [K, 1, ..., n] against what it is given: one call of
    the module then does what the map does, in fewer operations. The first call tries that out.
    """

    broadcasts: bool | None = None

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """The module's output for every row, each with the weights of its worker."""
        blocks = [self.blocks(value) for value in inputs]
        named = {key: self.blocks(value) for key, value in options.items()}
        if self.broadcasts:
            return self._broadcast(blocks, named).flatten(0, 1)
        mapped = self._map(blocks, named)
        if self.broadcasts is None:
            self.broadcasts = self._agrees(mapped, blocks, named)
        return mapped.flatten(0, 1)

    def _map(self, blocks: list[Any], named: dict[str, Any]) -> Tensor:
        where = [_dimension(block) for block in blocks]
        where_named = {key: _dimension(block) for key, block in named.items()}

        def one(weights: Mapping[str, Tensor], values: list[Any], by_name: dict[str, Any]) -> Any:
            return functional_call(self.module, dict(weights), tuple(values), by_name)

        weights = dict(self.module.named_parameters())
        mapped = vmap(one, in_dims=(0, where, where_named))(weights, blocks, named)
        if not isinstance(mapped, Tensor):
            raise cannot_stack(f"module {self.name!r} returns {type(mapped).__name__}")
        return mapped

    def _broadcast(self, blocks: list[Any], named: dict[str, Any]) -> Tensor:
        ndim = max((block.ndim for block in blocks if isinstance(block, Tensor)), default=0)
        weights = {
            name: p.view(len(p), *[1] * (ndim - p.ndim), *p.shape[1:])
            for name, p in self.module.named_parameters()
        }
        return functional_call(self.module, weights, tuple(blocks), named)

    @torch.no_grad()
    def _agrees(self, mapped: Tensor, blocks: list[Any], named: dict[str, Any]) -> bool:
        try:
            found = self._broadcast(blocks, named)
        except Exception:  # a foreign module fails in any way it likes; the map has not
            return False
        return torch.equal(found, mapped)


class _StackedEmbedding(_StackedModule):
    """`nn.Embedding` of every worker as one table: row i of worker k is row k V + i of all."""

    def __init__(self, name: str, module: nn.Module, workers: int) -> None:
        super().__init__(name, module, workers)
        device = self.module.weight.device
        self._first: Any = torch.arange(workers, device=device) * self.module.num_embeddings

    def forward(self, *inputs: Any, **_: Any) -> Tensor:
        """[rows, ..., width] of int64 [rows, ...]."""
        blocks: Tensor = self.blocks(inputs[0])
        places = blocks + self._first.view(-1, *[1] * (blocks.ndim - 1))
        rows = F.embedding(places.flatten(0, 1), self.module.weight.flatten(0, 1))
        padding = self.module.padding_idx
        if padding is None:
            return rows
        # Its row gets no gradient; torch knows one such row of a table, and here are K.
        return torch.where((inputs[0] == padding)[..., None], rows.detach(), rows)


class _StackedLinear(_StackedModule):
    """`nn.Linear` of every worker as one batched product: Y[k] = X[k] W[k]^T + b[k]."""

    def forward(self, *inputs: Any, **_: Any) -> Tensor:
        """[rows, ..., out] of one [rows, ..., in]."""
        blocks: Tensor = self.blocks(inputs[0])
        kind, bias = blocks.device.type, self.module.bias
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else blocks.dtype
        flat, weight = blocks.flatten(1, -2).to(dtype), self.module.weight.to(dtype)
        y = cast(Tensor, _BatchedProduct.apply(flat, weight))
        if bias is not None:
            y += bias[:, None]
        return y.view(*blocks.shape[:-1], -1).flatten(0, 1)


class _BatchedProduct(torch.autograd.Function):
    """Y[k] = X[k] W[k]^T; the gradient of W has the strides of W.

    That of `torch.bmm(x, w.mT)` has those of W^T, and is copied as it is accumulated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        dy = gradients[0]
        return (
            torch.bmm(dy, w) if ctx.needs_input_grad[0] else None,
            torch.bmm(dy.mT, x) if ctx.needs_input_grad[1] else None,
        )


def _stacked(own: Sequence[nn.Parameter]) -> nn.Parameter:
    stacked = torch.stack([p.detach() for p in own])
    for parameter, part in zip(own, stacked.unbind(), strict=True):
        parameter.data = part
    return nn.Parameter(stacked, requires_grad=own[0].requires_grad)


def _dimension(value: Any) -> int | None:
    """The dimension of `value` that counts workers, for vmap; None if it has none."""
    return 0 if isinstance(value, Tensor) else None


def _wrap(model: nn.Module, workers: int, prefix: str = "") -> Iterator[_StackedModule]:
    """Wrap the outermost modules that own parameters, at any depth of the tree."""
    bare = next(iter(name for name, _ in model.named_parameters(recurse=False)), None)
    if bare is not None:
        raise cannot_stack(f"parameter {bare!r} belongs to the model itself and to no part of it")
    for name, child in list(model.named_children()):
        if next(child.parameters(recurse=False), None) is None:
            yield from _wrap(child, workers, f"{prefix}{name}.")
            continue
        owner = _kind_for(child)(prefix + name, child, workers)
        setattr(model, name, owner)
        yield owner


def _kind_for(module: nn.Module) -> type[_StackedModule]:
    """The fastest that computes what `module` does."""
    if type(module) is nn.Linear:
        return _StackedLinear
    # Each of these says something of a row of the table, which the joint table has elsewhere.
    if type(module) is nn.Embedding:
        special = module.max_norm, module.scale_grad_by_freq, module.sparse
        return _MappedModule if any(special) else _StackedEmbedding
    return _MappedModule


def _check_draws_nothing(model: nn.Module, windows: Tensor) -> None:
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        raise cannot_stack(f"the random state of device {device} cannot be read")
    if draws_random_numbers(model, windows[:1, :-1].to(device)):
        raise cannot_stack("the model draws random numbers, as dropout does: one stream per worker")
