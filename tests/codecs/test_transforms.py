"""Transforms against their formulas in fp64, and that no machine computes other bits."""

import math

import pytest
import torch
from torch import Tensor

from thinwire.codecs import DCT, Hadamard, Transform
from thinwire.codecs.transforms import _integers, _product
from thinwire.fragments.layout import CHUNK
from thinwire.testing import vector

TRANSFORMS = [DCT(), Hadamard()]
BLOCK, RUN = (64, 64), (CHUNK,)
LENGTHS = (1, 2, 3, 7, 8, 44, 63, 64)
# Of 24 bits for a number and 25 for an entry of the matrix.
ROUNDING = 5e-7


def rows(count: int = 3, columns: int = CHUNK) -> Tensor:
    return vector(count * columns).view(count, columns)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_matrices_are_orthonormal_and_their_integers_alike_everywhere(transform: Transform) -> None:
    for n in range(1, 65):
        m = transform.matrix(n)
        assert torch.allclose(m @ m.T, torch.eye(n, dtype=torch.float64), atol=1e-14)
        # Another library's cosine may differ in its last bit, which must not turn a rounding.
        distance = (m * 2.0**25).frac().abs().sub(0.5).abs().min()
        assert float(distance) > 1e-6
        # As the docstring of the product claims: no sum of terms leaves the integers of fp64.
        length = torch.linalg.vector_norm(_integers(transform, n, torch.device("cpu")), dim=0)
        assert float(length.max()) * 2**24 * math.sqrt(n) < 2**53


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [BLOCK, RUN, *((n,) for n in (*LENGTHS, 65, 1009))])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_inverse_inverts_and_lengths_stay(
    transform: Transform, shape: tuple[int, ...], scale: float
) -> None:
    x = rows(columns=math.prod(shape)) * scale
    coefficients = transform.forward(x, shape)
    norms = [torch.linalg.vector_norm(v.double()) for v in (x, coefficients)]
    assert float(norms[1] / norms[0]) == pytest.approx(1.0, abs=ROUNDING)
    left = (transform.inverse(coefficients, shape) - x).double()
    assert float(torch.linalg.vector_norm(left) / norms[0]) < ROUNDING


# -- the same bits on every machine ----------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [BLOCK, RUN])
def test_threads_precision_and_autocast_do_not_change_a_bit(
    transform: Transform, shape: tuple[int, ...]
) -> None:
    x = rows(7) * torch.logspace(-20, 20, 7)[:, None]
    expected = transform.inverse(x, shape)
    precision = torch.get_float32_matmul_precision()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(transform.inverse(x, shape), expected)
    finally:
        torch.set_float32_matmul_precision(precision)
    # Row by row: other kernels, for other sizes of matrices.
    alone = [transform.inverse(row[None], shape) for row in x]
    assert torch.equal(torch.cat(alone), expected)


def test_the_order_of_a_sum_does_not_change_a_bit_as_it_does_in_fp32() -> None:
    x, m = rows(64).view(-1, 64), _integers(DCT(), 64, torch.device("cpu"))
    assert torch.equal(_product(x.double().flip(1), m.flip(0)), _product(x.double(), m))
    control = DCT().matrix(64).float().T
    assert not torch.equal(x.flip(1) @ control.flip(0), x @ control)


# -- numbers at the edges --------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [BLOCK, RUN, (100,)])
def test_what_is_not_finite_stays_so(
    transform: Transform, bad: float, shape: tuple[int, ...]
) -> None:
    x = rows(2, math.prod(shape))
    x[1, 70] = bad
    out = transform.inverse(x, shape)
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).all()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_leaves_the_range_of_fp32_saturates(transform: Transform) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.full((1, CHUNK), largest)
    for sign in (1, -1):
        assert float(transform.forward(sign * x, BLOCK)[0, 0]) == sign * largest
    assert not transform.forward(torch.zeros(1, CHUNK), BLOCK).any()
