"""Which parameters belong to which layer of a model, by its module tree and never by their names.

A language model keeps its layers in one container: transformers in an `nn.ModuleList`, torchtitan
in an `nn.ModuleDict`, a toy in an `nn.Sequential`. Containers hold other things too (experts, the
two matrices of an MLP, the whole model), but none of these outweighs the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names under which torch.compile and activation checkpointing hold the module they wrap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A trainable parameter, as the rules that plan fragments see it.

    Args:
        name: its first name in `model.named_parameters()`.
        aliases: all its names, `name` first; tied parameters have several.
        numel: elements of the whole tensor, even if this rank holds a shard of it.
        layer: index in the model's stack of layers, from 0; None outside of it.

    >>> Part(name="h.0.w", aliases=("h.0.w",), numel=6, layer=0).layer
    0
    """

    name: str
    aliases: tuple[str, ...]
    numel: int
    layer: int | None


def find_layers(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter in the model's stack of layers.

    See `stack_of`.

    Args:
        model: any module, also wrapped, compiled or sharded.

    Returns:
        Layer, counted from 0, by name in `model.named_parameters()`; a parameter shared by several
        layers belongs to the first. Empty if there is no stack.

    >>> find_layers(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2)))
    {'0.weight': 0, '2.weight': 1, '2.bias': 1}
    """
    layer_of: dict[nn.Parameter, int] = {}
    for index, layer in enumerate(stack_of(model)):
        for parameter in layer.parameters():
            layer_of.setdefault(parameter, index)
    return {name: layer_of[p] for name, p in model.named_parameters() if p in layer_of}


def stack_of(model: nn.Module) -> list[nn.Module]:
    """The layers of `model`, in order; [] if it has no stack of layers.

    A stack is an `nn.ModuleList`, or an `nn.Sequential` or `nn.ModuleDict` with at least two
    children of one class. Children without parameters do not count, and embedding tables are not
    layers. The stack with the most parameters wins; of equal ones, the outermost.

    >>> len(stack_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))))
    2
    """
    # modules() goes from the outside in, and max() keeps the first of equals.
    return max(map(_stack_in, model.modules()), key=_numel)


def parts_of(model: nn.Module) -> dict[str, Part]:
    """The trainable parameters of `model`, by name, in the order of `model.named_parameters()`.

    >>> tied = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    >>> tied["head"].weight = tied["embed"].weight
    >>> parts_of(tied)["embed.weight"].aliases
    ('embed.weight', 'head.weight')
    """
    layers = find_layers(model)
    aliases: dict[nn.Parameter, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(alias)
    return {
        name: Part(name=name, aliases=tuple(aliases[p]), numel=p.numel(), layer=layers.get(name))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _stack_in(module: nn.Module) -> list[nn.Module]:
    """The layers that `module` holds; [] if it is not a stack."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    layers = [child for child in module.children() if any(True for _ in child.parameters())]
    if all(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in layers):
        return []
    plain = [_unwrapped(layer) for layer in layers]
    # FSDP2 gives a module a subclass of its own class.
    is_alike = any(all(isinstance(layer, type(one)) for layer in plain) for one in plain)
    return layers if isinstance(module, nn.ModuleList) or (len(layers) > 1 and is_alike) else []


def _unwrapped(module: nn.Module) -> nn.Module:
    for attribute in WRAPPERS:
        inner = getattr(module, attribute, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return module


def _numel(layers: Sequence[nn.Module]) -> int:
    return sum(p.numel() for p in {p for layer in layers for p in layer.parameters()})
