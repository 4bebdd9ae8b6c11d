"""Copies in the host's memory that are waited for when they are read."""

import time

import pytest
import torch

from thinwire.host_copy import HostCopy, lies_on_gpu


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_copy_is_that_of_the_moment(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(numel, dtype=dtype)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert torch.equal(copy.read(), torch.ones(numel, dtype=dtype))
    assert not lies_on_gpu(tensor)


def test_what_is_not_contiguous_is_copied_in_its_order() -> None:
    assert HostCopy(torch.arange(12).view(3, 4).T).read().tolist() == [
        [column + 4 * row for row in range(3)] for column in range(4)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_neither_the_stream_nor_the_thread_waits_for_a_copy() -> None:
    numbers = torch.zeros(1 << 26, device="cuda")
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(200):
        numbers += 1
    copy = HostCopy(numbers)
    later = numbers + 1
    asked_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    assert asked_s < (time.perf_counter() - began_s) / 2
    assert copy.read().is_pinned()
    assert torch.equal(copy.read(), torch.full((1 << 26,), 200.0))
    assert float(later[0]) == 201
