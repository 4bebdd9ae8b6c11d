"""Shapes of a model's parameters, without their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from thinwire.errors import check
from thinwire.fragments.layers import Part, parts_of
from thinwire.fragments.layout import Layout, wire_order
from thinwire.optim.roles import parameter_roles
from thinwire.plan.units import count_text

# Blocks of codecs are 64x64, and shards are cut after a multiple of 64 rows.
_SIDE = 64
_LARGEST = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A trainable parameter.

    Args:
        part: name, size and layer.
        shape: shape of the tensor.
        role: "matrix", "embedding", "head" or "vector".
    """

    part: Part
    shape: tuple[int, ...]
    role: str

    @staticmethod
    def of(name: str, shape: tuple[int, ...], *, layer: int | None, role: str) -> Weight:
        """A parameter with one name.

        Args:
            name: name of the parameter.
            shape: shape of the tensor.
            layer: index in the model's stack of layers, from 0; None outside of it.
            role: "matrix", "embedding", "head" or "vector".

        >>> Weight.of("norm", (3,), layer=None, role="vector").part.numel
        3
        """
        part = Part(name=name, aliases=(name,), numel=math.prod(shape), layer=layer)
        return Weight(part=part, shape=shape, role=role)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shapes of a model's trainable parameters.

    Args:
        name: name to display.
        weights: parameters, in the order of the model.

    Raises:
        ConfigurationError: no parameter of the model is trainable.

    >>> shape = Shape.of_model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    >>> shape.parameters, shape.layers, shape.parts[2].name
    (13, 2, '2.weight')
    """

    name: str
    weights: tuple[Weight, ...]

    def __post_init__(self) -> None:
        because, do = "none of its parameters is trained", "pass a model that is not frozen"
        check(bool(self.weights), f"plan for {self.name}", because=because, do=do)

    @staticmethod
    def of_model(model: nn.Module, *, name: str | None = None) -> Shape:
        """The shape of `model`, which may be on the meta device.

        Args:
            model: the model that goes to `OuterLoop`, before it is sharded.
            name: default the name of its class.

        Raises:
            ConfigurationError: nothing in it is trainable.

        >>> Shape.of_model(nn.Linear(2, 3)).weights[0].shape
        (3, 2)
        """
        roles = parameter_roles(model)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        weights = tuple(
            Weight(part=part, shape=shapes[n], role=roles[n].value)
            for n, part in parts_of(model).items()
        )
        return Shape(name=type(model).__name__ if name is None else name, weights=weights)

    @staticmethod
    def of_size(parameters: int, layers: int) -> Shape:
        """A stack of equal layers, without an embedding.

        If N is not a multiple of L, the first layers have one parameter more. A layer is a matrix,
        and a vector for the remainder.

        Args:
            parameters: N, exactly.
            layers: L.

        Raises:
            ConfigurationError: L < 1 or N < L, or N L above 1e15.

        >>> shape = Shape.of_size(7_000_000_001, 32)
        >>> shape.name, shape.parameters, shape.layers
        ('7B in 32 layers', 7000000001, 32)
        """
        what = f"plan for {parameters} parameters in {layers} layers"
        because = "there is at least one layer, and a parameter in each"
        check(1 <= layers <= parameters, what, because=because, do="pass parameters >= layers >= 1")
        # N parameters in L layers have about sqrt(N L) rows, and a plan looks at each.
        because = "layers are planned row by row, and the plan would not come to an end"
        do = f"pass parameters and layers whose product is at most {_LARGEST:.0e}"
        check(parameters * layers <= _LARGEST, what, because=because, do=do)
        each, more = divmod(parameters, layers)
        weights = tuple(w for layer in range(layers) for w in _layer(layer, each + (layer < more)))
        return Shape(name=f"{count_text(parameters)} in {layers} layers", weights=weights)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parameters, from which fragments are planned."""
        return tuple(weight.part for weight in self.weights)

    @property
    def parameters(self) -> int:
        """N, the number of trained parameters."""
        return sum(weight.part.numel for weight in self.weights)

    @property
    def layers(self) -> int:
        """L, the number of layers with trained parameters."""
        return len({part.layer for part in self.parts if part.layer is not None})

    def layout(self, names: Iterable[str]) -> Layout:
        """The places of the parameters `names` in their fragment's vector."""
        wanted = {weight.part.name: weight for weight in self.weights}
        shapes = {name: wanted[name].shape for name in names}
        roles = {name: wanted[name].role for name in shapes}
        return Layout.of({name: shapes[name] for name in wire_order(shapes)}, roles)


def _layer(layer: int, numel: int) -> list[Weight]:
    """About as many rows as columns, both multiples of 64, so that codecs find whole blocks."""
    columns = _SIDE * max(1, math.isqrt(numel) // _SIDE)
    rows = numel // columns // _SIDE * _SIDE
    shapes = {"matrix": (rows, columns), "vector": (numel - rows * columns,)}
    return [
        Weight.of(f"layers.{layer}.{role}", shape, layer=layer, role=role)
        for role, shape in shapes.items()
        if math.prod(shape)
    ]
