"""Tests that every codec must pass: subclass `CodecContract` and return yours from `make`."""

import re
from abc import ABC, abstractmethod
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import BoundCodec, Codec
from thinwire.errors import ExchangeError
from thinwire.fragments.layout import CHUNK, Layout

ODD_SIZES = (0, 1, 2, 3, 7, 64, 127, 1009, 4095, 4096, 4097, 8191)

_LARGEST = torch.finfo(torch.float32).max
_SCALES = (0.0, 1e-42, 1e-39, 1e-30, 1.0, 1e37)  # includes subnormal numbers
_FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    # Every subclass runs the same inherited tests, on purpose.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


def vector(numel: int, *, scale: float = 1.0) -> Tensor:
    """A reproducible normal vector [numel], fp32.

    >>> vector(0).shape
    torch.Size([0])
    """
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale


def ragged_layout() -> Layout:
    """Parameters of awkward shapes: scalar, empty, short, prime, blocks with edges, 3-D.

    >>> ragged_layout().numel
    47168
    """
    matrices = {"tall": (997, 3), "edges": (65, 130), "block": (64, 64), "wide": (128, 200)}
    vectors = {"scalar": (), "empty": (0,), "one": (1,), "seven": (7,), "long": (5003,)}
    solid = {"solid": (3, 5, 67), "narrow": (1, 14)}
    return Layout.of({**vectors, **matrices, **solid}, {"wide": "embedding", "edges": "head"})


def _energy(x: Tensor) -> float:
    return float(x.double().square().sum())


_SIZES = st.sampled_from((0, 1, 2, 5, 13, 509, CHUNK - 3, CHUNK, CHUNK + 1, 2 * CHUNK, 8209))
_FLOATS = st.floats(width=32, min_value=-_LARGEST, max_value=_LARGEST)


@st.composite
def _vectors(draw: st.DrawFn) -> Tensor:
    """Normal numbers of some scale, or zeros, and a few numbers of any size."""
    numel = draw(_SIZES)
    x = vector(numel, scale=draw(st.sampled_from(_SCALES)))
    odd = torch.tensor(draw(st.lists(_FLOATS, max_size=5)))[:numel]
    x[: len(odd)] = odd
    return x.clamp(-_LARGEST, _LARGEST)


