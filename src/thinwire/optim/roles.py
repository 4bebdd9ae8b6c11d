"""What each parameter of a model is: a matrix, an embedding, an output head or a vector.

Muon treats hidden matrices only. Which parameters those are is read off the module tree: off the
class of the module that owns a parameter, and off what the model itself says is its head. It is
never read off a name: in MuLoCo's released code a hidden layer named "overhead" moves to AdamW.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigurationError


class Role(enum.Enum):
    """What kind of parameter it is, to an optimizer that treats each kind in its own way.

    >>> [role.name for role in Role]
    ['MATRIX', 'EMBEDDING', 'HEAD', 'VECTOR']
    """

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """How a parameter stores its matrices, by an id that a checkpoint can hold.

    `unfold(parameter)` is [..., fan_out, fan_in]; `fold(unfolded, shape)` is its inverse.

    >>> LAYOUTS["in_out"].unfold(torch.zeros(3, 5)).shape
    torch.Size([5, 3])
    """

    id: str
    unfold: Callable[[Tensor], Tensor]
    fold: Callable[[Tensor, torch.Size], Tensor]
    stacked: bool
    """Whether dimensions before the last two count separate matrices."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _unfold_kernel(tensor: Tensor) -> Tensor:
    return tensor.flatten(1)


def _fold_kernel(matrix: Tensor, shape: torch.Size) -> Tensor:
    return matrix.reshape(shape)


def _unfold_transposed_kernel(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).flatten(1)


def _fold_transposed_kernel(matrix: Tensor, shape: torch.Size) -> Tensor:
    rows, columns, *kernel = shape
    return matrix.reshape(columns, rows, *kernel).transpose(0, 1)


_OUT_IN = MatrixLayout(
    id="out_in", unfold=_identity, fold=lambda unfolded, _: unfolded, stacked=True
)
_IN_OUT = MatrixLayout(
    id="in_out", unfold=lambda tensor: tensor.mT, fold=lambda unfolded, _: unfolded.mT, stacked=True
)
_KERNEL = MatrixLayout(id="kernel", unfold=_unfold_kernel, fold=_fold_kernel, stacked=False)
_TRANSPOSED_KERNEL = MatrixLayout(
    id="transposed_kernel",
    unfold=_unfold_transposed_kernel,
    fold=_fold_transposed_kernel,
    stacked=False,
)

LAYOUTS: dict[str, MatrixLayout] = {
    layout.id: layout for layout in (_OUT_IN, _IN_OUT, _KERNEL, _TRANSPOSED_KERNEL)
}
"""Every layout by its id.

* `out_in`: [..., out, in], as nn.Linear and Mixtral's experts; leading dimensions count matrices.
* `in_out`: [..., in, out], as the Conv1D of GPT-2 and the experts of GPT-OSS.
* `kernel`: [out, in, k...], a convolution; one matrix [out, in * k...].
* `transposed_kernel`: [in, out, k...], a transposed convolution; one matrix [out, in * k...].
"""


def parameter_roles(
    model: nn.Module, overrides: Mapping[str, Role] | None = None
) -> dict[str, Role]:
    """Say what each parameter is, from where it sits in the module tree.

    In this order: at most one dimension, a norm's gain, or a stack of expert biases is VECTOR; an
    nn.Embedding's or nn.EmbeddingBag's is EMBEDDING, so a head tied to one is EMBEDDING too; the
    output head's is HEAD; all else is MATRIX. The output head is what `get_output_embeddings()`
    returns, for the first module of the tree that has such a method and returns a module; without
    one, it is the last module with a parameter of two or more dimensions (embeddings aside), if
    that parameter has the shape of some embedding's.

    What the tree does not tell is a MATRIX: a bare position table [1, T, C], for instance, or the
    head of a classifier. `overrides` is for those.

    Args:
        model: any module; tied parameters count once, under the first of their names.
        overrides: roles by name, which win over everything above.

    Returns:
        A role for every name in `model.named_parameters()`, in that order.

    Raises:
        ConfigurationError: `overrides` names a parameter that the model does not have, or makes a
            MATRIX of one with fewer than two dimensions.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9))
    >>> [role.name for role in parameter_roles(model).values()]
    ['EMBEDDING', 'MATRIX', 'HEAD', 'VECTOR']

    Source: MuLoCo, arXiv 2505.23725, for which roles Muon leaves to AdamW; the rules are ours.
    """
    named = dict(model.named_parameters())
    overrides = overrides or {}
    _check_overrides(named, overrides)
    vectors, embeddings, heads = _vectors(model), _embeddings(model), _heads(model)
    found = {name: _role(p, vectors, embeddings, heads) for name, p in named.items()}
    return found | dict(overrides)


