"""The codec interface: byte formats for vectors of fp32, and a format bound to one layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.blocks import Span, VectorPart
from thinwire.errors import ExchangeError
from thinwire.fragments.layout import Layout


class BoundCodec(ABC):
    """A codec that has laid out the vectors of one layout, so that a round plans nothing.

    It encodes the layout's segments and leaves the rest of a vector alone. In every method `round`
    is the number of the exchange; only codecs with shared randomness differ between rounds.

    Args:
        id: of the byte format.
        layout: of the vectors.
        nbytes: payload size in bytes: exact, and the same for any numbers.
    """

    def __init__(self, id: str, layout: Layout, nbytes: int) -> None:
        self.id, self.layout, self.nbytes = id, layout, nbytes

    @property
    def pieces(self) -> Sequence[CodecPiece]:
        """Parts of the vector that are encoded apart from each other, in the payload's order.

        By default one: all of it.
        """
        return self._one_piece

    @cached_property
    def _one_piece(self) -> tuple[CodecPiece, ...]:
        whole = Span(0, self.layout.numel)
        return (CodecPiece(part=whole, codec=self, where=slice(0, self.nbytes)),)

    def prepare(self, device: torch.device) -> None:
        """Load and compile what encodes vectors on `device`, before the first of them is there.

        By default nothing.
        """
        del device

    def as_numbers(self, payload: Tensor) -> Tensor | None:
        """`payload` as the fp32 [numel] that it is, to be read or written; None if it is not."""
        del payload
        return None

    # -- encoding ----------------------------------------------------------------------------------

    @abstractmethod
    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode `x` [numel] (fp32, finite, contiguous) into `out`, uint8 [nbytes]."""

    @abstractmethod
    def encode_residual_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode `x` [numel] and replace it, in place, by the error: x - decode(out)."""

    def encode_feedback_to(
        self, out: Tensor, residual: Tensor, delta: Tensor, *, decay: float, round: int = 0
    ) -> None:
        """e = decay e + delta; out = encode(e); e = e - decode(out): in one pass where it can be.

        Args:
            out: uint8 [nbytes].
            residual: e, fp32 [numel]; changed in place.
            delta: fp32 [numel]; it may be overwritten.
            decay: the product is rounded before delta is added.
            round: number of the exchange.
        """
        residual.mul_(decay).add_(delta)
        self.encode_residual_to(out, residual, round)

    def encode(self, x: Tensor, round: int = 0) -> Tensor:
        """`x` [numel] (fp32, finite, contiguous) as a new uint8 [nbytes]; `x` is not modified."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        self.encode_to(out, x, round)
        return out

    def encode_residual(self, x: Tensor, round: int = 0) -> Tensor:
        """Encode `x` [numel] and replace it, in place, by the error: x - decode(payload)."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        self.encode_residual_to(out, x, round)
        return out

    # -- decoding ----------------------------------------------------------------------------------

    @abstractmethod
    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        """out += weight * coefficients(payload), one payload after the other in the order given.

        Args:
            out: fp32 [numel]; changed in place.
            payloads: uint8 [nbytes] each.
            weight: the product is rounded before it is added, so that no machine fuses the two.
            round: in which the payloads were encoded.

        Raises:
            ExchangeError: a payload is not one of this codec.
        """

    def add_counted(
        self,
        out: Tensor,
        senders: Tensor,
        payloads: Sequence[Tensor],
        *,
        weight: float,
        round: int = 0,
    ) -> None:
        """`add_to`, and senders += 1 wherever a payload's number is not zero.

        Args:
            out: as in `add_to`.
            senders: fp32 [numel]; changed in place.
            payloads: as in `add_to`.
            weight: as in `add_to`.
            round: as in `add_to`.

        Raises:
            ExchangeError: a payload is not one of this codec.
        """
        self.add_to(out, payloads, weight=weight, round=round)
        for payload in payloads:
            senders += self.coefficients(payload, round) != 0

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        """A bound on the magnitudes of the coefficients, fp32 []; inf or NaN if one is not finite.

        It costs less than decoding where a payload says how large its numbers are.

        Raises:
            ExchangeError: `payload` is not one of this codec.
        """
        coefficients = self.coefficients(payload, round)
        return coefficients.abs().max() if len(coefficients) else coefficients.sum()

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        """The sum of the squares of the coefficients, fp64 [].

        Raises:
            ExchangeError: `payload` is not one of this codec.
        """
        return squared_norm_of(self.coefficients(payload, round))

    def to_vector(self, coefficients: Tensor) -> Tensor:
        """The vector [numel] of `coefficients`, which are overwritten; by default they are it.

        It is linear, so a weighted sum of coefficients need be inverted only once.
        """
        return coefficients

    def coefficients(self, payload: Tensor, round: int = 0) -> Tensor:
        """The fp32 numbers [numel] in `payload`; those not sent are 0. As for `decode`, see there.

        Without a transform they are the vector itself. With one, each row of the vector is replaced
        by its coefficients.
        """
        out = torch.zeros(self.layout.numel, device=payload.device)
        self.add_to(out, [payload], weight=1.0, round=round)
        return out

    def decode(self, payload: Tensor, round: int = 0) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory."""
        return self.to_vector(self.coefficients(payload, round))


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecPiece:
    """A part of a vector, and how it is encoded.

    Args:
        part: of the vector.
        codec: of the part, seen as a vector of its own.
        where: its bytes in the payload of the whole vector.
    """

    part: VectorPart
    codec: BoundCodec
    where: slice


