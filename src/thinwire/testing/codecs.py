"""The contract every codec keeps; subclass it and say how to make yours."""

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import ExchangeError

__all__ = ["ODD_SIZES", "CodecContract", "vector"]

ODD_SIZES = (0, 1, 2, 3, 7, 64, 127, 1009, 4095, 4096, 4097, 8191)


def vector(numel: int, *, scale: float = 1.0) -> Tensor:
    """A reproducible normal vector [numel], fp32.

    >>> vector(0).shape
    torch.Size([0])
    """
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale


class CodecContract(ABC):
    """Tests for pytest: `class TestMine(CodecContract)` with `make`, and `bound` if it is lossy."""

    @abstractmethod
    def make(self) -> Codec:
        """The codec under test."""

    @abstractmethod
    def bound(self, x: Tensor) -> float:
        """The largest error |decode(encode(x)) - x| that may occur anywhere; 0 means lossless."""

    @pytest.mark.parametrize("numel", ODD_SIZES)
    def test_payload_has_the_promised_size(self, numel: int) -> None:
        """One contiguous uint8 vector of nbytes(numel), whatever the numbers."""
        codec = self.make()
        for x in (vector(numel), torch.zeros(numel), vector(numel, scale=1e-30)):
            payload = codec.encode(x)
            assert payload.dtype == torch.uint8
            assert payload.is_contiguous()
            assert tuple(payload.shape) == (codec.nbytes(numel),)

    @pytest.mark.parametrize("numel", ODD_SIZES)
    def test_round_trip_stays_within_the_bound(self, numel: int) -> None:
        """Decoding gives fp32 [numel] near what went in."""
        codec, x = self.make(), vector(numel)
        decoded = codec.decode(codec.encode(x), numel)
        assert decoded.dtype == torch.float32
        assert decoded.shape == x.shape
        assert float((decoded - x).abs().sum()) == 0 or (
            float((decoded - x).abs().max()) <= self.bound(x)
        )

    def test_encoding_is_deterministic_and_leaves_its_input_alone(self) -> None:
        """Equal numbers give equal bytes, also when they are strided in memory."""
        codec, x = self.make(), vector(1009)
        kept, strided = x.clone(), torch.stack([x, x], dim=1)[:, 0]
        first = codec.encode(x)
        assert torch.equal(x, kept)
        assert torch.equal(first, codec.encode(x))
        assert torch.equal(first, codec.encode(strided))

    def test_payload_owns_its_memory(self) -> None:
        """What was sent does not change with what it was made from."""
        codec, x = self.make(), vector(1009)
        payload = codec.encode(x)
        kept = payload.clone()
        x.zero_()
        assert torch.equal(payload, kept)

    def test_zeros_stay_zeros(self) -> None:
        """A parameter that did not move is not moved."""
        codec = self.make()
        assert not codec.decode(codec.encode(torch.zeros(4097)), 4097).any()

    def test_values_near_the_range_of_fp32_stay_finite(self) -> None:
        """Rounding must not make an infinity."""
        codec = self.make()
        x = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45])
        assert torch.isfinite(codec.decode(codec.encode(x), 4)).all()

    @pytest.mark.parametrize("change", [-1, 1])
    def test_payload_of_another_size_is_refused(self, change: int) -> None:
        """By an error that names the codec."""
        codec = self.make()
        wrong = torch.zeros(codec.nbytes(100) + change, dtype=torch.uint8)
        with pytest.raises(ExchangeError, match=codec.id):
            codec.decode(wrong, 100)

    def test_payload_of_another_dtype_is_refused(self) -> None:
        """Bytes are uint8."""
        codec = self.make()
        with pytest.raises(ExchangeError, match="uint8"):
            codec.decode(torch.zeros(codec.nbytes(100), dtype=torch.int8), 100)
