"""Orthonormal transforms of the rows of a codec: Top-k then keeps coefficients, not numbers.

A 64x64 block has a transform in two dimensions, C = M X M^T; other rows are cut into runs of 64,
the last perhaps shorter, and each has one of its length, c = M x. M is orthonormal, so that the
squared error of coefficients is that of numbers, and M^T inverts it.

All machines get the same bits, whatever their number of threads, order of sums, fused or reduced
precision: M is made of integers of 25 bits, a vector is scaled by a power of two and rounded to
integers of 24, and no sum of 64 products of them leaves the integers that fp64 holds exactly. The
error is about that of fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_SIDE = 64
_MATRIX_BITS = 25
_VALUE_BITS = 23
_EXPONENT = 0x7FF << 52  # of an fp64


class Transform(ABC):
    """An orthonormal change of basis within the rows of a grouping."""

    id: str
    """Part of the codec's id."""

    @abstractmethod
    def matrix(self, n: int) -> Tensor:
        """M for n numbers, n in 1..64: fp64 [n, n] on the host, a basis vector in each row."""

    def forward(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The coefficients of the rows of `x`, in a new tensor; what leaves fp32 saturates.

        Args:
            x: fp32 [rows, columns].
            shape: of a row, (64, 64) or (columns,).
        """
        return _in_parts(x, shape, lambda n: _integers(self, n, x.device).mT)

    def inverse(self, c: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The rows whose coefficients are `c`, in a new tensor; see `forward`."""
        return _in_parts(c, shape, lambda n: _integers(self, n, c.device))


@dataclass(frozen=True, slots=True)
class DCT(Transform):
    """The discrete cosine transform: M_ij = sqrt(2/n) cos(pi i (2j + 1) / 2n), row 0 over sqrt 2.

    Smooth blocks have few large coefficients.

    Source: DeMo (arXiv 2411.19870), DCT-II of chunks of 64. Differs: a shorter run has a transform
    of its own length, where the released code takes the largest divisor below 65 of a dimension.

    >>> DCT().forward(torch.ones(1, 4), (4,))
    tensor([[2., 0., 0., 0.]])
    """

    id = "dct"

    def matrix(self, n: int) -> Tensor:
        """The cosines."""
        i, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
        cosines = (torch.pi * i * (2 * j + 1) / (2 * n)).cos() * (2 / n) ** 0.5
        cosines[0] /= 2**0.5
        return cosines


@dataclass(frozen=True, slots=True)
class Hadamard(Transform):
    """Sums and differences: M_ij = (-1)^(number of ones in the bits of i and j) / sqrt(n).

    It spreads a single large number over its block. Where n is no power of two, M is block diagonal
    with those powers of two that add up to n, the largest first: 44 = 32 + 8 + 4.

    Source: J. Sylvester (1867), Thoughts on inverse orthogonal matrices.

    >>> Hadamard().forward(torch.tensor([[3.0, 1.0, 1.0, 1.0]]), (4,))
    tensor([[3., 1., 1., 1.]])
    """

    id = "hadamard"

    def matrix(self, n: int) -> Tensor:
        """Plus and minus one over the root of a power of two."""
        powers = [2**bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
        return torch.block_diag(*(_sylvester(power) for power in powers))


def _sylvester(n: int) -> Tensor:
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < n:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs / n**0.5


@cache
def _integers(transform: Transform, n: int, device: torch.device) -> Tensor:
    """M in units of 2^-25."""
    return (transform.matrix(n) * 2.0**_MATRIX_BITS).round().to(device)


def _in_parts(x: Tensor, shape: tuple[int, ...], right: Callable[[int], Tensor]) -> Tensor:
    # In fp64 sixteen rows of 4096 fit a core's cache; a GPU wants few and large calls.
    parts = x.split(16) if x.device.type == "cpu" else (x,)
    return torch.cat([_apply(part, shape, right) for part in parts])


def _apply(x: Tensor, shape: tuple[int, ...], right: Callable[[int], Tensor]) -> Tensor:
    """`x` times the matrices that `right` has for each length, on both sides of a block."""
    rows, columns = x.shape
    wide, whole = x.double(), columns // _SIDE * _SIDE
    out = _product(wide[:, :whole].reshape(-1, _SIDE), right(_SIDE))
    if len(shape) == 2:
        turned = out.view(rows, *shape).mT.reshape(-1, _SIDE)
        out = _product(turned, right(_SIDE)).view(rows, *shape).mT
    out = out.reshape(rows, whole)
    if whole < columns:
        out = torch.cat([out, _product(wide[:, whole:], right(columns - whole))], 1)
    # An input that is not finite has become NaN, and stays so.
    return out.clamp_(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).float()


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """`x` [m, n] times `matrix` [n, n] in units of 2^-25: fp64, exact once `x` is rounded.

    With |x_i| <= 2^24 and rows of length 2^25, no sum of products exceeds sqrt(n) 2^49 <= 2^52.
    """
    largest = x.abs().amax(-1, keepdim=True)
    # The power of two at or below it; of an infinity or NaN infinity, and x / infinity is NaN.
    power = (largest.view(torch.int64) & _EXPONENT).view(torch.float64).clamp_(min=2.0**-300)
    integers = (x / power).mul_(2.0**_VALUE_BITS).round_()
    return (integers @ matrix).mul_(power * 2.0 ** -(_VALUE_BITS + _MATRIX_BITS))
