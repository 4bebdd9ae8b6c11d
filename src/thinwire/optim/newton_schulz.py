"""Orthogonalisation of matrices by a Newton-Schulz iteration: the heart of Muon.

torch's own `torch.optim._muon._zeropower_via_newtonschulz` does not fit: it takes a single
(a, b, c) for all iterations where MuLoCo tunes one per iteration, it takes one 2-D matrix at a time
where a transformer has dozens of the same shape, and it is private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import check

PAPER_COEFFICIENTS: tuple[tuple[float, float, float], ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""(a, b, c) of each of the five iterations, from the released code of MuLoCo (arXiv 2505.23725)."""

# Rows of zeros stay zeros; since |X| = 1, |x|^2 of any other row is far above this.
_LEAST_ROW = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class NewtonSchulz:
    """Which iteration orthogonalises: the arguments of `orthogonalise` that a method chooses.

    Args:
        coefficients: one (a, b, c) for each iteration, which costs three matrix products.
        preconditioned: whether rows are scaled first, so that an iteration may be left out.

    Raises:
        ConfigurationError: there is no iteration, or one is not three numbers.

    >>> len(NewtonSchulz().coefficients), len(NewtonSchulz.turbo().coefficients)
    (5, 4)
    """

    coefficients: tuple[tuple[float, ...], ...] = PAPER_COEFFICIENTS
    preconditioned: bool = False

    def __post_init__(self) -> None:
        check(
            set(map(len, self.coefficients)) == {3},
            f"iterate with coefficients {self.coefficients}",
            because="every iteration has three, and there is at least one",
            do="pass ((a, b, c), ...)",
        )

    @classmethod
    def turbo(cls) -> NewtonSchulz:
        """Four preconditioned iterations with the paper's last four coefficients: 12 products.

        Source: Turbo-Muon, arXiv 2512.04632.
        """
        return cls(coefficients=PAPER_COEFFICIENTS[1:], preconditioned=True)


def orthogonalise(
    matrices: Tensor,
    coefficients: Sequence[Sequence[float]] = PAPER_COEFFICIENTS,
    dtype: torch.dtype | None = None,
    *,
    preconditioned: bool = False,
) -> Tensor:
    """Replace every singular value by about one: U S V^T becomes about U V^T.

        X = M / max(||M||_F, 1e-7)
        X = S X,   S_ii = (sum_j |(X X^T)_ij|)^(-1/2)  if preconditioned
        A = X X^T;   X = a X + (b A + c A A) X        once for each (a, b, c)

    S raises small singular values and leaves none above 1, but changes the result a little: U V^T
    is then that of S M.

    With the paper's coefficients, singular values of at least 0.005 ||M||_F end up between 0.97 and
    1.12; smaller ones are raised in proportion, zeros stay zeros.

    Args:
        matrices: [..., m, n], real, any strides; each matrix is orthogonalised by itself.
        coefficients: one (a, b, c) for each iteration.
        dtype: of the iteration, default bf16; norms are taken in fp32 or better whatever it is.
        preconditioned: whether to scale the rows (of a tall matrix, the columns) by S.

    Returns:
        [..., m, n] in the dtype of `matrices`; new memory, never a view of `matrices`.

    Differs: the norm is clamped from below as in torch, where the paper's code adds 1e-7 to it.

    >>> orthogonalise(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).round()
    tensor([[ 1.,  0.],
            [ 0., -1.]])

    Source: K. Jordan et al., "Muon" (2024), and MuLoCo, arXiv 2505.23725; S is the scaling of
    almost orthogonal layers (arXiv 2208.03160), which Turbo-Muon (arXiv 2512.04632) puts here.
    """
    if matrices.numel() == 0:
        return torch.empty_like(matrices)
    # X X^T is the smaller of the two Gram matrices only where X is wider than tall.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = _normalised(matrices.mT if tall else matrices, dtype or torch.bfloat16)
    x = x.flatten(0, -3) if x.ndim > 2 else x[None]
    x = _iterate(x, coefficients, preconditioned=preconditioned)
    x = x.mT if tall else x
    return x.reshape(matrices.shape).to(matrices.dtype)


def _normalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    precise = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=precise)
    # Divided in fp32 and rounded as it is written: no quotient takes memory in fp32.
    out = matrices.new_empty(matrices.shape, dtype=dtype)
    # A matrix of zeros gives zeros and not NaN.
    return torch.div(matrices, norms.clamp(min=1e-7), out=out)


def _iterate(x: Tensor, coefficients: Sequence[Sequence[float]], *, preconditioned: bool) -> Tensor:
    dtype, wide = x.dtype, _product_dtype(x)
    for index, (a, b, c) in enumerate(coefficients):
        x = x.to(wide)
        gram = torch.bmm(x, x.mT).to(dtype)
        if preconditioned and index == 0:
            # One product is enough for both: that of S X is S X X^T S.
            scale = gram.float().abs().sum(-1, keepdim=True).clamp(min=_LEAST_ROW).rsqrt()
            x, gram = (x * scale).to(dtype).to(wide), (gram * scale * scale.mT).to(dtype)
        gram = gram.to(wide)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        gram = gram.to(dtype).to(wide)
        x = torch.baddbmm(x, gram, x, beta=a).to(dtype)
        del gram  # before the next is made
    return x


def _product_dtype(x: Tensor) -> torch.dtype:
    """fp32 for bf16 on a CPU that would multiply it number by number, 12 to 50 times slower.

    Products are rounded to bf16 all the same.
    """
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _multiplies_bf16()
    return torch.float32 if is_slow else x.dtype


@cache
def _multiplies_bf16() -> bool:
    ops: Any = torch.ops
    return torch.backends.mkldnn.is_available() and ops.mkldnn._is_mkldnn_bf16_supported()
