"""Triton's kernels for NVIDIA GPUs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from thinwire.codecs.bits import floats, no_indices
from thinwire.codecs.kernels import RowKernel
from thinwire.codecs.kernels import triton_dense as dense
from thinwire.codecs.kernels import triton_topk as topk
from thinwire.codecs.kernels.triton_ops import launch
from thinwire.codecs.levels import MAX_STEPS
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.row_format import GroupedCodec
from thinwire.codecs.sparse import TopK
from thinwire.codecs.values import SignLevels
from thinwire.fragments.layout import CHUNK

NAME = f"triton {triton.__version__}"

_OLDEST = (3, 6)


def supports(device: torch.device) -> bool:
    """True for NVIDIA GPUs, and with TRITON_INTERPRET=1 for CPUs.

    Before 3.6 Triton's divisions and roots take subnormal numbers for 0, so other bytes come out.

    >>> supports(torch.device("meta"))
    False
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST:
        return False
    if device.type == "cpu":
        return knobs.runtime.interpret
    return device.type == "cuda" and torch.version.hip is None


def build(codec: GroupedCodec) -> RowKernel | None:
    """The kernel for a codec; Triton compiles it for each GPU when it is first called.

    Returns:
        None for a k that is not a power of two from 16 to 2048.

    >>> build(TopK(k=100)) is None
    True
    """
    nbytes = codec.record_nbytes(CHUNK)
    match codec:
        # Only then do the parts of a record have sizes that Triton allows for tensors.
        case TopK(k=k, values=values) if 16 <= k <= 2048 and not k & (k - 1):
            return _sparse(nbytes, k, 2 if isinstance(values, SignLevels) else 1)
        case E3M0():
            encode = partial(launch, dense.encode_e3m0)
            return _dense(encode, nbytes, 4, dense.power_of)
        case Quantise(bits=bits):
            encode = partial(launch, dense.encode, bits=bits, sigmas=MAX_STEPS[bits])
            value_of = dense.point_of if bits == 8 else dense.level_of
            return _dense(encode, nbytes, bits, value_of)
        case _:
            return None


def _dense(run: Callable[..., None], nbytes: int, bits: int, value_of: Any) -> RowKernel:
    """The kernel for records of `nbytes` that end in codes of `bits` bits."""

    def encode(x: Tensor, out: Tensor, delta: Tensor | None, decay: float) -> None:
        run(len(x), x, delta, decay, out)

    def add(out: Tensor, records: Sequence[Tensor], weight: float, counts: Tensor | None) -> None:
        # Addresses of the workers' records, copied without waiting for the device: one kernel then
        # reads any number of payloads in place.
        begins = torch.tensor([r.data_ptr() for r in records], device="cpu", pin_memory=out.is_cuda)
        begins = begins.to(out.device, non_blocking=True)
        constants = {"head": nbytes - 512 * bits, "bits": bits, "value_of": value_of}
        launch(dense.add, len(out), out, begins, len(records), weight, **constants)
        if counts is not None:
            launch(dense.add, len(out), counts, begins, len(records), None, **constants)

    return RowKernel(encode, add)


def _sparse(nbytes: int, k: int, bits: int) -> RowKernel:
    """The kernel for Top-k records of `nbytes` with codes of `bits` bits."""
    # One warp is enough for few numbers, and waits for no other.
    constants: dict[str, Any] = {"k": k, "num_warps": max(1, k // 128)}

    def encode(x: Tensor, out: Tensor, delta: Tensor | None, decay: float) -> None:
        """Choose, then write: numbers change lanes between the two, through memory."""
        places = torch.empty(len(x) * k, dtype=torch.int32, device=x.device)
        kept = torch.empty(len(x) * k, dtype=torch.float32, device=x.device)
        launch(topk.choose, len(x), x, delta, decay, places, kept, k=k)
        launch(topk.write, len(x), x, out, places, kept, bits=bits, **constants)

    def add(out: Tensor, records: Sequence[Tensor], weight: float, counts: Tensor | None) -> None:
        """One kernel per worker, over the places it sent; the host waits once, at the end."""
        wrong = torch.zeros(1, dtype=torch.int32, device=out.device)
        for record in records:
            launch(topk.add, len(out), out, record, wrong, weight, bits=bits, **constants)
            if counts is not None:
                launch(topk.add, len(out), counts, record, wrong, None, bits=bits, **constants)
        refuse(wrong)

    def largest(records: Tensor) -> Tensor:
        """The largest level, after a check of all places."""
        wrong = torch.zeros(1, dtype=torch.int32, device=records.device)
        launch(topk.check, len(records), records, wrong, nbytes, **constants)
        refuse(wrong)
        begin = nbytes - k * bits // 8 - 2 * bits
        magnitudes = floats(records[:, begin : begin + 2 * bits]).abs()
        return magnitudes.amax() if len(magnitudes) else magnitudes.sum()

    def refuse(wrong: Tensor) -> None:
        if wrong:
            raise no_indices(CHUNK, k)

    return RowKernel(encode, add, largest)
