"""Memory for messages: used again when nothing shares it, and never before."""

import torch

from thinwire.buffers import BufferPool

CPU = torch.device("cpu")


def test_what_anything_refers_to_is_not_given_again() -> None:
    pool = BufferPool()
    holders = [
        lambda message: message[3:],
        lambda message: message.view(torch.int32),
        lambda message: message.numpy(),
        lambda message: memoryview(message.numpy()),
        lambda message: [message],
    ]
    for hold in holders:
        message = pool.take(4096, CPU)
        address, held = message.data_ptr(), hold(message)
        del message
        other = pool.take(4096, CPU)
        assert other.data_ptr() != address
        del held, other
        assert len(pool._buffers) <= 2
        assert address in [buffer.data_ptr() for buffer in pool._buffers]


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    pool = BufferPool()
    for nbytes in (10, 1000, 100_000):
        message = pool.take(nbytes, CPU)
        assert (message.dtype, len(message)) == (torch.uint8, nbytes)
        del message
    assert [len(buffer) for buffer in pool._buffers] == [100_000]
    both = pool.take(50, CPU), pool.take(100_000, CPU)
    assert both[0].data_ptr() != both[1].data_ptr()
    assert len(pool._buffers) == 2
