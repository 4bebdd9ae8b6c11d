"""Muon for hidden matrices and AdamW for the rest, as one torch optimizer.

The optimizer knows nothing of models: `muon_groups` reads a model's roles once and writes them
into ordinary parameter groups, each of which names the rule that steps its tensors.
"""

# torch's optimizers are made of its _foreach functions, which have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from thinwire.errors import ConfigurationError, check
from thinwire.live_weights import local_shard
from thinwire.optim.checks import SCALES, check_group
from thinwire.optim.newton_schulz import NewtonSchulz, orthogonalise
from thinwire.optim.roles import LAYOUTS, MatrixLayout, Role, parameter_layouts, parameter_roles
from thinwire.optim.sharded import (
    Cut,
    check_same_gradients,
    cuts_of,
    deal,
    local_gradient,
    whole_shape,
)

BATCH_ELEMENTS = 2**24
"""Most elements that are orthogonalised at once: 64 MiB of fp32, whatever the model's size."""

# A batch takes up to 15 bytes of temporaries per element, and 20 on a CPU that multiplies bf16 in
# fp32, so a sixteenth of the parameters takes about one byte for each. Batches below the least cost
# more time than they save memory.
_SHARE, _LEAST_ELEMENTS = 16, 2**18


_ITERATION = NewtonSchulz()


