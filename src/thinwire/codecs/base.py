"""The codec interface: byte formats for vectors of fp32, and a format bound to one layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.blocks import VectorPart
from thinwire.errors import ExchangeError
from thinwire.fragments.layout import Layout


class BoundCodec(ABC):
    """A codec bound to one layout, with all planning done before the first round.

    It encodes the layout's segments and leaves the rest of a vector alone. In every method `round`
    is the number of the exchange; only codecs with shared randomness depend on it.

    Args:
        id: name of the byte format.
        layout: layout of the vectors.
        nbytes: payload size in bytes: exact, and independent of the values.
    """

    pieces: Sequence[CodecPiece]
    """Parts of the vector that are encoded separately, in payload order; by default only one."""

    def __init__(self, id: str, layout: Layout, nbytes: int) -> None:
        self.id, self.layout, self.nbytes = id, layout, nbytes
        whole = VectorPart([(0, layout.numel)])
        self.pieces = (CodecPiece(part=whole, codec=self, where=slice(0, nbytes)),)

    def prepare(self, device: torch.device) -> None:
        """Load and compile the kernels for vectors on `device` ahead of the first round.

        Does nothing by default.
        """

    def as_numbers(self, payload: Tensor) -> Tensor | None:
        """`payload` viewed as fp32 [numel], to read or write; None where no such view exists."""
        return None

    # -- encoding ----------------------------------------------------------------------------------

    @abstractmethod
    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode `x` [numel] (fp32, finite, contiguous) into `out`, uint8 [nbytes]."""

    def encode_feedback_to(
        self, out: Tensor, residual: Tensor, delta: Tensor | None, *, decay: float, round: int = 0
    ) -> None:
        """e = decay e + delta; out = encode(e); e = e - decode(out); in one pass where possible.

        The default takes coefficients for the numbers; a codec with a transform overrides it.

        Args:
            out: uint8 [nbytes].
            residual: e, fp32 [numel]; changed in place.
            delta: fp32 [numel]; if None, e is encoded as it is and `decay` is ignored.
            decay: factor of e; the product is rounded before delta is added.
            round: number of the exchange.
        """
        if delta is not None:
            residual.mul_(decay).add_(delta)
        self.encode_to(out, residual, round)
        self.add_to(residual, [out], weight=-1.0, round=round)

    def encode(self, x: Tensor, round: int = 0) -> Tensor:
        """`x` [numel] (fp32, finite, contiguous) as a new uint8 [nbytes]; `x` is not modified."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        self.encode_to(out, x, round)
        return out

    def encode_residual(self, x: Tensor, round: int = 0) -> Tensor:
        """Encode `x` [numel] and replace it, in place, by the error: x - decode(payload)."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        self.encode_feedback_to(out, x, None, decay=1.0, round=round)
        return out

    # -- decoding ----------------------------------------------------------------------------------

    @abstractmethod
    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        """out += weight * coefficients(payload) for each payload, in the order given.

        Args:
            out: fp32 [numel]; changed in place.
            payloads: uint8 [nbytes] each.
            weight: the product is rounded before it is added, so that no machine fuses the two.
            round: number of the exchange in which the payloads were encoded.

        Raises:
            ExchangeError: a payload is invalid for this codec.
        """

    def add_and_count(
        self, out: Tensor, counts: Tensor, payloads: Sequence[Tensor], weight: float, round: int
    ) -> None:
        """`add_to`, and add to `counts` the number of payloads whose coefficient is not zero.

        Raises:
            ExchangeError: a payload is invalid for this codec.
        """
        self.add_to(out, payloads, weight=weight, round=round)
        for payload in payloads:
            counts += self.coefficients(payload, round) != 0

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        """A bound on the magnitudes of the coefficients, fp32 []; inf or NaN if one is not finite.

        Cheaper than decoding where a payload stores the levels of its numbers.

        Raises:
            ExchangeError: `payload` is invalid for this codec.
        """
        coefficients = self.coefficients(payload, round)
        return coefficients.abs().max() if len(coefficients) else coefficients.sum()

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        """The sum of the squares of the coefficients, fp64 [].

        Raises:
            ExchangeError: `payload` is invalid for this codec.
        """
        return squared_norm_of(self.coefficients(payload, round))

    def to_vector(self, coefficients: Tensor) -> Tensor:
        """Turn `coefficients` into the vector [numel], in place; by default they are the same.

        Linear, so a weighted sum of coefficients is inverted only once.
        """
        return coefficients

    def coefficients(self, payload: Tensor, round: int = 0) -> Tensor:
        """The fp32 coefficients [numel] in `payload`, 0 where none was sent; may share its memory.

        Without a transform they are the vector itself. With one, each row of the vector is replaced
        by its coefficients.
        """
        out = torch.zeros(self.layout.numel, dtype=torch.float32, device=payload.device)
        self.add_to(out, [payload], weight=1.0, round=round)
        return out

    def decode(self, payload: Tensor, round: int = 0) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory."""
        return self.to_vector(self.coefficients(payload, round))


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecPiece:
    """A part of a vector, and how it is encoded.

    Args:
        part: places in the vector.
        codec: encodes the part as a vector of its own.
        where: bytes of the piece in the payload of the whole vector.
    """

    part: VectorPart
    codec: BoundCodec
    where: slice


class PiecewiseCodec(BoundCodec):
    """A codec of several pieces: every operation runs part by part.

    Checks payloads, so that each piece gets bytes of the right size.

    Args:
        id: name of the byte format.
        layout: layout of the vectors.
        parts: disjoint parts of the vector, each with its codec.
        is_exact: copy the numbers of a payload as they are, with the signs of their zeros.
    """

    def __init__(
        self,
        id: str,
        layout: Layout,
        parts: Iterable[tuple[VectorPart, BoundCodec]],
        *,
        is_exact: bool = False,
    ) -> None:
        pieces: list[CodecPiece] = []
        end = 0
        for part, codec in parts:
            begin, end = end, end + codec.nbytes
            pieces.append(CodecPiece(part=part, codec=codec, where=slice(begin, end)))
        super().__init__(id, layout, end)
        self.pieces, self._is_exact = tuple(pieces), is_exact

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Encode part by part."""
        for piece in self.pieces:
            piece.codec.encode_to(out[piece.where], piece.part.read(x), round)

    def encode_feedback_to(
        self, out: Tensor, residual: Tensor, delta: Tensor | None, *, decay: float, round: int = 0
    ) -> None:
        """Encode part by part."""
        for piece in self.pieces:
            part = piece.part.read(residual)
            added = None if delta is None else piece.part.read(delta)
            sent = out[piece.where]
            piece.codec.encode_feedback_to(sent, part, added, decay=decay, round=round)
            piece.part.write(residual, part)

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        """Add part by part."""
        for piece, sent in self._split(payloads):
            part = piece.part.read(out)
            piece.codec.add_to(part, sent, weight=weight, round=round)
            piece.part.write(out, part)

    def coefficients(self, payload: Tensor, round: int = 0) -> Tensor:
        """The coefficients of all pieces."""
        if not self._is_exact:
            return super().coefficients(payload, round)
        out = torch.zeros(self.layout.numel, dtype=torch.float32, device=payload.device)
        for piece, (sent,) in self._split([payload]):
            piece.part.write(out, piece.codec.coefficients(sent, round))
        return out

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        """The largest of all pieces."""
        found = [torch.zeros((), dtype=torch.float32, device=payload.device)]
        found += [piece.codec.largest(sent, round) for piece, (sent,) in self._split([payload])]
        return torch.stack(found).amax()

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        """The sum over all pieces."""
        pieces = self._split([payload])
        found = [piece.codec.squared_norm(sent, round) for piece, (sent,) in pieces]
        zero = torch.zeros((), dtype=torch.float64, device=payload.device)
        return torch.stack([zero, *found]).sum()

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
    """The sum of the squares of `x`, fp64 []: squares overflow fp32 before the numbers do.

    torch chooses the order of the sum. Numbers are converted as they are read: a copy in fp64 takes
    twenty times as long.

    >>> squared_norm_of(torch.tensor([3e30, 4e30]))
    tensor(2.5000e+61, dtype=torch.float64)
    """
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