def parameter_layouts(model: nn.Module) -> dict[str, MatrixLayout]:
    """Say how each parameter of two or more dimensions stores its matrices.

    Convolutions are known by their class. Storage as (in, out) is known by what a module says of
    itself: `nx` and `nf` (transformers' Conv1D) or `is_transposed` (transformers' experts).

    Args:
        model: any module; tied parameters count once, with the layout of their first owner.

    Returns:
        A layout for every name in `model.named_parameters()` with two or more dimensions.

    >>> {name: layout.id for name, layout in parameter_layouts(nn.Conv1d(2, 3, 5)).items()}
    {'weight': 'kernel'}

    Source: ours.
    """
    layouts: dict[nn.Parameter, MatrixLayout] = {}
    for module, parameter in _owned(model):
        layouts.setdefault(parameter, _layout(module, parameter))
    return {name: layouts[p] for name, p in model.named_parameters() if p.ndim >= 2}


def _role(
    parameter: nn.Parameter,
    vectors: set[nn.Parameter],
    embeddings: set[nn.Parameter],
    heads: set[nn.Parameter],
) -> Role:
    if parameter in vectors:
        return Role.VECTOR
    if parameter in embeddings:
        return Role.EMBEDDING
    return Role.HEAD if parameter in heads else Role.MATRIX


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Every parameter with each module that holds it directly; tied ones come more than once."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            yield module, parameter


def _vectors(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for module, parameter in _owned(model) if _is_vector(module, parameter)}


def _is_vector(module: nn.Module, parameter: nn.Parameter) -> bool:
    # A norm over several dimensions has a gain of as many; experts, as transformers declares them,
    # stack their biases as [E, out].
    if parameter.ndim <= 1 or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    return parameter.ndim == 2 and isinstance(getattr(module, "is_transposed", None), bool)


def _embeddings(model: nn.Module) -> set[nn.Parameter]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {parameter for module, parameter in _owned(model) if isinstance(module, kinds)}


def _heads(model: nn.Module) -> set[nn.Parameter]:
    declared = _declared_head(model)
    return _last_if_like_an_embedding(model) if declared is None else set(declared.parameters())


def _declared_head(model: nn.Module) -> nn.Module | None:
    # The whole tree, for the model may sit in a wrapper (DistributedDataParallel, a trainer's).
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module):
            return head
    return None


def _last_if_like_an_embedding(model: nn.Module) -> set[nn.Parameter]:
    embeddings = _embeddings(model)
    owners = [
        module
        for module, parameter in _owned(model)
        if parameter.ndim >= 2 and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    last = set(owners[-1].parameters(recurse=False)) if owners else set[nn.Parameter]()
    shapes = {embedding.shape for embedding in embeddings}
    return {parameter for parameter in last if parameter.shape in shapes}


def _layout(module: nn.Module, parameter: nn.Parameter) -> MatrixLayout:
    convolutions = nn.modules.conv
    if isinstance(module, convolutions._ConvTransposeNd):  # pyright: ignore[reportPrivateUsage]
        return _TRANSPOSED_KERNEL
    if isinstance(module, convolutions._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return _KERNEL
    return _IN_OUT if _stores_in_out(module, parameter) else _OUT_IN


def _stores_in_out(module: nn.Module, parameter: nn.Parameter) -> bool:
    if getattr(module, "is_transposed", None) is True:
        return True
    fans = (getattr(module, "nx", None), getattr(module, "nf", None))
    return fans == tuple(parameter.shape)


def _check_overrides(named: Mapping[str, nn.Parameter], overrides: Mapping[str, Role]) -> None:
    for name, role in overrides.items():
        if name not in named:
            raise ConfigurationError(
                f"override the role of {name!r}",
                because="the model has no parameter of that name",
                do="take a name from dict(model.named_parameters())",
            )
        shape = tuple(named[name].shape)
        if role is Role.MATRIX and len(shape) < 2:
            raise ConfigurationError(
                f"make a matrix of {name!r}",
                because=f"a matrix has two dimensions or more, and its shape is {shape}",
                do="give it Role.VECTOR, or leave it out of the overrides",
            )
