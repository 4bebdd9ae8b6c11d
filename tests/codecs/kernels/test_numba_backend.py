"""numba's kernels against the codecs' own `write` and `read`: what `kernel_parity` checks, and
rows of any number, blocks, threads and processes."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernel_parity import DENSE, check, named, reference_add, reference_encode
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


@pytest.mark.parametrize("id", ["affine-8 Linear", "topk-64/sign-levels"])
def test_threads_change_nothing(id: str) -> None:
    codec, kernel = kernel_of(id)
    x, out = cubed(331), torch.ones(331, 4096)
    records = reference_encode(codec, x)
    reference_add(codec, out, [records, records], 0.5)
    found = [(records, x.view(torch.int32), out.view(torch.int32))]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        x = cubed(331)
        records, out = encoded(id, x), torch.ones_like(x)
        kernel.add(out, [records, records], 0.5, None)
        found.append((records, x.view(torch.int32), out.view(torch.int32)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_threads_of_several_workers_may_call_a_kernel_at_once() -> None:
    torch.set_num_threads(3)
    want = encoded("table-2 MidRise", cubed(200))
    with ThreadPoolExecutor(6) as workers:
        found = [workers.submit(encoded, "table-2 MidRise", cubed(200)) for _ in range(24)]
        assert all(torch.equal(each.result(timeout=60), want) for each in found)


def threads_used() -> int:
    began, all_begin = set[int](), threading.Barrier(3)

    def work(first: int, last: int) -> None:
        if (me := threading.get_ident()) not in began:  # then none takes the part of a late one
            began.add(me)
            all_begin.wait(60)

    numba_backend._over_rows(600, work)
    return len(began)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    torch.set_num_threads(3)
    assert threads_used() == 3  # and they stay
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=lambda: answers.put(threads_used()))
    child.start()
    try:
        assert answers.get(timeout=60) == 3
    finally:
        child.join(10)
        child.kill()
