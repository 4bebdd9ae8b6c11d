"""16-bit floats on the wire."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, check_payload, to_bytes

__all__ = ["CastBF16", "CastFP16", "saturating_cast"]


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` to the nearest `dtype`; beyond its range, to its largest finite value.

    An infinity made by rounding would poison every worker's sum.

    >>> saturating_cast(torch.tensor([1e30]), torch.float16)
    tensor([65504.], dtype=torch.float16)
    """
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CastBF16(Codec):
    """bfloat16: the range of fp32 with 8 bits of precision; 2 bytes an element.

    >>> CastBF16().decode(CastBF16().encode(torch.tensor([1.001])), 1)
    tensor([1.])
    """

    id: ClassVar[str] = "cast/bf16"

    def nbytes(self, numel: int) -> int:
        """2 numel."""
        return 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        """Round to nearest even."""
        return to_bytes(saturating_cast(x, torch.bfloat16))

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Widen to fp32, which is exact."""
        check_payload(self, payload, numel)
        return payload.view(torch.bfloat16).float()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CastFP16(Codec):
    """IEEE half precision: 11 bits of precision up to 65504; 2 bytes an element.

    >>> CastFP16().decode(CastFP16().encode(torch.tensor([0.1])), 1)
    tensor([0.1000])
    """

    id: ClassVar[str] = "cast/fp16"

    def nbytes(self, numel: int) -> int:
        """2 numel."""
        return 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        """Round to nearest even, saturating."""
        return to_bytes(saturating_cast(x, torch.float16))

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Widen to fp32, which is exact."""
        check_payload(self, payload, numel)
        return payload.view(torch.float16).float()
