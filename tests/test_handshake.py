import pytest
import torch

from thinwire.handshake import weights_digest

# Summed in one block, and in more.
SIZES = [1, 3, 16_385, (1 << 20) + 1, (2 << 20) + 7]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def numbers(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) % 251).to(dtype)


@pytest.mark.parametrize(
    ("numel", "dtype"), [*((n, torch.float32) for n in SIZES), *((16_385, d) for d in DTYPES)]
)
def test_one_number_changes_the_digest(numel: int, dtype: torch.dtype) -> None:
    x = numbers(numel, dtype)
    told = weights_digest({"w": x})
    assert weights_digest({"w": x.clone()}) == told
    for place in {0, numel // 2, numel - 1}:
        y = x.clone()
        y[place] = 251
        assert weights_digest({"w": y}) != told


def test_the_last_bit_of_any_dtype_counts() -> None:
    """fp32 would hold neither of these."""
    for one, other in (
        (torch.tensor([2**40 + 1]), torch.tensor([2**40])),
        (torch.tensor([1.0 + 2**-40], dtype=torch.float64), torch.ones(1, dtype=torch.float64)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        (torch.tensor([float("nan")]), torch.tensor([float("inf")])),
    ):
        assert weights_digest({"w": one}) != weights_digest({"w": other})


@pytest.mark.parametrize("numel", [3, 16_385])
def test_names_shapes_and_places_count(numel: int) -> None:
    a, b = numbers(2 * numel), numbers(2 * numel).flip(0)
    told = weights_digest({"a": a, "b": b})
    assert weights_digest({"b": b, "a": a}) == told
    for other in ({"a": b, "b": a}, {"a": a, "c": b}, {"a": a.view(2, numel), "b": b}):
        assert weights_digest(other) != told


def test_blocks_that_change_places_are_found() -> None:
    """Their column sums are equal; what they are hashed with tells where they lie."""
    x = torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(0))
    assert weights_digest({"w": x}) != weights_digest({"w": x.flip(0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 3, 16_387])
def test_frozen_weights_may_be_held_in_half_the_bits(numel: int, dtype: torch.dtype) -> None:
    assert weights_digest({"w": numbers(numel, dtype)}) == weights_digest({"w": numbers(numel)})


def test_it_does_not_depend_on_how_a_tensor_lies() -> None:
    x = numbers(129 * 257).view(129, 257)
    assert weights_digest({"w": x.t()}) == weights_digest({"w": x.t().contiguous()})
    z = torch.view_as_complex(x[:, :256].reshape(-1, 2).clone())
    assert weights_digest({"w": z.conj()}) == weights_digest({"w": z.conj().resolve_conj()})
    assert weights_digest({"w": z.conj()}) != weights_digest({"w": z})
    assert weights_digest({"w": torch.nn.Parameter(x)}) == weights_digest({"w": x})