class CodecContract(ABC):
    """Tests for pytest: `class TestMine(CodecContract)` with `make` and `loss`.

    `loss` is the largest share of its energy that a vector of normal numbers may lose, and `worst`
    that of any vector: |decode(encode(x)) - x|^2 <= worst * |x|^2. 0 means lossless. `widest` is
    the most bytes that an element may take.
    """

    loss: float
    worst: float = 1.0
    widest: float = 2.0

    @abstractmethod
    def make(self) -> Codec:
        """The codec under test."""

    def bind(self, numel: int) -> BoundCodec:
        """The codec bound to one vector of `numel` elements."""
        return self.make().bind(Layout.vector(numel))

    @pytest.mark.parametrize("numel", ODD_SIZES)
    def test_payload_has_the_promised_size_and_loses_no_more_than_it_may(self, numel: int) -> None:
        """A payload is a new uint8 [nbytes(numel)], and decodes to fp32 near the numbers."""
        codec = self.make()
        for x in (torch.zeros(numel), vector(numel, scale=1e-30), vector(numel)):
            payload = codec.encode(x)
            assert payload.dtype == torch.uint8
            assert payload.is_contiguous()
            assert tuple(payload.shape) == (codec.nbytes(numel),)
            decoded = codec.decode(payload, numel)
            assert decoded.dtype == torch.float32
            assert decoded.shape == x.shape
        assert _energy(decoded - x) <= self.loss * _energy(x)
        assert codec.nbytes(numel) <= self.widest * numel <= 4 * numel

    @_FEW
    @given(x=_vectors())
    @example(x=torch.zeros(4097))
    @example(x=torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45]))
    @example(x=torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45]).repeat(1024))
    def test_any_finite_numbers_stay_finite_and_near(self, x: Tensor) -> None:
        """Denormal, huge, zero or mixed: no infinity, and no noise louder than the signal."""
        codec = self.make()
        decoded = codec.decode(codec.encode(x), x.numel())
        assert torch.isfinite(decoded).all()
        assert _energy(decoded.double() - x.double()) <= self.worst * _energy(x)

    @_FEW
    @given(x=_vectors())
    def test_residual_is_what_the_payload_lacks(self, x: Tensor) -> None:
        """The residual is x - decode, to the last bit; the payload equals that of encode."""
        coder, left = self.bind(x.numel()), x.clone()
        payload = coder.encode_residual(left)
        assert torch.equal(payload, coder.encode(x))
        assert torch.equal(left, x - coder.decode(payload))

    @pytest.mark.parametrize("numel", [1, 1009, 4097])
    def test_adds_scaled_payloads_in_the_order_given(self, numel: int) -> None:
        """((out + w c1) + w c2) + w c3, to the last bit.

        Up to rounding, a sum of coefficients is that of the vectors, so a mean is inverted once.
        """
        coder, weight = self.bind(numel), 1 / 3
        payloads = [coder.encode(vector(numel, scale=s)) for s in (1.0, -7.0, 1e-3)]
        for out in (vector(numel + 1)[:-1].clone(), torch.zeros(numel)):
            expected = out.clone()
            for payload in payloads:
                expected += coder.coefficients(payload) * weight
            coder.add_to(out, payloads, weight=weight)
            coder.add_to(out, [], weight=weight)
            assert torch.equal(out, expected)
        vectors = torch.stack([coder.decode(payload).double() for payload in payloads]).sum(0) / 3
        assert _energy(coder.to_vector(out) - vectors) <= 1e-11 * _energy(vectors)

    @pytest.mark.parametrize("numel", [0, 1, 1009, 4097])
    def test_counts_the_numbers_that_are_not_zero(self, numel: int) -> None:
        """`add_and_count` gives the sum of `add_to`, and how many payloads have a coefficient."""
        coder = self.bind(numel)
        some = (torch.arange(numel) % 3 == 0) * vector(numel)
        payloads = [coder.encode(x) for x in (vector(numel), torch.zeros(numel), -some)]
        counts = torch.ones(numel)
        total, expected = vector(numel), vector(numel)
        coder.add_and_count(total, counts, payloads, 1 / 3, 0)
        coder.add_and_count(total, counts, [], 1 / 3, 0)
        coder.add_to(expected, payloads, weight=1 / 3)
        assert torch.equal(total, expected)
        moved = torch.stack([coder.coefficients(p) != 0 for p in payloads])
        assert torch.equal(counts, 1.0 + moved.sum(0))

    def test_encoding_is_deterministic_and_leaves_its_input_alone(self) -> None:
        """Equal numbers give equal bytes, even if they are strided in memory."""
        codec, x = self.make(), vector(4500)
        kept, strided = x.clone(), torch.stack([x, x], dim=1)[:, 0]
        first = codec.encode(x)
        assert torch.equal(x, kept)
        assert torch.equal(first, codec.encode(x))
        assert torch.equal(first, codec.encode(strided))

    def test_payload_owns_its_memory(self) -> None:
        """Changing the input afterwards does not change the payload."""
        for encode in (self.bind(1009).encode, self.bind(1009).encode_residual):
            x = vector(1009)
            payload = encode(x)
            kept = payload.clone()
            x.fill_(1.0)
            assert torch.equal(payload, kept)

    def test_payload_may_begin_at_any_byte(self) -> None:
        """The body of a message is not aligned."""
        codec, x = self.make(), vector(4500)
        payload = codec.encode(x)
        shifted = torch.cat([payload[:1], payload])[1:]
        assert torch.equal(codec.decode(shifted, 4500), codec.decode(payload, 4500))

    @pytest.mark.parametrize("left_out", [(), ("seven", "edges", "solid")])
    def test_encodes_the_parameters_of_its_layout_and_no_others(
        self, left_out: tuple[str, ...]
    ) -> None:
        """Scalar, short, prime and 3-D parameters lose no more than one long vector."""
        whole = ragged_layout()
        part = whole.where(lambda s: s.name not in left_out)
        inside = torch.zeros(whole.numel, dtype=torch.bool)
        for s in part.segments:
            inside[s.start : s.stop] = True
        coder, x = self.make().bind(part), vector(whole.numel)
        left, out = x.clone(), x.clone()
        payload = coder.encode_residual(left)
        decoded = coder.decode(payload)
        assert tuple(payload.shape) == (coder.nbytes,)
        assert torch.equal(payload, coder.encode(torch.where(inside, x, 5.0)))
        assert not decoded[~inside].any()
        assert _energy((decoded - x)[inside]) <= self.loss * _energy(x[inside])
        assert torch.equal(left, x - decoded)
        coder.add_to(out, [payload], weight=1.0)
        assert torch.equal(out[~inside], x[~inside])
        assert torch.equal(coder.to_vector(out)[~inside], x[~inside])

    @pytest.mark.parametrize("parts", [1, 3, 8])
    def test_shards_cover_the_vector(self, parts: int) -> None:
        """The pieces of a layout, encoded one by one, add up to the whole vector."""
        layout = ragged_layout()
        x, decoded = vector(layout.numel), torch.full((layout.numel,), torch.nan)
        for start, piece in layout.cut(parts):
            coder = self.make().bind(piece)
            payload = coder.encode(x[start : start + piece.numel])
            assert tuple(payload.shape) == (coder.nbytes,)
            decoded[start : start + piece.numel] = coder.decode(payload)
        assert _energy(decoded - x) <= self.loss * _energy(x)

    def test_size_of_a_layout_is_known_before_it_is_bound(self) -> None:
        """`payload_nbytes` agrees with the bound codec for shards and parts, odd or empty."""
        codec, whole = self.make(), ragged_layout()
        part = whole.where(lambda s: s.name not in ("seven", "edges", "solid"))
        pieces = [piece for _, piece in whole.cut(5)]
        for layout in (whole, part, *pieces, *map(Layout.vector, ODD_SIZES)):
            assert codec.payload_nbytes(layout) == codec.bind(layout).nbytes

    @_FEW
    @given(seed=st.integers(0, 2**32), place=st.floats(0, 1, exclude_max=True))
    def test_damaged_payloads_are_decoded_or_refused(self, seed: int, place: float) -> None:
        """Random bytes, or one changed byte, give ExchangeError or fp32 [numel], nothing else."""
        draws = torch.Generator().manual_seed(seed)
        coder = self.make().bind(ragged_layout())
        damaged = coder.encode(vector(coder.layout.numel))
        damaged[int(place * len(damaged))] ^= 1 + seed % 255
        cases = [(coder, damaged)]
        for numel in (1, 7, 1009, CHUNK, 8209):
            coder = self.bind(numel)
            shape = (coder.nbytes,)
            cases.append((coder, torch.randint(256, shape, dtype=torch.uint8, generator=draws)))
        for coder, payload in cases:
            with suppress(ExchangeError):
                decoded = coder.decode(payload)
                assert decoded.dtype == torch.float32
                assert tuple(decoded.shape) == (coder.layout.numel,)

    def test_payload_of_another_size_or_dtype_is_refused(self) -> None:
        """The error names the codec; payloads are uint8."""
        codec = self.make()
        nbytes, name = codec.nbytes(100), re.escape(codec.id)
        for change in (-1, 1):
            wrong = torch.zeros(nbytes + change, dtype=torch.uint8)
            with pytest.raises(ExchangeError, match=name):
                codec.decode(wrong, 100)
            with pytest.raises(ExchangeError, match=name):
                self.bind(100).add_to(torch.zeros(100), [wrong], weight=1.0)
        with pytest.raises(ExchangeError, match=f"{name}.*uint8"):
            codec.decode(torch.zeros(nbytes, dtype=torch.int8), 100)
