"""Windows, their order, batches that resume, and shares that elastic workers read once each."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigurationError, CorpusError, MismatchError
from thinwire.train.data import LoadedData
from thinwire.train.data.batches import (
    Shares,
    Windows,
    WorkerBatches,
    validation_windows,
    window_order,
)
from thinwire.train.data.streams import StreamWindows

T = 4


def make_windows(count: int, spare: int = 0) -> Windows:
    """Token i is i: a window is known by its first token."""
    return Windows(np.arange(count * (T + 1) + spare, dtype=np.int32), T)


def take(batches: WorkerBatches, steps: int) -> list[torch.Tensor]:
    return [next(batches) for _ in range(steps)]


def window_numbers(batch: torch.Tensor) -> list[int]:
    return [int(first) // (T + 1) for first in batch[:, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("spare", [0, 1, T])
def test_windows_are_the_tokens_cut_up(dtype, spare):
    tokens = np.arange(7 * (T + 1) + spare).astype(dtype)
    windows = Windows(tokens, T)
    assert len(windows) == 7
    got = windows.__getitems__(range(7))
    assert got.dtype == torch.int64
    assert got.flatten().tolist() == tokens[: 7 * (T + 1)].tolist()
    assert torch.equal(windows[3], got[3])


def test_windows_do_not_straddle_shards():
    shards = [np.arange(0, 12), np.arange(100, 103), np.arange(200, 215)]
    windows = Windows(shards, T)
    assert [int(windows[i][0]) for i in range(len(windows))] == [0, 5, 200, 205, 210]
    with pytest.raises(IndexError):
        windows[5]
    with pytest.raises(IndexError):
        windows[-1]


def test_windows_of_a_memory_mapped_file(tmp_path: Path):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "x.bin")
    windows = Windows(np.memmap(tmp_path / "x.bin", dtype=np.uint16, mode="r"), T)
    assert windows[9].tolist() == [45, 46, 47, 48, 49]


@pytest.mark.parametrize("size", [0, 1, T])
def test_too_few_tokens_for_a_window(size):
    with pytest.raises(CorpusError, match=rf"there are {size} tokens.*at least {T + 1}"):
        Windows(np.zeros(size, np.uint8), T)


def test_one_window_is_read_for_ever():
    batches = make_windows(1, spare=3).batches(0, 1, 2, seed=0)
    assert all(window_numbers(batch) == [0, 0] for batch in take(batches, 3))


@pytest.mark.parametrize("count", [1, 2, 13, 16])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_epoch_reads_every_window_once(count, workers):
    streams = [make_windows(count).batches(k, workers, 4, seed=1) for k in range(workers)]
    steps = zip(*(take(stream, 3 * count) for stream in streams), strict=True)
    read = [number for step in steps for batch in step for number in window_numbers(batch)]
    epochs = [read[start : start + count] for start in range(0, 12 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_workers_together_read_what_one_would(workers):
    windows = make_windows(17)
    alone = take(windows.batches(0, 1, 6, seed=3), 11)
    group = [take(windows.batches(k, workers, 6, seed=3), 11) for k in range(workers)]
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([worker[step] for worker in group]), batch)


def test_order_depends_on_seed_and_epoch_and_collides_nowhere():
    orders = [tuple(window_order(e * 50, e * 50 + 50, 50, s)) for s in range(4) for e in range(4)]
    assert len(set(orders)) == 16


def test_golden_order():
    # Published runs name a seed: the order behind it never changes.
    assert window_order(0, 10, 7, seed=0).tolist() == [6, 0, 1, 5, 3, 4, 2, 1, 2, 4]


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 7, 8, 30])
def test_resume_is_bit_equal_wherever_it_stops(stop):
    # 13 windows, 2 of 4 rows each step: an epoch ends within batch 3, 6, 9 and at 12 exactly.
    def fresh() -> WorkerBatches:
        return make_windows(13).batches(1, 2, 4, seed=5)

    whole = take(fresh(), stop + 20)
    before = fresh()
    take(before, stop)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = fresh()
    after.load_state_dict(torch.load(file, weights_only=True))
    for expected, got in zip(whole[stop:], take(after, 20), strict=True):
        assert torch.equal(expected, got)


def test_state_dict_disturbs_nothing_and_can_be_loaded_twice():
    whole = take(make_windows(13).batches(0, 1, 4, seed=5), 8)
    batches = make_windows(13).batches(0, 1, 4, seed=5)
    for expected in whole[:6]:
        batches.state_dict()
        assert torch.equal(next(batches), expected)
    state = batches.state_dict()
    for _ in range(2):
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        assert all(torch.equal(a, b) for a, b in zip(whole[6:], take(batches, 2), strict=True))


def test_more_workers_may_resume():
    windows = make_windows(13)
    whole = take(windows.batches(0, 1, 4, seed=5), 8)
    two = windows.batches(0, 2, 4, seed=5)
    take(two, 5)
    four = [windows.batches(k, 4, 4, seed=5) for k in range(4)]
    for batches in four:
        batches.load_state_dict(two.state_dict())
    assert torch.equal(torch.cat([next(batches) for batches in four]), whole[5])


@pytest.mark.parametrize(
    ("count", "global_batch", "seed", "field"),
    [(13, 4, 6, "seed"), (13, 8, 5, "global_batch"), (12, 4, 5, "windows")],
)
def test_a_state_of_other_batches_is_refused(count, global_batch, seed, field):
    state = make_windows(13).batches(0, 1, 4, seed=5).state_dict()
    other = make_windows(count).batches(0, 1, global_batch, seed)
    with pytest.raises(MismatchError, match=field):
        other.load_state_dict(state)


@pytest.mark.parametrize("wrapped", ["_sampler_iter_state", "fetcher_state"])
def test_a_state_within_that_of_a_loader_is_found(wrapped):
    batches = make_windows(13).batches(0, 1, 4, seed=5)
    whole = take(batches, 5)
    state = make_windows(13).batches(0, 1, 4, seed=5).state_dict() | {"step": 3}
    loader = {"_sampler_iter_state": None, "fetcher_state": None, "_num_yielded": 3}
    inner = {"dataset_iter_state": state} if wrapped == "fetcher_state" else state
    batches.load_state_dict(loader | {wrapped: inner})
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], take(batches, 2), strict=True))


def test_iterating_again_goes_on():
    batches = make_windows(5).batches(0, 1, 1, seed=0)
    first = [window_numbers(batch)[0] for batch, _ in zip(batches, range(2), strict=False)]
    rest = [window_numbers(batch)[0] for batch in take(batches, 2)]
    assert len({*first, *rest}) == 4


def test_global_randomness_is_left_alone():
    before = torch.get_rng_state()
    take(make_windows(5).batches(0, 1, 1, seed=0), 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 3, 10, 11, 100])
def test_validation_windows_are_distinct_and_spread(count):
    got = validation_windows(np.arange(11 * (T + 1) + 2), T, count)
    numbers = window_numbers(got)
    assert got.dtype == torch.int64
    assert len(numbers) == len(set(numbers)) == min(count, 11)
    gaps = np.diff([*numbers, 11])
    assert gaps.max() - gaps.min() <= 1


# -- shares, for elastic workers -------------------------------------------------------------------


def make_shares(count: int, *, rows: int, sync_every: int, seed: int = 1) -> Shares:
    return make_windows(count).shares(rows, sync_every, seed)


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


def test_a_stream_has_no_shares() -> None:
    stream = StreamWindows(None, None, T, frozenset())
    data = LoadedData(tokenizer=None, training=stream, validation=None, fingerprint="")
    with pytest.raises(ConfigurationError, match=r"join a run on a stream.*download the corpus"):
        data.training.shares(rows=1, sync_every=1, seed=0)
