"""What a codec is: a byte format for a vector of numbers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.fragments.layout import Layout

__all__ = ["BoundCodec", "Codec", "check_payload", "to_bytes"]


class BoundCodec(ABC):
    """A codec made ready for the vectors of one layout.

    It touches the layout's segments and leaves the rest of a vector alone.

    Args:
        id: of the byte format.
        layout: of the vectors.
        nbytes: payload size in bytes: exact, and the same for any numbers.
    """

    def __init__(self, id: str, layout: Layout, nbytes: int) -> None:
        self.id, self.layout, self.nbytes = id, layout, nbytes

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """`x` [numel] (fp32, finite, contiguous) as a new uint8 [nbytes]; `x` is not modified."""

    @abstractmethod
    def encode_residual(self, x: Tensor) -> Tensor:
        """Encode `x` [numel] and leave in it, in place, what the payload lacks: x - decode."""

    @abstractmethod
    def add_to(self, out: Tensor, payloads: Sequence[Tensor], *, weight: float) -> None:
        """out += weight * decode(payload), one payload after the other in the order given.

        Args:
            out: fp32 [numel]; changed in place.
            payloads: uint8 [nbytes] each.
            weight: multiplied first and then only added, so that no machine may fuse the two.

        Raises:
            ExchangeError: a payload cannot be one of this codec.
        """

    def decode(self, payload: Tensor) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory."""
        out = torch.zeros(self.layout.numel, device=payload.device)
        self.add_to(out, [payload], weight=1.0)
        return out

    def at(self, round_number: int) -> "BoundCodec":
        """This coder for one round: only codecs with shared randomness differ between rounds."""
        del round_number
        return self


class Codec(ABC):
    """fp32 vectors to bytes and back. Numbers are little-endian."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The name of the byte format, for ever: other bytes are another id."""

    @abstractmethod
    def bind(self, layout: Layout) -> BoundCodec:
        """Made ready for vectors of `layout`: shapes decide what shares a scale or a chunk."""

    def nbytes(self, numel: int) -> int:
        """Payload size in bytes: exact, and a function of `numel` alone."""
        return self.bind(Layout.vector(numel)).nbytes

    def encode(self, x: Tensor) -> Tensor:
        """`x` [numel] (fp32, finite) as a new uint8 vector [nbytes(numel)]; `x` is not modified."""
        return self.bind(Layout.vector(x.numel())).encode(x.contiguous())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory.

        Raises:
            ExchangeError: `payload` cannot be one of this codec for `numel` elements.
        """
        coder = self.bind(Layout.vector(numel))
        check_payload(coder, payload)
        return coder.decode(payload)


def to_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as uint8, copied, so that the payload never changes with `x`.

    >>> to_bytes(torch.tensor([1.0])).tolist()
    [0, 0, 128, 63]
    """
    return x.contiguous().view(torch.uint8).clone()


def check_payload(coder: BoundCodec, payload: Tensor) -> None:
    """Raise `ExchangeError` unless `payload` has the dtype and size of `coder`."""
    if payload.dtype == torch.uint8 and tuple(payload.shape) == (coder.nbytes,):
        return
    raise ExchangeError(
        f"decode a payload of codec {coder.id!r}",
        because=f"{coder.layout.numel} elements take uint8 [{coder.nbytes}], "
        f"not {str(payload.dtype).removeprefix('torch.')} {list(payload.shape)}",
        do="check that all workers run the same method and thinwire version",
    )
