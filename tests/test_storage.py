"""Where outer state rests and what of it is counted, memory for messages, and copies to a host."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.storage import (
    BufferPool,
    HostCopy,
    Ledger,
    StatePlacement,
    StoredTensor,
    _use_count,
    choose_storage,
)

CPU = torch.device("cpu")
N_BYTES = 4 * 8


def test_on_the_device_only_the_device_is_counted() -> None:
    storage = StatePlacement(CPU)
    kept = storage.keep(torch.ones(8))
    kept.store(kept.fetch().mul_(2))
    kept.release()
    assert kept.stored().tolist() == [2.0] * 8
    assert (storage.ledger.device_bytes, storage.ledger.host_bytes) == (N_BYTES, 0)
    del kept
    assert storage.ledger.device_bytes == 0
    assert (storage.ledger.peak_device_bytes, storage.ledger.peak_host_bytes) == (N_BYTES, 0)


def test_on_the_host_only_what_is_fetched_takes_the_device() -> None:
    storage = StatePlacement(CPU, on_host=True)
    kept = [storage.zeros(8) for _ in range(3)]
    ledger = storage.ledger
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 3 * N_BYTES)
    for each in kept:
        each.fetch().add_(1)
        each.release()
    assert [each.stored().sum().item() for each in kept] == [0.0] * 3  # released, not stored
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (0, N_BYTES)
    kept[0].prefetch()
    kept[1].prefetch()
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (2 * N_BYTES, 2 * N_BYTES)
    kept[0].fetch()
    storage.put_away()  # what was fetched is in use, and stays
    assert ledger.device_bytes == N_BYTES
    del each, kept[0]
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 2 * N_BYTES)
    assert ledger.peak_host_bytes == 3 * N_BYTES


def test_places_may_share_a_ledger_and_another_device_is_refused() -> None:
    ledger = Ledger()
    kept = [choose_storage(where, CPU, ledger).zeros(8) for where in (None, "cpu")]
    assert (ledger.device_bytes, ledger.host_bytes) == (N_BYTES, N_BYTES)
    del kept
    with pytest.raises(ConfigurationError, match="keep outer state on 'meta'"):
        choose_storage("meta", CPU)


def test_threads_may_fetch_while_others_keep() -> None:
    storage = StatePlacement(CPU, on_host=True)
    held = [storage.zeros(8) for _ in range(50)]

    def work(mine: list[StoredTensor]) -> None:
        for each in mine:
            each.fetch()
            each.release()

    # One thread uses a tensor at a time: together they change the ledger that both count in.
    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, held[half::2]) for half in range(2)]
        held += [storage.zeros(8) for _ in range(200)]
        for each in working:
            each.result()
    assert storage.ledger.host_bytes == 250 * N_BYTES


def test_what_anything_refers_to_is_not_given_again() -> None:
    pool = BufferPool()
    for hold in (
        lambda message: message[3:],
        lambda message: message.view(torch.int32),
        lambda message: message.numpy(),
        lambda message: memoryview(message.numpy()),
        lambda message: [message],
    ):
        message = pool.take(5000, CPU)
        address, held = message.data_ptr(), hold(message)
        del message
        other = pool.take(5000, CPU)
        assert other.data_ptr() != address
        del held, other
        assert len(pool._buffers) <= 2
        assert address in [buffer.data_ptr() for buffer in pool._buffers]


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    pool = BufferPool()
    for nbytes in (5000, 10_000, 100_000):
        message = pool.take(nbytes, CPU)
        assert (message.dtype, len(message)) == (torch.uint8, nbytes)
        del message
    assert [len(buffer) for buffer in pool._buffers] == [100_000]
    both = pool.take(5000, CPU), pool.take(100_000, CPU)
    assert both[0].data_ptr() != both[1].data_ptr()
    assert len(pool._buffers) == 2
    del both
    report = pool.take(4096, CPU)  # which may be kept for long
    assert report.untyped_storage().nbytes() == 4096
    assert len(pool._buffers) == 2
    pool.clear()
    assert not pool._buffers


def test_among_many_buffers_a_few_are_looked_at(monkeypatch) -> None:
    pool, looks = BufferPool(), [0]

    def looked(buffer: torch.Tensor) -> int:
        looks[0] += 1
        return _use_count(buffer)

    monkeypatch.setattr("thinwire.storage._use_count", looked)
    for _ in range(2):  # rounds, after each of which all is free
        held = [pool.take(5000, CPU) for _ in range(1000)]
        assert len({message.data_ptr() for message in held}) == len(pool._buffers) == 1000
        del held
    assert looks[0] < 2000 * 33


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_copy_is_that_of_the_moment(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(numel, dtype=dtype)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert torch.equal(copy.read(), torch.ones(numel, dtype=dtype))
    turned = torch.arange(12).view(3, 4).T  # is copied in its order
    assert torch.equal(HostCopy(turned).read(), turned)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_neither_the_stream_nor_the_thread_waits_for_a_copy() -> None:
    numbers = torch.zeros(1 << 26, device="cuda")
    HostCopy(numbers).read()  # to pin so much memory takes longer than to copy it, once
    began_s = time.perf_counter()
    for _ in range(200):
        numbers += 1
    copy = HostCopy(numbers)
    later = numbers + 1
    asked_s = time.perf_counter() - began_s
    host = copy.read()  # the only one that waits
    assert asked_s < (time.perf_counter() - began_s) / 2
    assert host.is_pinned()
    assert torch.equal(host, torch.full((1 << 26,), 200.0))
    assert float(later[0]) == 201
