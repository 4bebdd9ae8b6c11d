"""Newton-Schulz against the singular value decomposition, which says what it should have done."""

import pytest
import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.optim import newton_schulz
from thinwire.optim.newton_schulz import PAPER_COEFFICIENTS, NewtonSchulz, orthogonalise

SHAPES = [(64, 64), (64, 128), (128, 32), (7, 13), (13, 7), (1, 9), (17, 1), (1, 1), (101, 103)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_svd(matrix: Tensor, coefficients=PAPER_COEFFICIENTS) -> Tensor:
    """U p(S / ||S||) V^T in fp64, with p the composed polynomial."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 0.03)],
)
def test_is_the_polynomial_of_the_singular_values(shape, dtype, tolerance):
    matrix = random(*shape).double()
    assert relative_error(orthogonalise(matrix, dtype=dtype), by_svd(matrix)) < tolerance
    if dtype is torch.float64:
        for count in range(5):
            some = PAPER_COEFFICIENTS[:count]
            assert relative_error(orthogonalise(matrix, some, dtype), by_svd(matrix, some)) < 1e-11


def test_documented_range_of_singular_values():
    values = torch.logspace(torch.log10(torch.tensor(0.005)).item(), 0, 10_001).double()
    for a, b, c in PAPER_COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    assert 0.97 < float(values.min()) < float(values.max()) < 1.12


@pytest.mark.parametrize("shape", [(0, 3), (7, 5), (64, 64), (3, 17, 129)])
def test_a_cpu_without_bf16_multiplies_in_fp32_and_rounds_alike(shape, monkeypatch):
    matrices, multiply, used = random(*shape), torch.bmm, list[torch.dtype]()

    def watched(left: Tensor, right: Tensor) -> Tensor:
        used.append(left.dtype)
        return multiply(left, right)

    monkeypatch.setattr(torch, "bmm", watched)
    got: list[Tensor] = []
    for has_bf16 in (True, False):
        monkeypatch.setattr(newton_schulz, "_multiplies_bf16", lambda answer=has_bf16: answer)
        got.append(orthogonalise(matrices))
    each = 5 if matrices.numel() else 0
    assert used == each * [torch.bfloat16] + each * [torch.float32]
    torch.testing.assert_close(*got, rtol=0, atol=2**-7)
    if each:
        # As far from fp64 as bf16 is.
        wanted = orthogonalise(matrices, dtype=torch.float64)
        assert 0.001 < relative_error(got[1], wanted) < 0.01


def test_transposes_strides_and_scales_do_not_matter():
    matrix = random(20, 12)
    assert torch.equal(orthogonalise(matrix.mT), orthogonalise(matrix).mT)
    assert torch.equal(orthogonalise(matrix * 2**-12), orthogonalise(matrix * 2**40))
    wide = random(2, 10, 14)[:, ::2, 1::3]
    assert torch.equal(orthogonalise(wide), orthogonalise(wide.contiguous()))
    for shape in [(0, 4), (4, 0), (0, 0), (0, 4, 5), (3, 0, 5)]:
        assert orthogonalise(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (5, 7), (64, 64), (3, 17, 129)])
def test_preconditioned_it_is_the_iteration_of_scaled_rows(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrices.select(-2 if shape[-2] <= shape[-1] else -1, 0).zero_()
    wide = matrices if shape[-2] <= shape[-1] else matrices.mT
    scale = (wide @ wide.mT).abs().sum(-1, keepdim=True).clamp(min=1e-30).rsqrt()
    scaled = scale * wide
    # Divided by its norm, it would be another input of the iteration than the scaled rows are.
    for a, b, c in PAPER_COEFFICIENTS[1:]:
        gram = scaled @ scaled.mT
        scaled = a * scaled + (b * gram + c * gram @ gram) @ scaled
    wanted = scaled if shape[-2] <= shape[-1] else scaled.mT
    turbo = NewtonSchulz.turbo()
    found = orthogonalise(
        matrices, turbo.coefficients, torch.float64, preconditioned=turbo.preconditioned
    )
    # The scale is taken in fp32.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("coefficients", [(), ((1.0, 2.0),)])
def test_what_is_no_iteration_is_refused(coefficients) -> None:
    with pytest.raises(ConfigurationError, match="three"):
        NewtonSchulz(coefficients=coefficients)


def test_nan_is_not_hidden_and_zeros_stay_next_to_others():
    stack = random(3, 3, 3)
    stack[0, 1, 1], stack[1] = torch.nan, 0.0
    got = orthogonalise(stack)
    assert got[0].isnan().all()
    assert torch.equal(got[1], torch.zeros(3, 3))
    assert float(torch.linalg.svdvals(got[2]).min()) > 0.9


def test_the_norm_of_fp16_is_taken_in_fp32():
    # The norm is 256,000, and fp16 ends at 65,504.
    matrix = torch.full((256, 256), 1000.0, dtype=torch.float16)
    largest = torch.linalg.svdvals(orthogonalise(matrix, PAPER_COEFFICIENTS[:1]).float())[0]
    assert float(largest) == pytest.approx(sum(PAPER_COEFFICIENTS[0]), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_the_input_untouched(dtype):
    matrix = random(6, 4, dtype=dtype)
    before = matrix.clone()
    got = orthogonalise(matrix, ())
    assert got.dtype == dtype
    got.zero_()
    assert torch.equal(matrix, before)
