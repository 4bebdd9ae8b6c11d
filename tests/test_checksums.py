"""Checksums by column sums: what they tell apart, on any device and from any place in memory."""

from hashlib import sha256

import pytest
import torch

from thinwire.checksums import anchor_digest
from wire_reference import column_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


def random_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    if dtype is torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool()
    size = numel * dtype.itemsize
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [(n, torch.float32) for n in (0, 1, 2, 3, 1023, 2047, 2048, 2049, 4099, 8192)]
    + [(10_007, dtype) for dtype in DTYPES],
)
def test_the_digest_is_that_of_the_words(numel: int, dtype: torch.dtype) -> None:
    """Words of all bits, NaN among them, so that most columns overflow."""
    x = random_bits(numel, dtype)
    by_hand = sha256(column_sums(x.view(torch.uint8).numpy().tobytes())).digest()[:8]
    assert anchor_digest(x) == by_hand


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numel", [0, 1, 10_007])
def test_a_gpu_has_the_same_digest(numel: int) -> None:
    x = random_bits(numel, torch.float32)
    assert anchor_digest(x.cuda()) == anchor_digest(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_digest_does_not_depend_on_where_a_vector_lies(offset: int, dtype: torch.dtype) -> None:
    x = random_bits(5003, dtype)
    assert anchor_digest(x[offset:]) == anchor_digest(x[offset:].clone())
    assert anchor_digest(x[::offset]) == anchor_digest(x[::offset].clone())
