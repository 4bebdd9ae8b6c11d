"""Kernels compiled by numba for the CPU: a row stays in a core's cache until it is finished.

A call runs in the caller's thread: a batch of 1 MiB is too little work to share.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.bits import elias_fano_sizes, no_indices
from thinwire.codecs.kernels import RowKernel
from thinwire.codecs.kernels import numba_dense as dense
from thinwire.codecs.kernels import numba_topk as topk
from thinwire.codecs.levels import MAX_STEPS
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.row_format import GroupedCodec
from thinwire.codecs.sparse import TopK
from thinwire.codecs.values import SignLevels
from thinwire.fragments.layout import CHUNK

NAME = f"numba {numba.__version__}"

_F = np.float32
_NO_ROWS = np.empty((0, CHUNK), np.float32)


def supports(device: torch.device) -> bool:
    """True for CPUs, on which the kernels run.

    >>> supports(torch.device("cuda"))
    False
    """
    return device.type == "cpu"


@cache
def build(codec: GroupedCodec) -> RowKernel | None:
    """The kernel for a codec, compiled, or None if numba has no kernel for it."""
    match codec:
        case TopK(k=k, values=values) if k <= topk.MOST:
            bits = 2 if isinstance(values, SignLevels) else 1
            settings = (k, bits, *elias_fano_sizes(CHUNK, k))
            return _kernel(codec, topk.encode, topk.add, settings, settings, topk.largest)
        case E3M0():
            return _kernel(codec, dense.e3m0_encode, dense.e3m0_add, (), ())
        case Quantise(bits=bits):
            to_encode = (bits, _F(MAX_STEPS[bits]))
            return _kernel(codec, dense.encode, dense.add, to_encode, (bits,))
        case _:
            return None


def _kernel(
    codec: GroupedCodec,
    run_encode: Any,
    run_add: Any,
    to_encode: tuple[Any, ...],
    to_add: tuple[Any, ...],
    run_largest: Any = None,
) -> RowKernel:
    """Compiled functions with the settings of a codec."""

    def encode(x: Tensor, out: Tensor, delta: Tensor | None, decay: float) -> None:
        added = _NO_ROWS if delta is None else delta.numpy()
        run_encode(x.numpy(), added, _F(decay), out.numpy(), *to_encode)

    def add(out: Tensor, records: Sequence[Tensor], weight: float, counts: Tensor | None) -> None:
        numbers, counted = out.numpy(), _NO_ROWS if counts is None else counts.numpy()
        for each in records:
            refuse(run_add(numbers, counted, each.numpy(), _F(weight), *to_add))

    def largest(records: Tensor) -> Tensor:
        wrong, bits = run_largest(records.numpy(), *to_add)
        refuse(wrong)
        return torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32)

    def refuse(wrong: int) -> None:
        if wrong:  # only Top-k records can be
            raise no_indices(CHUNK, to_add[0])

    # Compiled now, and not in the middle of the first round.
    rows = torch.empty(0, CHUNK, dtype=torch.float32, device="cpu")
    records = torch.empty(0, codec.record_nbytes(CHUNK), dtype=torch.uint8, device="cpu")
    encode(rows, records, None, 1.0)
    add(rows, [records], 1.0, None)
    if run_largest is None:  # torch reads a few levels per row just as fast
        return RowKernel(encode, add)
    largest(records)
    return RowKernel(encode, add, largest)
