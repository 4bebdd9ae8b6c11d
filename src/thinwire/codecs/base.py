"""What a codec is: a byte format for a vector of numbers."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.errors import ExchangeError

__all__ = ["Codec", "check_payload", "to_bytes"]


class Codec(ABC):
    """fp32 vectors to bytes and back.

    `id` names the byte format for ever: other bytes are another id. Numbers are little-endian.
    """

    id: ClassVar[str]

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Payload size in bytes: exact, and a function of `numel` alone."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """`x` [numel] (fp32, finite) as a new uint8 vector [nbytes(numel)]; `x` is not modified."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The fp32 vector [numel] that `payload` stands for; it may share the payload's memory.

        Raises:
            ExchangeError: `payload` cannot be one of this codec for `numel` elements.
        """


def to_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as uint8, copied, so that the payload never changes with `x`.

    >>> to_bytes(torch.tensor([1.0])).tolist()
    [0, 0, 128, 63]
    """
    return x.contiguous().view(torch.uint8).clone()


def check_payload(codec: Codec, payload: Tensor, numel: int) -> None:
    """Raise `ExchangeError` unless `payload` has the dtype and size of `codec` for `numel`."""
    expected_bytes = codec.nbytes(numel)
    if payload.dtype == torch.uint8 and tuple(payload.shape) == (expected_bytes,):
        return
    raise ExchangeError(
        f"decode a payload of codec {codec.id!r}",
        because=f"{numel} elements take uint8 [{expected_bytes}], "
        f"not {str(payload.dtype).removeprefix('torch.')} {list(payload.shape)}",
        do="check that all workers run the same method and thinwire version",
    )
