"""A worker's local weights, read and written as flat fp32 vectors.

Everything that crosses a wire is one vector per fragment, so the model's tensors are laid one after
the other in the order of `named_parameters()`. A sharded tensor (a DTensor) takes part with the
shard this rank holds: elementwise outer optimizers do not need the rest.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thinwire.blocks import LazyVector, VectorPart, copy_all, pieces_of
from thinwire.errors import ConfigurationError, NonFiniteError, check

# The worker that measures pseudo-gradients of a parameter, by the parameter's id: two workers would
# each measure the other's steps. A live worker keeps its parameters, so their ids are not reused.
_OWNERS = weakref.WeakValueDictionary[int, "LiveWeights"]()

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` this rank holds, sharing its memory: all of it unless it is a DTensor.

    >>> local_shard(torch.ones(3))
    tensor([1., 1., 1.])
    """
    # Only a DTensor has the method: no need to import torch.distributed.tensor, which is slow.
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else cast(Tensor, to_local()).detach()


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor`: a DTensor is gathered, so all its ranks must call this.

    >>> whole_tensor(torch.ones(3))
    tensor([1., 1., 1.])
    """
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def with_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Unwrap `optimizer` if it lacks an Optimizer's hooks, as Accelerate's wrapper does.

    An optimizer that has hooks and steps another inside (Lookahead, SAM) is followed itself.

    >>> sgd = torch.optim.SGD(nn.Linear(2, 1).parameters())
    >>> with_hooks(sgd) is sgd
    True
    """
    has_hooks = hasattr(optimizer, "_optimizer_step_post_hooks")
    return optimizer if has_hooks else getattr(optimizer, "optimizer", optimizer)


class LiveWeights:
    """The trainable parameters of one worker and the optimizers that train them.

    Args:
        model: any module; tied parameters count once, frozen ones do not take part.
        optimizers: all optimizers that step those parameters.

    Attributes:
        to_release: objects whose `release()` `close` calls, if they still exist.
        unsearched: optimizers at which `check_no_copies()` has not looked.

    Raises:
        ConfigurationError: `model` has no trainable parameter, one without values, a complex one or
            one whose elements share memory, an optimizer steps a foreign one, or DeepSpeed or FSDP1
            has wrapped either.

    >>> live = LiveWeights(nn.Linear(2, 1), [])
    >>> live.read(["weight", "bias"]).numel(), live.read(["bias"]).dtype
    (3, torch.float32)
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Accelerate wraps DeepSpeed's optimizer once more.
        inner = (getattr(each, "optimizer", each) for each in optimizers)
        _refuse_deepspeed(model, *optimizers, *inner)
        kinds: list[tuple[Any, type]] = [(model, nn.Module)]
        kinds += [(each, torch.optim.Optimizer) for each in optimizers]
        check(
            all(isinstance(each, kind) for each, kind in kinds),
            "build an outer loop",
            because="it takes a torch Module and a torch Optimizer (or a list of optimizers)",
            do="pass OuterLoop(model, optimizer, method)",
        )
        check(
            not any(_FSDP1 in map(_path, type(module).__mro__) for module in model.modules()),
            "train a worker with FullyShardedDataParallel (FSDP1)",
            because="after an evaluation its gathered weights hide those of an outer step",
            do="shard by fully_shard(), FSDP2; in Accelerate by fsdp_version=2",
        )
        self.model = model
        self.optimizers = tuple(map(with_hooks, optimizers))
        self._was_exchanged = False
        self.unsearched = list(self.optimizers)
        # Weak, so as not to keep alive a loop that is dropped without being closed.
        self.to_release = weakref.WeakSet[Any]()
        self.parameters: Mapping[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        if not self.parameters:
            raise ConfigurationError(
                "train this model",
                because="none of its parameters requires a gradient",
                do="pass the model that your optimizer trains, not a frozen copy of it",
            )
        for name, p in model.named_parameters():
            check(
                not (nn.parameter.is_lazy(p) or p.is_meta),
                f"train a model whose parameter {name!r} has no values",
                because="it is on the meta device, or its lazy module has not seen a batch",
                do="give all parameters their initial values before you build the outer loop",
            )
        for name, p in self.parameters.items():
            _check_parameter(name, p)
        self._check_stepped()

    @property
    def device(self) -> torch.device:
        """Where the flat vectors live: the device of the first parameter."""
        return next(iter(self.parameters.values())).device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, or of this rank's shard of it."""
        return {name: tuple(local_shard(p).shape) for name, p in self.parameters.items()}

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained, as this rank holds them: plain tensors by name."""
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        parts = (_plain_parts(name, local_shard(p)) for name, p in frozen.items())
        return {name: part for named in parts for name, part in named.items()}

    def read(self, names: Sequence[str]) -> Tensor:
        """The local weights of `names`, as a new fp32 vector."""
        return LiveVector(self, names).open().whole()

    def unflatten(self, names: Sequence[str], flat: Tensor) -> dict[str, Tensor]:
        """Views into `flat`, one for each name, in the parameters' (local) shapes."""
        shards = [local_shard(self.parameters[name]) for name in names]
        parts = flat.split([s.numel() for s in shards])
        return {n: part.view(s.shape) for n, s, part in zip(names, shards, parts, strict=True)}

    def differs_from(self, values: Mapping[str, Tensor]) -> Tensor:
        """Whether any local weights are not `values`, rounded to either's dtype: a bool []."""
        found = list[Tensor]()
        for name, value in values.items():
            weights = local_shard(self.parameters[name])
            rounded = value.to(weights.device).to(weights.dtype)
            found.append((rounded.float() != weights.float()).any().to(self.device))
        return torch.stack(found).any()

    def write(self, names: Sequence[str], flat: Tensor) -> None:
        """Put `flat` into the local weights, rounded to their dtype."""
        self._copy_in(names, self.unflatten(names, flat).values())

    def claim(self) -> None:
        """Claim all trained parameters for this worker, until `close()` or until it is collected.

        Raises:
            ConfigurationError: another worker has one of them.
        """
        for name, parameter in self.parameters.items():
            check(
                _OWNERS.get(id(parameter), self) is self,
                f"train parameter {name!r} in two outer loops at once",
                because="each would send the outer steps of the other once more",
                do="close() the other outer loop first, or give each its own part of the model",
            )
        _OWNERS.update({id(parameter): self for parameter in self.parameters.values()})

    def close(self) -> None:
        """Release what this holds, and give up the claim to the parameters."""
        for parameter in self.parameters.values():
            if _OWNERS.get(id(parameter)) is self:
                del _OWNERS[id(parameter)]
        for each in tuple(self.to_release):
            each.release()
        self.to_release.clear()

    def inner_state(self) -> list[Tensor]:
        """Every tensor that the optimizers keep, as this rank holds it."""
        kept = (its for optimizer in self.optimizers for its in optimizer.state.values())
        # Some optimizers also keep numbers of their own there, beside what belongs to a parameter.
        values = (v for its in kept for v in (its.values() if isinstance(its, Mapping) else [its]))
        return [local_shard(value) for value in values if isinstance(value, Tensor)]

    def check_finite(self, names: Sequence[str], delta: LazyVector, *, when: str) -> None:
        """Raise `NonFiniteError` if `delta` is not finite, naming the first such parameter."""
        for name, values in self.unflatten(names, delta.whole()).items():
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(
                    f"send the pseudo-gradient of parameter {name!r} at {when}",
                    because="it holds NaN or an infinity, which would reach every worker",
                    do="lower the inner learning rate or clip gradients",
                ) from None

    def check_unchanged(self) -> None:
        """Raise `ConfigurationError` if the parameters trained have changed since construction."""
        # While weights are gathered, FSDP2 shows them in place of its parameters.
        self.forget_gathered_weights()
        now = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        mine = self.parameters
        changed = sorted(n for n in now.keys() | mine.keys() if now.get(n) is not mine.get(n))
        if changed:
            raise ConfigurationError(
                f"exchange a model whose parameter {changed[0]!r} was frozen, unfrozen or replaced",
                because="the outer loop laid out the trainable parameters when it was built",
                do="load weights in place, by load_state_dict(state) without assign=True; "
                "otherwise flush() and close() this outer loop and build a new one",
            )
        if not self._was_exchanged:  # an engine may have been built around both since then
            _refuse_deepspeed(*self.parameters.values())
        self._was_exchanged = True
        self._check_stepped()

    def _check_stepped(self) -> None:
        mine = {id(p) for p in self.parameters.values()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = (p for group in groups for p in cast(list[Tensor], group["params"]))
        stray = [p for p in stepped if p.requires_grad and id(p) not in mine]
        if stray:
            raise ConfigurationError(
                f"train with an optimizer that steps a parameter of shape {list(stray[0].shape)}",
                because="the outer loop was built with a model that does not hold it",
                do="pass the module that holds all parameters the optimizer steps",
            )

    def check_no_copies(self) -> None:
        """Raise `ConfigurationError` if an optimizer keeps a copy of the weights in its state.

        Such a state is nearer to the weights than half their norm; fewer than 64 numbers may be by
        chance. Call this from the third inner step on: on a parabola, a momentum equals the weights
        after one step, but not after three. Looks at each optimizer once, when it has state.
        """
        for optimizer in [each for each in self.unsearched if each.state]:
            self.unsearched.remove(optimizer)
            sizes, sums = defaultdict[str, int](int), defaultdict[str, list[Tensor]](list)
            kept = ((p, its) for p, its in optimizer.state.items() if isinstance(its, Mapping))
            for p, name, value in ((p, *each) for p, its in kept for each in its.items()):
                # A count of steps has no dimensions, like some parameters.
                if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
                    weights = local_shard(p).float()
                    away = local_shard(value).to(weights) - weights
                    both = torch.stack([away.square().sum(), weights.square().sum()])
                    sums[name].append(both.to(self.device))
                    sizes[name] += weights.numel()
            names = [name for name, size in sizes.items() if size >= 64]
            totals = [torch.stack(sums[name]).sum(0) for name in names]
            found = torch.stack(totals).tolist() if totals else []
            for name, (distance, norm) in zip(names, found, strict=True):
                check(
                    not distance < norm / 4,
                    f"exchange weights that {type(optimizer).__name__} trains",
                    because=f"its state {name!r} is a copy of the weights, which would take them "
                    "back after an outer step",
                    do="use an optimizer without one, such as AdamW or Muon; in place of fp32 "
                    "copies of bf16 weights, use fp32 weights and torch.autocast",
                )

    def swap_in(self, values: Mapping[str, Tensor]) -> Callable[[], None]:
        """Replace the local weights by `values`; returns a function that puts them back.

        Meanwhile the local weights are kept on the device of `values`.
        """
        names = list(values)
        kept = [local_shard(self.parameters[n]).to(v.device, copy=True) for n, v in values.items()]
        self._copy_in(names, values.values())
        return partial(self._copy_in, names, kept)

    @torch.no_grad()
    def _copy_in(self, names: Sequence[str], values: Iterable[Tensor]) -> None:
        for name, value in zip(names, values, strict=True):
            local_shard(self.parameters[name]).copy_(local_shard(value))
        self.forget_gathered_weights()

    def forget_gathered_weights(self) -> None:
        """Make FSDP2 gather the weights again when the model is next used."""
        # FSDP2 may still hold weights gathered for an evaluation, which would hide the new ones.
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()


class LiveVector:
    """Some of a worker's local weights, laid one after the other.

    Args:
        live: the worker's weights.
        names: names of the parameters.

    >>> from torch import nn
    >>> from thinwire.blocks import VectorPart
    >>> linear = nn.Linear(2, 1)
    >>> vector = LiveVector(LiveWeights(linear, []), ["weight", "bias"])
    >>> weights = vector.open()
    >>> weights.mix(VectorPart([(1, 3)]), torch.tensor([5.0, 6.0]), 0.0)
    >>> weights.close()
    >>> linear.weight[0, 1].item(), linear.bias.item(), vector.numel
    (5.0, 6.0, 3)
    """

    def __init__(self, live: LiveWeights, names: Sequence[str]) -> None:
        self.live, self.names = live, tuple(names)
        sizes = [local_shard(live.parameters[name]).numel() for name in self.names]
        self.starts = [0, *accumulate(sizes)]
        self.numel = self.starts[-1]
        self._pieces = WeakKeyDictionary[VectorPart, list[tuple[int, VectorPart]]]()
        # Kept between rounds: fresh memory costs a CPU more than the arithmetic in it.
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def open(self) -> OpenWeights:
        """The weights, to be read and written in place; `close()` them after writing."""
        return self.over([local_shard(self.live.parameters[name]) for name in self.names])

    def over(self, tensors: Sequence[Tensor]) -> OpenWeights:
        """Other tensors of the parameters' (local) shapes, such as gradients, laid out alike."""
        return OpenWeights(self, tensors)

    def pieces(self, part: VectorPart) -> list[tuple[int, VectorPart]]:
        """The parameters that `part` runs over, and which part of each; cached."""
        if part not in self._pieces:
            self._pieces[part] = pieces_of(part, self.starts)
        return self._pieces[part]

    def scratch(self, numel: int) -> Tensor:
        """Memory for `numel` numbers of fp32, valid until the next call."""
        if self.live.device.type != "cpu":  # torch itself caches a GPU's memory
            return torch.empty(numel, dtype=torch.float32, device=self.live.device)
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._scratch[:numel]


class OpenWeights(LazyVector):
    """A `LiveVector` while it is read or written: the contents of the parameters, in fp32.

    Args:
        vector: the vector that was opened.
        tensors: one per parameter, or this rank's shard of it.
    """

    def __init__(self, vector: LiveVector, tensors: Sequence[Tensor]) -> None:
        super().__init__(vector.numel, vector.live.device)
        self._vector, self._shards = vector, tensors
        # Views; a parameter that is not contiguous gives a copy, which `close` writes back.
        self._flat = [shard.reshape(-1) for shard in self._shards]
        self._is_plain = all(
            flat.dtype == torch.float32 and flat.device == self.device for flat in self._flat
        )

    def read(self, part: VectorPart, out: Tensor | None = None) -> Tensor:
        """A copy of the weights, in fp32."""
        out = self._vector.scratch(part.numel) if out is None else out
        views = self._views(part)
        if self._is_plain:
            return torch.cat(views, out=out)
        for mine, view in zip(out.split(list(map(len, views))), views, strict=True):
            mine.copy_(view)
        return out

    def as_written(self, part: VectorPart, values: Tensor) -> Tensor:
        """`values` [part.numel] as `read` would return them once written: rounded to the dtypes."""
        if self._is_plain:
            return values
        pieces = self._vector.pieces(part)
        parts = zip(values.split([piece.numel for _, piece in pieces]), pieces, strict=True)
        return torch.cat([x.to(self._flat[index].dtype).float() for x, (index, _) in parts])

    def mix(self, part: VectorPart, values: Tensor, alpha: float) -> None:
        """local = alpha local + (1 - alpha) values, in fp32; with alpha 0 exactly `values`."""
        if alpha:
            values = torch.lerp(values, self.read(part), alpha)
        pieces = self._vector.pieces(part)
        parts = values.split([piece.numel for _, piece in pieces])
        if all(len(piece.ranges) == 1 for _, piece in pieces):
            copy_all(self._views(part), parts)
            return
        for (index, piece), x in zip(pieces, parts, strict=True):
            piece.write(self._flat[index], x)

    def close(self) -> None:
        """Write the changes to the parameters, and drop gathered weights."""
        for shard, flat in zip(self._shards, self._flat, strict=True):
            if flat.data_ptr() != shard.data_ptr():
                shard.copy_(flat.view(shard.shape))
        self._vector.live.forget_gathered_weights()

    def _views(self, part: VectorPart) -> list[Tensor]:
        return [piece.read(self._flat[index]) for index, piece in self._vector.pieces(part)]


def _plain_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """`tensor` by its name, or the tensors in it if it wraps some, as quantised weights do."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {name: tensor}
    parts = (_plain_parts(f"{name}.{each}", getattr(tensor, each)) for each in flatten()[0])
    return {name: part for named in parts for name, part in named.items()}


def _check_parameter(name: str, parameter: Tensor) -> None:
    _refuse_deepspeed(parameter)
    check(
        not parameter.is_complex(),
        f"train parameter {name!r}",
        because="it is complex, and its imaginary part would be lost in an exchange",
        do="keep it as real numbers (torch.view_as_real) and make it complex in forward()",
    )
    local = local_shard(parameter)
    places = zip(local.shape, local.stride(), strict=True)
    check(
        local.numel() == 0 or not any(size > 1 and stride == 0 for size, stride in places),
        f"train parameter {name!r}",
        because="several of its elements share memory, as after expand()",
        do="make it contiguous, or keep it small and expand it in forward()",
    )


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_deepspeed(*parts: object) -> None:
    for part in parts:
        # deepspeed.ops has plain torch optimizers, which are fine. ZeRO 3 marks parameters.
        kinds = [kind.__module__ for kind in type(part).__mro__]
        check(
            not (any(k.startswith("deepspeed.runtime.") for k in kinds) or hasattr(part, "ds_id")),
            "train a worker with DeepSpeed",
            because="it trains copies of the weights, and writes them over those of an outer step",
            do="leave DeepSpeed out, and shard by fully_shard() where a worker has several GPUs",
        )