class Codec(ABC):
    """Turns fp32 vectors into bytes and back. Numbers are little-endian."""

    id: str
    """The name of the byte format. An id never changes its meaning: new bytes need a new id."""

    sharding_loss: str | None = None
    """Why the owner of a shard loses much of its mean by encoding it again; None if it does not."""

    is_sparse: bool = False
    """True if some numbers are not sent; those decode to zero."""

    is_lossless: bool = False
    """True if decode(encode(x)) = x."""

    @abstractmethod
    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Bind the codec to `layout`, whose shapes decide which numbers share a scale or a chunk.

        `device`, where the vectors will be, decides the sizes of batches but not the bytes.
        """

    def payload_nbytes(self, layout: Layout) -> int:
        """Payload size in bytes of a vector of `layout`: that of `bind(layout).nbytes`."""
        # On the meta device a parameter is one batch: the largest model takes milliseconds.
        return self.bind(layout, device=torch.device("meta")).nbytes

    def nbytes(self, numel: int) -> int:
        """Payload size in bytes: exact, and a function of `numel` alone."""
        return self.payload_nbytes(Layout.vector(numel))

    def encode(self, x: Tensor) -> Tensor:
        """`x` [numel] (fp32, finite) as a new uint8 vector [nbytes(numel)]; `x` is not modified."""
        return self.bind(Layout.vector(x.numel())).encode(x.contiguous())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory.

        Raises:
            ExchangeError: `payload` is invalid for this codec and `numel` elements.
        """
        return self.bind(Layout.vector(numel)).decode(payload)


