"""Roles of parameters: matrix, embedding, output head or vector.

Muon treats hidden matrices only. The module tree tells which parameters those are: the class of the
module that owns a parameter, and the head that the model itself declares. Names never do: in
MuLoCo's released code a hidden layer named "overhead" moves to AdamW.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.errors import check, unknown_name


class Role(enum.Enum):
    """Kind of a parameter, for optimizers that treat kinds differently.

    >>> [role.name for role in Role]
    ['MATRIX', 'EMBEDDING', 'HEAD', 'VECTOR']
    """

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """How a parameter stores its matrices; `LAYOUTS` maps ids, which fit a checkpoint, to layouts.

    * `out_in`: [..., out, in], as nn.Linear and Mixtral's experts; earlier ones count matrices.
    * `in_out`: [..., in, out], as the Conv1D of GPT-2 and the experts of GPT-OSS.
    * `kernel`: [out, in, k...], a convolution; one matrix [out, in * k...].
    * `transposed_kernel`: [in, out, k...], a transposed convolution; one matrix [out, in * k...].

    Args:
        stacked: dimensions before the last two count separate matrices; otherwise those after the
            first two belong to a kernel.
        transposed: the dimension of the inputs comes before that of the outputs.

    >>> LAYOUTS["in_out"].unfold(torch.zeros(3, 5)).shape
    torch.Size([5, 3])
    """

    stacked: bool
    transposed: bool

    def unfold(self, tensor: Tensor) -> Tensor:
        """`tensor` as [..., fan_out, fan_in]."""
        if self.stacked:
            return tensor.mT if self.transposed else tensor
        return (tensor.transpose(0, 1) if self.transposed else tensor).flatten(1)

    def fold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `unfold` for a tensor of `shape`."""
        if self.stacked:
            return matrix.mT if self.transposed else matrix
        if not self.transposed:
            return matrix.reshape(shape)
        return matrix.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)


LAYOUTS: dict[str, MatrixLayout] = {
    "out_in": MatrixLayout(stacked=True, transposed=False),
    "in_out": MatrixLayout(stacked=True, transposed=True),
    "kernel": MatrixLayout(stacked=False, transposed=False),
    "transposed_kernel": MatrixLayout(stacked=False, transposed=True),
}
"""Every layout by its id."""


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

    A bare position table [1, T, C] or the head of a classifier is therefore a MATRIX, unless
    `overrides` says otherwise.

    Args:
        model: any module; tied parameters count once, under the first of their names.
        overrides: roles by name, which take precedence over everything above.

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
    for name, role in (overrides or {}).items():
        if name not in named:
            raise unknown_name(f"override the role of {name!r}", name, named)
        shape = tuple(named[name].shape)
        check(
            role is not Role.MATRIX or len(shape) >= 2,
            f"make a matrix of {name!r}",
            because=f"a matrix has two dimensions or more, and its shape is {shape}",
            do="give it Role.VECTOR, or leave it out of the overrides",
        )
    owned = list(_owned(model))
    embeddings = [p for module, p in owned if isinstance(module, _TABLES)]
    roles = dict.fromkeys(_heads(model, embeddings), Role.HEAD)
    roles |= dict.fromkeys(embeddings, Role.EMBEDDING)
    roles |= {p: Role.VECTOR for module, p in owned if _is_vector(module, p)}
    return {name: roles.get(p, Role.MATRIX) for name, p in named.items()} | dict(overrides or {})


_TABLES = (nn.Embedding, nn.EmbeddingBag)


def parameter_layouts(model: nn.Module) -> dict[str, str]:
    """Say how each parameter of two or more dimensions stores its matrices.

    Convolutions are known by their class. Storage as (in, out) is known by attributes of a
    module: `nx` and `nf` (transformers' Conv1D) or `is_transposed` (transformers' experts).

    Args:
        model: any module; tied parameters count once, with the layout of their first owner.

    Returns:
        The id of a layout for every name in `model.named_parameters()` with two or more dimensions.

    >>> parameter_layouts(nn.Conv1d(2, 3, 5))
    {'weight': 'kernel'}

    Source: ours.
    """
    layouts: dict[nn.Parameter, str] = {}
    for module, parameter in _owned(model):
        layouts.setdefault(parameter, _layout(module, parameter))
    return {name: layouts[p] for name, p in model.named_parameters() if p.ndim >= 2}


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Every parameter with each module that holds it directly; tied ones occur more than once."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            yield module, parameter


def _is_vector(module: nn.Module, parameter: nn.Parameter) -> bool:
    # The gain of a norm over several dimensions has as many itself; transformers' experts stack
    # their biases as [E, out].
    if parameter.ndim <= 1 or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    return parameter.ndim == 2 and isinstance(getattr(module, "is_transposed", None), bool)


def _heads(model: nn.Module, embeddings: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    # The whole tree, because the model may be wrapped (by DistributedDataParallel or a trainer).
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module):
            return list(head.parameters())
    owners = [m for m, p in _owned(model) if p.ndim >= 2 and not isinstance(m, _TABLES)]
    shapes = {embedding.shape for embedding in embeddings}
    last = owners[-1].parameters(recurse=False) if owners else ()
    return [parameter for parameter in last if parameter.shape in shapes]


def _layout(module: nn.Module, parameter: nn.Parameter) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return "transposed_kernel" if module.transposed else "kernel"
    fans = (getattr(module, "nx", None), getattr(module, "nf", None))
    is_in_out = getattr(module, "is_transposed", None) is True or fans == tuple(parameter.shape)
    return "in_out" if is_in_out else "out_in"
