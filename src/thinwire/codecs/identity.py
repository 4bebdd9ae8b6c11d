"""The payload is the numbers themselves."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, check_payload, to_bytes

__all__ = ["Identity"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Identity(Codec):
    """decode(encode(x)) = x, 4 bytes an element.

    >>> Identity().decode(Identity().encode(torch.tensor([1.5])), 1)
    tensor([1.5000])
    """

    id: ClassVar[str] = "identity/f32"

    def nbytes(self, numel: int) -> int:
        """4 numel."""
        return 4 * numel

    def encode(self, x: Tensor) -> Tensor:
        """The bytes of `x`."""
        return to_bytes(x)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """A view of the payload."""
        check_payload(self, payload, numel)
        return payload.view(torch.float32)