def muon_groups(
    model: nn.Module,
    *,
    lr: float,
    adamw_lr: float | None = None,
    weight_decay: float,
    overrides: Mapping[str, Role] | None = None,
    iteration: NewtonSchulz = _ITERATION,
) -> list[dict[str, Any]]:
    """Divide a model's parameters into the groups that `Muon` takes.

    MATRIX goes to the rule "muon", in one group per layout; EMBEDDING and HEAD go to "adamw" with
    weight decay; VECTOR goes to "adamw" **without** it. Empty groups are left out.

    Args:
        model: any module.
        lr: learning rate of the matrices, and of the rest where `adamw_lr` is None.
        adamw_lr: learning rate of everything else.
        weight_decay: of all but vectors; the decay of a step is lr * weight_decay.
        overrides: roles by parameter name, as in `parameter_roles`.
        iteration: orthogonalises; groups hold its fields, "coefficients" and "preconditioned".

    Returns:
        Parameter groups, the same on every worker that holds the same model.

    Raises:
        ConfigurationError: as `parameter_roles`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> groups = muon_groups(model, lr=0.02, weight_decay=0.1)
    >>> [(group["rule"], len(group["params"]), group["weight_decay"]) for group in groups]
    [('muon', 1, 0.1), ('adamw', 2, 0.1), ('adamw', 2, 0.0)]

    Source: MuLoCo, arXiv 2505.23725. Differs: its code decays vectors as well.
    """
    named, roles = dict(model.named_parameters()), parameter_roles(model, overrides)
    layouts = parameter_layouts(model)
    matrices = [name for name, role in roles.items() if role is Role.MATRIX]
    by_layout = {key: [n for n in matrices if layouts[n] == key] for key in LAYOUTS}
    vectors = [name for name, role in roles.items() if role is Role.VECTOR]
    tables = [name for name, role in roles.items() if role in (Role.EMBEDDING, Role.HEAD)]
    # A group holds plain values only, so that reading a checkpoint needs no class of ours.
    muon = {"rule": "muon", "lr": lr, "weight_decay": weight_decay, **asdict(iteration)}
    rest = {"rule": "adamw", "lr": lr if adamw_lr is None else adamw_lr}
    members = [(names, muon | {"layout": key}) for key, names in by_layout.items()]
    members += [(tables, rest | {"weight_decay": weight_decay})]
    members += [(vectors, rest | {"weight_decay": 0.0})]
    return [{"params": [named[n] for n in names], **rule} for names, rule in members if names]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; AdamW for the rest; chosen group by group.

        M = momentum M + G
        X = NS(M)                                 or NS(G + momentum M) with `nesterov`
        W = (1 - lr weight_decay) W - lr scale X

    where `scale` is sqrt(fan_out / fan_in) for "spectral", 0.2 sqrt(max(fan_out, fan_in)) for "rms"
    and sqrt(max(1, fan_out / fan_in)) for "original". Groups with the rule "adamw" are stepped by
    torch's own `adamw`, bit for bit.

    M has the dtype of its parameter, as in every torch optimizer (whose `load_state_dict` casts to
    that dtype in any case); the iteration runs in bf16. Matrices of one shape are orthogonalised in
    batches of at most a sixteenth of the group's elements (but 2^18 to 2^24), or of one matrix if
    that is larger; temporaries take up to 15 bytes for each element of a batch.

    Parameters may be DTensors (FSDP2, HSDP, tensor parallelism, or several of these): the result is
    that of the unsharded optimizer. Moments and decay stay on the shards. A matrix is assembled on
    one rank of its mesh, orthogonalised there, and its shards are sent back; the ranks divide the
    matrices of one shape among them. All ranks of a mesh must take the same steps.

    Args:
        params: groups with a "rule", "muon" or "adamw", as `muon_groups` makes them. A group may
            override every argument below, and have a "layout": "out_in" (as nn.Linear), "in_out",
            "kernel" or "transposed_kernel".
        lr: learning rate, per step.
        momentum: of "muon", in [0, 1).
        nesterov: whether "muon" looks ahead by one momentum step.
        weight_decay: decoupled; a step shrinks W by lr * weight_decay.
        scale: "spectral" (MuLoCo), "rms" (update RMS like AdamW's, so that its lr carries over) or
            "original" (K. Jordan's code and torch's default).
        betas: of "adamw", each in [0, 1).
        eps: of "adamw".

    Raises:
        ConfigurationError: a group has no rule or an unknown one; a number is out of range; the
            scale or layout is unknown; a parameter is complex, or has no two dimensions for "muon";
            a DTensor is Partial, or not cut as its placements say. From `step`: a gradient is
            sparse, or some ranks of a parameter's mesh have one and others do not.

    >>> layer = nn.Linear(4, 4, bias=False)
    >>> optimizer = Muon(muon_groups(layer, lr=1.0, weight_decay=0.0))
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.eye(4)).trace().backward()
    >>> optimizer.step()
    >>> (before - layer.weight).detach().round().diag()  # G is the identity, hence so is X
    tensor([1., 1., 1., 1.])

    Source: K. Jordan et al., "Muon" (2024); MuLoCo, arXiv 2505.23725 (no Nesterov, "spectral");
    "Muon is scalable for LLM training", arXiv 2502.16982 ("rms").
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 0.02,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 1e-3,
        scale: str = "spectral",
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "layout": "out_in",
            **asdict(_ITERATION),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must have a "rule"; a refused group leaves no trace."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], _RULES)
        except ConfigurationError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in asdict(_ITERATION).items():
                group.setdefault(key, value)  # a checkpoint of an earlier version has no choice
            check_group(group, _RULES)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every parameter that has a gradient; returns what `closure` does."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        check_same_gradients(p for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            check(
                all(p.grad.layout is torch.strided for p in params),
                "step a parameter whose gradient is sparse",
                because="momentum and moments are kept for every element",
                do="build the embedding with sparse=False",
            )
            if params:
                _RULES[group["rule"]](params, group, self.state)
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Views of the same matrices in this rank's parameter, gradient and momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    cuts: tuple[Cut, ...]
    shape: tuple[int, ...]
    """Shape of the whole matrices: that of `weight` unless there are cuts."""


_Group = Mapping[str, Any]
_State = Mapping[Tensor, dict[str, Any]]
# For each parameter, as this rank holds it: weight, gradient, momentum, and how they are cut.
_Held = Iterable[tuple[Tensor, Tensor, Tensor, tuple[Cut, ...]]]


