"""numba's kernels against the codecs' own `write` and `read`: what `kernel_parity` checks, and
several workers at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernel_parity import DENSE, check, named
from thinwire.codecs import SignMean, TopK
from thinwire.codecs.kernels import RowKernel, find_kernel
from thinwire.codecs.row_format import GroupedCodec

numba_backend = pytest.importorskip("thinwire.codecs.kernels.numba_backend")

CPU = torch.device("cpu")
CODECS = named(
    *DENSE,
    *(TopK(k=k) for k in (1, 3, 32, 64, 300, 1024, 2048)),
    *(TopK(k=k, values=SignMean()) for k in (1, 64, 100)),
)


def cubed(rows: int) -> Tensor:
    return torch.randn(rows, 4096, generator=torch.Generator().manual_seed(rows)) ** 3


def kernel_of(id: str) -> tuple[GroupedCodec, RowKernel]:
    kernel = find_kernel(CODECS[id], CPU)
    assert kernel is not None
    return CODECS[id], kernel


def encoded(id: str, x: Tensor) -> Tensor:
    codec, kernel = kernel_of(id)
    records = torch.empty(len(x), codec.record_nbytes(4096), dtype=torch.uint8)
    kernel.encode(x, records, None, 1.0)
    return records


@pytest.mark.parametrize("id", CODECS)
def test_rows_of_every_kind_have_the_bits_of_the_reference(id: str) -> None:
    check(*kernel_of(id), "cpu")


def test_threads_of_several_workers_may_call_a_kernel_at_once() -> None:
    want = encoded("table-2", cubed(200))
    with ThreadPoolExecutor(6) as workers:
        found = [workers.submit(encoded, "table-2", cubed(200)) for _ in range(24)]
        assert all(torch.equal(each.result(timeout=60), want) for each in found)
