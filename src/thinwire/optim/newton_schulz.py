"""Orthogonalisation of matrices by a Newton-Schulz iteration: the heart of Muon.

torch has one of its own, `torch.optim._muon._zeropower_via_newtonschulz`, which does not serve: it
takes a single (a, b, c) for all iterations where MuLoCo tunes one per iteration, it takes one 2-D
matrix at a time where a transformer has dozens of the same shape, and it is private.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError

__all__ = ["PAPER_COEFFICIENTS", "orthogonalise"]

PAPER_COEFFICIENTS: tuple[tuple[float, float, float], ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""(a, b, c) of each of the five iterations, from the released code of MuLoCo (arXiv 2505.23725)."""


def orthogonalise(
    matrices: Tensor,
    coefficients: Sequence[tuple[float, float, float]] = PAPER_COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> Tensor:
    """Replace every singular value by about one: U S V^T becomes about U V^T.

        X = M / max(||M||_F, eps)
        A = X X^T;   X = a X + (b A + c A A) X        once for each (a, b, c)

    With the paper's coefficients, singular values of at least 0.005 ||M||_F end up between 0.97 and
    1.12; smaller ones are raised in proportion, zeros stay zeros.

    Args:
        matrices: [..., m, n], real, any strides; each matrix is treated by itself.
        coefficients: one (a, b, c) for each iteration.
        dtype: of the iteration; norms are taken in fp32 or better whatever it is.
        eps: floor under the Frobenius norm, so that a zero matrix gives zeros and not NaN.

    Returns:
        [..., m, n] in the dtype of `matrices`; new memory, never a view of `matrices`.

    Raises:
        ConfigurationError: `matrices` has fewer than two dimensions or is not real floating point.

    Differs: the norm is clamped from below as in torch, where the paper's code adds `eps` to it.

    >>> orthogonalise(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).round()
    tensor([[ 1.,  0.],
            [ 0., -1.]])

    Source: K. Jordan et al., "Muon" (2024), and MuLoCo, arXiv 2505.23725.
    """
    _check(matrices)
    if matrices.numel() == 0:
        return torch.empty_like(matrices)
    # X X^T is the smaller of the two Gram matrices only where X is wider than tall.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = _normalised(matrices.mT if tall else matrices, eps).to(dtype)
    x = _iterate(x.reshape(-1, *x.shape[-2:]), coefficients)
    x = x.mT if tall else x
    return x.reshape(matrices.shape).to(matrices.dtype)


def _normalised(matrices: Tensor, eps: float) -> Tensor:
    precise = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=precise)
    return matrices / norms.clamp(min=eps)


def _iterate(x: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _check(matrices: Tensor) -> None:
    if matrices.ndim >= 2 and matrices.is_floating_point():
        return
    raise ConfigurationError(
        f"orthogonalise a {matrices.dtype} tensor of shape {tuple(matrices.shape)}",
        because="the iteration takes real floating-point matrices [..., m, n]",
        do="pass at least two dimensions, or leave this parameter to AdamW",
    )