class PiecewiseCodec(BoundCodec):
    """A codec of several pieces: what is done to a vector is done to one part after the other.

    Args:
        id: of the byte format.
        layout: of the vectors.
        pieces: in the payload's order, which have no place in common.
        is_exact: the numbers of a payload are taken as they are, with the signs of their zeros.
    """

    def __init__(
        self,
        id: str,
        layout: Layout,
        pieces: Sequence[CodecPiece],
        *,
        is_exact: bool = False,
    ) -> None:
        super().__init__(id, layout, max((piece.where.stop for piece in pieces), default=0))
        self._pieces, self._is_exact = tuple(pieces), is_exact

    @property
    def pieces(self) -> Sequence[CodecPiece]:
        """The pieces."""
        return self._pieces

    def prepare(self, device: torch.device) -> None:
        """Prepare all pieces."""
        for piece in self.pieces:
            piece.codec.prepare(device)

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode part by part."""
        for piece in self.pieces:
            piece.codec.encode_to(out[piece.where], piece.part.read(x), round)

    def encode_residual_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode part by part."""
        for piece in self.pieces:
            part = piece.part.read(x)
            piece.codec.encode_residual_to(out[piece.where], part, round)
            piece.part.write(x, part)

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        """Add part by part."""
        for piece, sent in self._split(payloads):
            part = piece.part.read(out)
            piece.codec.add_to(part, sent, weight=weight, round=round)
            piece.part.write(out, part)

    def add_counted(
        self,
        out: Tensor,
        senders: Tensor,
        payloads: Sequence[Tensor],
        *,
        weight: float,
        round: int = 0,
    ) -> None:
        """Add and count part by part."""
        for piece, sent in self._split(payloads):
            part, counted = piece.part.read(out), piece.part.read(senders)
            piece.codec.add_counted(part, counted, sent, weight=weight, round=round)
            piece.part.write(out, part)
            piece.part.write(senders, counted)

    def coefficients(self, payload: Tensor, round: int = 0) -> Tensor:
        """Those of all pieces."""
        if not self._is_exact:
            return super().coefficients(payload, round)
        out = torch.zeros(self.layout.numel, device=payload.device)
        for piece, (sent,) in self._split([payload]):
            piece.part.write(out, piece.codec.coefficients(sent, round))
        return out

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        """The largest of all pieces."""
        found = [piece.codec.largest(sent, round) for piece, (sent,) in self._split([payload])]
        return torch.stack(found).amax() if found else torch.zeros((), device=payload.device)

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        """The sum over all pieces."""
        found = [piece.codec.squared_norm(sent, round) for piece, (sent,) in self._split([payload])]
        zero = torch.zeros((), dtype=torch.float64, device=payload.device)
        return torch.stack(found).sum() if found else zero

    def to_vector(self, coefficients: Tensor) -> Tensor:
        """Invert part by part."""
        for piece in self.pieces:
            part = piece.part.read(coefficients)
            piece.part.write(coefficients, piece.codec.to_vector(part))
        return coefficients

    def _split(self, payloads: Sequence[Tensor]) -> Iterator[tuple[CodecPiece, list[Tensor]]]:
        for payload in payloads:
            check_payload(self, payload)
        for piece in self.pieces:
            yield piece, [payload[piece.where] for payload in payloads]


