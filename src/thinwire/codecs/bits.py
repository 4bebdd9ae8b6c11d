"""Numbers to bytes: floats as they are, planar packing, and Elias-Fano codes of sorted indices.

Planar: for n codes of b bits, byte j holds the codes j, j + m, j + 2m, ... from its lowest bits up,
where m = ceil(n b / 8) is the number of bytes. Codes past the end count as 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.errors import ExchangeError


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` to the nearest `dtype`; beyond its range, to its largest finite value.

    An infinity made by rounding would poison every worker's sum.

    >>> saturating_cast(torch.tensor([1e30]), torch.float16)
    tensor([65504.], dtype=torch.float16)
    """
    if dtype == torch.float32:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def bytes_of(x: Tensor) -> Tensor:
    """Rows of numbers as rows of bytes: [rows, n] to uint8 [rows, n * itemsize]."""
    return x.contiguous().view(torch.uint8)


def floats(records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of bytes as rows of numbers in fp32; copied, because a view needs aligned memory.

    Args:
        records: uint8, [rows, n].
        dtype: of the numbers.
    """
    return records.clone(memory_format=torch.contiguous_format).view(dtype).float()


def look_up(levels: Tensor, codes: Tensor) -> Tensor:
    """Look up `codes` [rows, n] (uint8) in `levels` [rows, 2^bits]: fp32 [rows, n]."""
    return levels.float().gather(1, codes.to(torch.int64))


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits.

    >>> packed_nbytes(5, 2)
    2
    """
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] (uint8, below 2^bits) as bytes [rows, ceil(n bits / 8)].

    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist()
    [[49, 2]]
    """
    per_byte, n = 8 // bits, codes.shape[1]
    m = packed_nbytes(n, bits)
    if m * per_byte != n:
        codes = F.pad(codes, (0, m * per_byte - n))
    planes = codes.view(len(codes), per_byte, m)
    packed = planes[:, 0].clone()
    for plane in range(1, per_byte):
        packed |= planes[:, plane] << (bits * plane)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: uint8 [rows, count].

    >>> unpack(torch.tensor([[49, 2]], dtype=torch.uint8), 4, 3).tolist()
    [[1, 2, 3]]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    planes = (packed[:, None, :] >> shifts) & (2**bits - 1)
    return planes.flatten(1)[:, :count]


def elias_fano_sizes(n: int, k: int) -> tuple[int, int, int]:
    """For k sorted indices below n: low bits per index, bytes of the bitmap and of the low bits.

    l = floor(log2(n / k)) low bits of an index are written as they are. The bitmap has a bit for
    each index, and one for each value of the high parts.

    >>> elias_fano_sizes(4096, 64)
    (6, 16, 48)
    """
    low = (n // k).bit_length() - 1
    return low, packed_nbytes(k + ((n - 1) >> low) + 1, 1), packed_nbytes(low * k, 1)


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Elias-Fano code of ascending `indices` [rows, k] (int64, below n): bytes [rows, nbytes].

    With l = floor(log2(n / k)), index i of a row sets bit (i-th index >> l) + i of the bitmap; its
    low l bits follow as l planes of k bits each, lowest plane first.

    Source: P. Elias (1974), R. Fano (1971), quasi-succinct codes of monotone sequences.

    >>> pack_indices(torch.tensor([[1, 5]]), 8).tolist()
    [[5, 3]]
    """
    rows, k = indices.shape
    low, high_bytes, _ = elias_fano_sizes(n, k)
    place = torch.arange(k, device=indices.device)
    bitmap = torch.zeros(rows, 8 * high_bytes, dtype=torch.uint8, device=indices.device)
    bitmap.scatter_(1, (indices >> low) + place, 1)
    shifts = torch.arange(low, dtype=torch.int32, device=indices.device)[:, None]
    planes = ((indices.to(torch.int32)[:, None, :] >> shifts) & 1).to(torch.uint8)
    return torch.cat([pack(bitmap, 1), pack(planes.flatten(1), 1)], 1)


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `pack_indices`: int64 [rows, k], ascending and below n.

    Raises:
        ExchangeError: the bytes are not such a code.

    >>> unpack_indices(torch.tensor([[5, 3]], dtype=torch.uint8), 8, 2).tolist()
    [[1, 5]]
    """
    rows, (low, high_bytes, _) = len(packed), elias_fano_sizes(n, k)
    bitmap = unpack(packed[:, :high_bytes], 1, high_bytes * 8)
    # nonzero lists the set bits row by row: where every row has k of them, they can be reshaped.
    wrong_number = (bitmap.sum(1, dtype=torch.int32) != k).any()
    places = bitmap.nonzero_static(size=rows * k)[:, 1].view(rows, k)
    indices = places - torch.arange(k, device=packed.device)
    indices <<= low
    if low:
        # Combined while narrow: widening every plane would take most of the decoding time.
        planes = unpack(packed[:, high_bytes:], 1, low * k).view(rows, low, k)
        planes = planes if low <= 8 else planes.to(torch.int32)
        lowest = planes[:, 0].clone()
        for plane in range(1, low):
            lowest |= planes[:, plane] << plane
        indices |= lowest.to(torch.int64)
    descend = (indices[:, 1:] <= indices[:, :-1]).any() | (indices[:, -1] >= n).any()
    if wrong_number | descend:  # one test: each makes the host wait for the device
        raise no_indices(n, k)
    return indices


def no_indices(n: int, k: int) -> ExchangeError:
    """The error for bytes that do not encode k indices below n."""
    return ExchangeError(
        f"decode {k} indices below {n}",
        because="its bitmap holds another number of indices, or they do not ascend",
        do="check that the sender runs the same thinwire version; the payload was not used",
    )