def _step_adamw(params: list[Tensor], group: _Group, state: _State) -> None:
    for p in params:
        if not state[p]:
            # On the host, as torch keeps it: otherwise the functional adamw waits for the device.
            state[p]["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state[p]["exp_avg"], state[p]["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    states = [state[p] for p in params]
    adamw(
        _shards(params),
        list(map(local_gradient, params)),
        _shards(s["exp_avg"] for s in states),
        _shards(s["exp_avg_sq"] for s in states),
        [],
        [s["step"] for s in states],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _step_muon(params: list[Tensor], group: _Group, state: _State) -> None:
    layout, weights = LAYOUTS[group["layout"]], _shards(params)
    for p in params:
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(p)
    momenta = _shards(state[p]["momentum_buffer"] for p in params)
    gradients = list(map(local_gradient, params))
    torch._foreach_mul_(momenta, group["momentum"])
    torch._foreach_add_(momenta, gradients)
    torch._foreach_mul_(weights, 1 - float(group["lr"]) * group["weight_decay"])
    cuts = [cuts_of(p, 2 if layout.stacked else p.ndim) for p in params]
    # Computed from whole parameters, so that all ranks of a mesh agree.
    most = max(_LEAST_ELEMENTS, sum(p.numel() for p in params) // _SHARE)
    most = min(most, BATCH_ELEMENTS)
    held = zip(weights, gradients, momenta, cuts, strict=True)
    for batch in _batches(_pieces(held, layout, most), most):
        _move(batch, layout, group)


def _move(batch: Sequence[_Piece], layout: MatrixLayout, group: _Group) -> None:
    """W -= lr scale NS(direction) for pieces of one shape."""
    directions = [piece.momentum for piece in batch]
    if group["nesterov"]:
        momentum = group["momentum"]
        directions = [torch.add(p.gradient, p.momentum, alpha=momentum) for p in batch]
    updates = deal(directions, batch[0].cuts, lambda ws: _orthogonalised(ws, layout, group))
    fans = layout.unfold(torch.empty(batch[0].shape, device="meta")).shape[-2:]
    size = float(group["lr"]) * SCALES[group["scale"]](*fans)
    torch._foreach_add_([piece.weight for piece in batch], updates, alpha=-size)


def _orthogonalised(tensors: Sequence[Tensor], layout: MatrixLayout, group: _Group) -> list[Tensor]:
    unfolded = [layout.unfold(tensor) for tensor in tensors]
    # A single matrix is a view, not a copy: the largest may be a good part of the model.
    stack = unfolded[0][None] if len(unfolded) == 1 else torch.stack(unfolded)
    found = orthogonalise(stack, group["coefficients"], preconditioned=group["preconditioned"])
    return [layout.fold(matrix, tensors[0].shape) for matrix in found.unbind()]


def _pieces(held: _Held, layout: MatrixLayout, most: int) -> Iterator[_Piece]:
    for *same, mine in held:
        size = 1 if mine else most
        for w, g, m in zip(*(_split(tensor, layout, size) for tensor in same), strict=True):
            shape = whole_shape(w.shape, mine)
            if math.prod(shape):
                yield _Piece(weight=w, gradient=g, momentum=m, cuts=mine, shape=shape)


def _split(tensor: Tensor, layout: MatrixLayout, most: int) -> Sequence[Tensor]:
    """Views along the first dimension of a stack of experts, of `most` elements or one expert."""
    if not layout.stacked or tensor.ndim == 2:
        return (tensor,)
    return tensor.split(max(1, most // max(1, tensor[:1].numel())))


def _batches(pieces: Iterator[_Piece], most: int) -> Iterator[Sequence[_Piece]]:
    # By the whole shape: two shapes may have equal shards on one rank and different ones on others.
    alike: defaultdict[object, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        alike[piece.shape, piece.cuts, piece.weight.dtype, piece.weight.device].append(piece)
    for same in alike.values():
        ranks = math.prod(cut.ranks for cut in same[0].cuts)
        size = ranks * max(1, most // math.prod(same[0].shape))
        yield from (same[start : start + size] for start in range(0, len(same), size))


def _shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_shard(tensor) for tensor in tensors]


_RULES: dict[str, Callable[[list[Tensor], _Group, _State], None]] = {
    "muon": _step_muon,
    "adamw": _step_adamw,
}