def squared_norm_of(x: Tensor) -> Tensor:
    """The sum of the squares of `x`, fp64 []: squares leave the range of fp32 before numbers do.

    The order of the sum is torch's own. Numbers are converted as they are read, for a copy in fp64
    takes twenty times as long.

    >>> squared_norm_of(torch.tensor([3e30, 4e30]))
    tensor(2.5000e+61, dtype=torch.float64)
    """
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def pieces_of(codec: BoundCodec, *, start: int) -> list[CodecPiece]:
    """The pieces of `codec`, whose payload lies at byte `start` of a longer one."""
    return [
        CodecPiece(
            part=piece.part,
            codec=piece.codec,
            where=slice(start + piece.where.start, start + piece.where.stop),
        )
        for piece in codec.pieces
    ]


class Codec(ABC):
    """fp32 vectors to bytes and back. Numbers are little-endian."""

    id: str
    """The name of the byte format. An id never changes its meaning: new bytes need a new id."""

    sharding_loss: str | None = None
    """Why a shard's owner, which encodes a mean again, loses much of it; None if it does not.

    `Method` warns with it of a reduce-scatter without owner feedback.
    """

    is_sparse: bool = False
    """Whether it leaves numbers out, which then decode to zero. By default it does not."""

    @abstractmethod
    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Lay out vectors of `layout`: shapes decide which numbers share a scale or a chunk.

        Bytes do not depend on the device that the vectors will be on; sizes of batches do.
        """

    def payload_nbytes(self, layout: Layout) -> int:
        """Payload size of vectors of `layout` in bytes, as `bind(layout).nbytes`.

        Codecs of this package count rows and lay out none, so the largest model takes no time.
        """
        return self.bind(layout).nbytes

    def nbytes(self, numel: int) -> int:
        """Payload size in bytes: exact, and a function of `numel` alone."""
        return self.payload_nbytes(Layout.vector(numel))

    def encode(self, x: Tensor) -> Tensor:
        """`x` [numel] (fp32, finite) as a new uint8 vector [nbytes(numel)]; `x` is not modified."""
        return self.bind(Layout.vector(x.numel())).encode(x.contiguous())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory.

        Raises:
            ExchangeError: `payload` is not one of this codec for `numel` elements.
        """
        coder = self.bind(Layout.vector(numel))
        check_payload(coder, payload)
        return coder.decode(payload)


def check_payload(coder: BoundCodec, payload: Tensor) -> None:
    """Raise `ExchangeError` unless `payload` has the dtype and size of `coder`.

    A bound codec of your own calls it before it reads a payload that another worker sent.

    Args:
        coder: that is to read it.
        payload: uint8 [coder.nbytes], if it is right.

    Raises:
        ExchangeError: it is not.

    >>> from thinwire.codecs import Identity
    >>> check_payload(Identity().bind(Layout.of({"w": (2,)})), torch.zeros(8, dtype=torch.uint8))
    """
    if payload.dtype == torch.uint8 and tuple(payload.shape) == (coder.nbytes,):
        return
    raise ExchangeError(
        f"decode a payload of codec {coder.id!r}",
        because=f"{coder.layout.numel} elements take uint8 [{coder.nbytes}], "
        f"not {str(payload.dtype).removeprefix('torch.')} {list(payload.shape)}",
        do="check that all workers run the same method and thinwire version",
    )
