"""Live weights read and written in parts: any dtype, any strides, across parameters."""

import pytest
import torch
from torch import Tensor, nn

from thinwire.blocks import VectorPart, spans
from thinwire.codecs import TopK
from thinwire.codecs.grouping import Blocks
from thinwire.fragments.layout import Layout
from thinwire.live_weights import LiveVector, LiveWeights

SHAPES = {"a": (3, 5), "none": (0,), "b": (7,), "c": (130, 129)}


def model(dtype: torch.dtype = torch.float32, *, transposed: bool = False) -> nn.ParameterDict:
    draws = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=draws).to(dtype) for name, shape in SHAPES.items()}
    if transposed:
        made["c"] = made["c"].t().contiguous().t()
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in made.items()})


def vector_of(parameters: nn.ParameterDict) -> LiveVector:
    return LiveVector(LiveWeights(parameters, []), list(SHAPES))


def flat(parameters: nn.ParameterDict) -> Tensor:
    return torch.cat([parameters[name].detach().reshape(-1).float() for name in SHAPES])


def parts(numel: int) -> list[VectorPart]:
    blocks = [piece.part for piece in TopK(groups=Blocks()).bind(Layout.of(SHAPES)).pieces]
    return [
        *spans(0, numel, 17),
        VectorPart([(4, 20)]),
        VectorPart([(20, 24), (2, 6), (14, 16)]),
        *blocks,
    ]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_are_those_of_the_whole(dtype: torch.dtype, transposed: bool) -> None:
    parameters = model(dtype, transposed=transposed)
    vector, whole = vector_of(parameters), flat(parameters)
    weights = vector.open()
    assert torch.equal(weights.whole(), whole)
    assert any(len(part.ranges) > 60 for part in parts(vector.numel))  # blocks of a wider matrix
    for part in parts(vector.numel):
        assert torch.equal(weights.read(part), part.read(whole))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kept_share"), [(torch.float32, 0.0), (torch.float32, 0.25), (torch.bfloat16, 0.25)]
)
def test_what_is_written_in_parts_is_in_the_parameters(
    dtype: torch.dtype, kept_share: float, transposed: bool
) -> None:
    parameters = model(dtype, transposed=transposed)
    vector, before = vector_of(parameters), flat(parameters)
    for part in parts(vector.numel):
        weights, values = vector.open(), torch.randn(part.numel)
        assert torch.equal(weights.as_written(part, values), values.to(dtype).float())
        expected = flat(parameters)
        mixed = torch.lerp(values, part.read(expected), kept_share)
        part.write(expected, mixed.to(dtype).float())
        weights.mix(part, values, kept_share)
        weights.close()
        assert torch.equal(flat(parameters), expected)
    assert not torch.equal(before, flat(parameters))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(bad: float) -> None:
    parameters = model()
    with torch.no_grad():
        parameters["c"].fill_(3e38)  # whose sum is not
        assert vector_of(parameters).open().is_finite()
        parameters["b"][3] = bad
    assert not vector_of(parameters).open().is_finite()
