"""Sums of the rows of a matrix in an order that is the same on every machine.

Levels are sums, and the order in which a library adds is its own affair: another processor, another
version, other bytes. Two numbers have one sum, so an order that only ever adds two leaves nothing
open.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sum_by_halves(x: Tensor) -> Tensor:
    """The sum of each row, by adding its second half to its first until one number is left.

    A row is followed by zeros up to a power of two of numbers. A sum of zeros is +0.

    Args:
        x: fp32 [rows, n] with n >= 1.

    Returns:
        fp32 [rows, 1].

    >>> sum_by_halves(torch.tensor([[1e8, 1.0, -1e8, 1.0, 3.0]]))  # (1e8 + 3 - 1e8) + (1 + 1)
    tensor([[2.]])
    """
    n = x.shape[1]
    half = 1 << max(0, (n - 1).bit_length() - 1)
    if n == 2 * half:
        total = x[:, :half] + x[:, half:]
    else:
        total = x[:, :half].clone()
        total[:, : n - half].add_(x[:, half:])
    while half > 1:
        half //= 2
        total[:, :half].add_(total[:, half : 2 * half])
    return total[:, :1] + 0.0  # -0 + 0 is +0


def root_mean_square(x: Tensor) -> Tensor:
    """sqrt(mean(x^2)) of each row, for numbers of any size that fp32 has.

    With n numbers and s = 2^-floor(log2(max |x|)), within 2^-126 .. 2^126:

        sqrt(sum_by_halves((s x)^2)) * (1 / sqrt(n)) / s

    Args:
        x: fp32 [rows, n] with n >= 1.

    Returns:
        fp32 [rows, 1].

    >>> root_mean_square(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
    tensor([[3.5355e+30],
            [0.0000e+00]])
    """
    scaled = x.abs()
    exponent = (254 - (scaled.amax(1, keepdim=True).view(torch.int32) >> 23)).clamp_(1, 253)
    scale, inverse = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    total = sum_by_halves(scaled.mul_(scale).square_())
    # torch's root in fp32 may be an ulp off (Intel's VML); taken in fp64 it is correctly rounded.
    root = total.double().sqrt_().float()
    return root.mul_(1.0 / math.sqrt(x.shape[1])).mul_(inverse)