def check_payload(coder: BoundCodec, payload: Tensor) -> None:
    """Raise `ExchangeError` unless `payload` has the dtype and size of `coder`.

    Call it in your own bound codec before reading a payload that another worker sent.

    Args:
        coder: the codec that is about to read it.
        payload: expected to be uint8 [coder.nbytes].

    Raises:
        ExchangeError: it is something else.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRole(Codec):
    """Encodes each parameter with the codec of its role: matrix, embedding, head or vector.

    Args:
        default: for roles without a codec of their own.
        embedding: for embeddings, and heads tied to one.
        head: for the output head.
        vector: for biases and the gains of norms.

    >>> from thinwire.codecs.cast import CastBF16, Identity
    >>> codec = PerRole(default=CastBF16(), vector=Identity())
    >>> codec.bind(Layout.of({"w": (2, 2), "b": (2,)})).nbytes
    16
    """

    default: Codec
    embedding: Codec | None = None
    head: Codec | None = None
    vector: Codec | None = None

    @property
    def id(self) -> str:
        """The ids of all its codecs."""
        return f"per-role({','.join(f'{role}={codec.id}' for role, codec in self._codecs())})"

    @property
    def sharding_loss(self) -> str | None:
        """That of the first codec that has one, else None."""
        return next((c.sharding_loss for _, c in self._codecs() if c.sharding_loss), None)

    @property
    def is_sparse(self) -> bool:
        """True if any of the codecs is sparse."""
        return any(codec.is_sparse for _, codec in self._codecs())

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """The default's segments first, then those of each role that has its own codec."""
        bound = [c.bind(self._part(layout, role), device=device) for role, c in self._codecs()]
        parts = ((piece.part, piece.codec) for codec in bound for piece in codec.pieces)
        return PiecewiseCodec(self.id, layout, parts)

    def _codecs(self) -> list[tuple[str, Codec]]:
        roles = {"embedding": self.embedding, "head": self.head, "vector": self.vector}
        own = [(role, codec) for role, codec in roles.items() if codec is not None]
        return [("default", self.default), *own]

    def _part(self, layout: Layout, role: str) -> Layout:
        """The segments that the codec of `role` writes."""
        own = {each for each, _ in self._codecs()}
        return layout.where(lambda s: (s.role if s.role in own else "default") == role)
