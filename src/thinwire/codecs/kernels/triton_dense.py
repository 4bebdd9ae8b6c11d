"""The mean of rows whose records hold a code for each number: all workers in one kernel."""

# The bodies of kernels are Triton's language, whose types Python's do not describe.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from abc import ABC
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.kernels.base import RowKernel
from thinwire.codecs.kernels.triton_ops import addresses, launch

WARPS = 4
"""For a row of 4096 numbers: 32 a lane, and sums by halves cross warps in two of twelve steps."""


@triton.jit(do_not_specialize=["workers"])
def _add(
    out,
    senders,
    records,
    workers,
    weight,
    head: tl.constexpr,
    bits: tl.constexpr,
    value_of: tl.constexpr,
):
    """`head` bytes, then planar codes of `bits` bits; `value_of` reads the head for codes."""
    row = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = 512 * bits
    plane, byte = tl.arange(0, 8 // bits)[:, None], tl.arange(0, nbytes)[None, :]
    place = row * 4096 + plane * nbytes + byte
    total = tl.load(out + place)
    count = total
    if senders is not None:
        count = tl.load(senders + place)
    for worker in range(workers):
        record = tl.load(records + worker).to(tl.pointer_type(tl.uint8)) + row * (head + nbytes)
        codes = tl.load(record + head + byte).to(tl.int32) >> (bits * plane)
        value = value_of(record, codes & (2**bits - 1))
        total += value * weight
        if senders is not None:
            count += (value != 0).to(tl.float32)
    tl.store(out + place, total)
    if senders is not None:
        tl.store(senders + place, count)


class DenseKernel(RowKernel, ABC):
    """A kernel for records that begin with some bytes, such as levels, before planar codes.

    Args:
        head: bytes before the codes.
        bits: of a code.
        value_of: device function of a record's address and codes, which gives their numbers.
    """

    def __init__(self, *, head: int, bits: int, value_of: Any) -> None:
        self._head, self._bits, self._value_of = head, bits, value_of

    def add_to(self, out: Tensor, records: Sequence[Tensor], *, weight: float) -> None:
        """All workers in one pass over `out`."""
        self._add(out, None, records, weight)

    def add_counted(
        self, out: Tensor, senders: Tensor, records: Sequence[Tensor], *, weight: float
    ) -> None:
        """All workers in one pass over `out` and `senders`."""
        self._add(out, senders, records, weight)

    def _add(
        self, out: Tensor, senders: Tensor | None, records: Sequence[Tensor], weight: float
    ) -> None:
        if not records:
            return
        launch(
            _add,
            len(out),
            *(out, senders, addresses(records), len(records), weight),
            head=self._head,
            bits=self._bits,
            value_of=self._value_of,
            num_warps=WARPS,
        )
