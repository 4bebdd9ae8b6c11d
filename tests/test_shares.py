"""Shares of the data: whoever is there, an epoch's samples are read once each."""

import random

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.train.batches import Windows
from thinwire.train.data import LoadedData
from thinwire.train.shares import ShareBatches, Shares
from thinwire.train.streams import StreamWindows

T = 4


def make_shares(count: int, *, rows: int, sync_every: int, seed: int = 1) -> Shares:
    """Token i is i: a window is known by its first token."""
    windows = Windows(np.arange(count * (T + 1), dtype=np.int32), T)
    return windows.shares(rows, sync_every, seed)


def window_numbers(batch: torch.Tensor) -> list[int]:
    return [int(first) // (T + 1) for first in batch[:, 0]]


@pytest.mark.parametrize("count", [1, 2, 13, 24, 101])
@pytest.mark.parametrize(("rows", "sync_every"), [(1, 1), (2, 3), (3, 7)])
def test_any_dealing_of_shares_reads_every_window_of_an_epoch_once(count, rows, sync_every) -> None:
    shares = make_shares(count, rows=rows, sync_every=sync_every)
    draw = random.Random(count)
    dealt, read = 0, dict[tuple[int, int], list[int]]()
    while dealt * rows * sync_every < 3 * count:
        workers = draw.randrange(1, 6)  # a round: others come and go after it
        hands = draw.sample(range(dealt, dealt + workers), workers)
        dealt += workers
        for index in range(sync_every):
            for share in draw.sample(hands, workers):
                read[share, index] = window_numbers(shares.batch(share, index))
    samples = [number for place in sorted(read) for number in read[place]]
    epochs = [samples[start : start + count] for start in range(0, 3 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)


def test_shares_in_their_order_are_what_one_numbered_worker_reads() -> None:
    windows = Windows(np.arange(13 * (T + 1), dtype=np.int32), T)
    alone, shares = windows.batches(0, 1, 3, seed=5), windows.shares(3, 4, seed=5)
    for step in range(20):
        assert torch.equal(shares.batch(step // 4, step % 4), next(alone))


def test_a_batch_is_a_function_of_seed_share_and_index() -> None:
    one, other = (make_shares(50, rows=5, sync_every=3) for _ in range(2))
    for share, index in ((7, 2), (0, 0), (7, 2), (10**6, 1)):
        assert torch.equal(one.batch(share, index), other.batch(share, index))
    batch = one.batch(7, 2)
    assert batch.dtype == torch.int64
    assert batch.shape == (5, T + 1)
    third = make_shares(50, rows=5, sync_every=3, seed=2)
    assert not torch.equal(one.batch(7, 2), third.batch(7, 2))


@pytest.mark.parametrize(("share", "index"), [(-1, 0), (0, -1), (0, 3)])
def test_a_batch_that_no_share_has_is_refused(share: int, index: int) -> None:
    with pytest.raises(ConfigurationError, match="have 3 batches"):
        make_shares(5, rows=1, sync_every=3).batch(share, index)


@pytest.mark.parametrize("field", ["rows", "sync_every"])
def test_empty_shares_are_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is 0"):
        make_shares(5, **{"rows": 1, "sync_every": 1, field: 0})


def test_batches_follow_the_share_that_is_held() -> None:
    shares, place = make_shares(50, rows=2, sync_every=3), [4, 1]
    batches = ShareBatches(shares, lambda: (place[0], place[1]))
    assert torch.equal(next(batches), shares.batch(4, 1))
    place[:] = [9, 0]
    batches.load_state_dict(batches.state_dict())
    assert torch.equal(next(batches), shares.batch(9, 0))


def test_a_stream_has_no_shares() -> None:
    stream = StreamWindows(None, None, T, frozenset())
    data = LoadedData(tokenizer=None, training=stream, validation=None, fingerprint="")
    with pytest.raises(ConfigurationError, match=r"--elastic on a stream.*download the corpus"):
        data.shares(rows=1, sync_every=1, seed=0)
