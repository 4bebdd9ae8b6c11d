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


A, B = numbers(32_770), numbers(32_770).flip(0)
X = numbers(129 * 257).view(129, 257)
Z = torch.view_as_complex(X[:, :256].reshape(-1, 2).clone())
BLOCKS = torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # fp32 would hold neither of these.
        ({"w": torch.tensor([2**40 + 1])}, {"w": torch.tensor([2**40])}),
        ({"w": torch.ones(1).double() + 2**-40}, {"w": torch.ones(1).double()}),
        ({"w": torch.tensor([1 + 1j])}, {"w": torch.tensor([1 - 1j])}),
        ({"w": torch.tensor([float("nan")])}, {"w": torch.tensor([float("inf")])}),
        ({"a": A, "b": B}, {"a": B, "b": A}),
        ({"a": A[:3], "b": B[:3]}, {"a": B[:3], "b": A[:3]}),
        ({"a": A, "b": B}, {"a": A, "c": B}),
        ({"a": A, "b": B}, {"a": A.view(2, 16_385), "b": B}),
        ({"w": Z.conj()}, {"w": Z}),
    ],
)
def test_the_last_bit_and_names_shapes_and_places_count(one, other) -> None:
    assert weights_digest(one) != weights_digest(other)


def test_blocks_that_change_places_are_found() -> None:
    """Their column sums are equal; what they are hashed with tells where they lie."""
    assert weights_digest({"w": BLOCKS}) != weights_digest({"w": BLOCKS.flip(0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 3, 16_387])
def test_frozen_weights_may_be_held_in_half_the_bits(numel: int, dtype: torch.dtype) -> None:
    assert weights_digest({"w": numbers(numel, dtype)}) == weights_digest({"w": numbers(numel)})


def test_it_does_not_depend_on_order_or_on_how_a_tensor_lies() -> None:
    assert weights_digest({"b": B, "a": A}) == weights_digest({"a": A, "b": B})
    assert weights_digest({"w": X.t()}) == weights_digest({"w": X.t().contiguous()})
    assert weights_digest({"w": Z.conj()}) == weights_digest({"w": Z.conj().resolve_conj()})
    assert weights_digest({"w": torch.nn.Parameter(X)}) == weights_digest({"w": X})
