"""Orthonormal transforms of the rows of a codec: Top-k then keeps coefficients, not numbers.

A 64x64 block gets a two-dimensional transform, C = M X M^T; any other row is cut into runs of 64
(the last may be shorter), and each run is transformed by itself, c = M x. M is orthonormal: M^T
inverts it, and the squared error of the coefficients is that of the numbers.

All machines get the same bits, whatever their number of threads, order of summation, or use of
fused or reduced precision: M consists of 25-bit integers, a vector is scaled by a power of two and
rounded to 24-bit integers, and fp64 holds every sum of 64 products of the two exactly. The error is
about that of fp32.
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
        """The coefficients of the rows of `x`, in a new tensor; values beyond fp32 saturate.

        Args:
            x: fp32 [rows, columns].
            shape: shape of a row, (64, 64) or (columns,).
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
        j = torch.arange(n, dtype=torch.float64, device="cpu")
        i = j[:, None]
        cosines = (torch.pi * i * (2 * j + 1) / (2 * n)).cos() * (2 / n) ** 0.5
        cosines[0] /= 2**0.5
        return cosines


@dataclass(frozen=True, slots=True)
class Hadamard(Transform):
    """Sums and differences: M_ij = (-1)^(number of ones in the bits of i and j) / sqrt(n).

    Spreads a single large number over its block. If n is not a power of two, M is block diagonal;
    the blocks have the powers of two that add up to n, the largest first: 44 = 32 + 8 + 4.

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
    signs = torch.ones(1, 1, dtype=torch.float64, device="cpu")
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
    """`x` times the matrix that `right` gives for a run's length; blocks get it on both sides."""
    rows, columns = x.shape
    wide, whole = x.double(), columns // _SIDE * _SIDE
    out = _product(wide[:, :whole].reshape(-1, _SIDE), right(_SIDE))
    if len(shape) == 2:
        turned = out.view(rows, *shape).mT.reshape(-1, _SIDE)
        out = _product(turned, right(_SIDE)).view(rows, *shape).mT
    out = out.reshape(rows, whole)
    if whole < columns:
        out = torch.cat([out, _product(wide[:, whole:], right(columns - whole))], 1)
    # Rows with an infinity or NaN have become NaN, and stay so.
    return out.clamp_(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).float()


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """`x` [m, n] times `matrix` [n, n] in units of 2^-25: fp64, exact once `x` is rounded.

    With |x_i| <= 2^24 and rows of length 2^25, no sum of products exceeds sqrt(n) 2^49 <= 2^52.
    """
    largest = x.abs().amax(-1, keepdim=True)
    # The power of two at or below it; infinity if it is not finite, which makes the product NaN.
    power = (largest.view(torch.int64) & _EXPONENT).view(torch.float64).clamp_(min=2.0**-300)
    integers = (x / power).mul_(2.0**_VALUE_BITS).round_()
    return (integers @ matrix).mul_(power * 2.0 ** -(_VALUE_BITS + _MATRIX_BITS))
