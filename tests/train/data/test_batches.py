"""Windows, their order, batches that resume, and shares that elastic workers read once each."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import MismatchError
from thinwire.train.data import Data
from thinwire.train.data.batches import Windows, WorkerBatches, window_order

T = 4


def make_windows(count: int, spare: int = 0) -> Windows:
    """Token i is i: a window is known by its first token."""
    return Windows([np.arange(count * (T + 1) + spare, dtype=np.int32)], T)


def take(batches: WorkerBatches, steps: int) -> list[torch.Tensor]:
    return [next(batches) for _ in range(steps)]


def window_numbers(batch: torch.Tensor) -> list[int]:
    return [int(first) // (T + 1) for first in batch[:, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("spare", [0, 1, T])
def test_windows_are_the_tokens_cut_up(dtype, spare):
    tokens = np.arange(7 * (T + 1) + spare).astype(dtype)
    windows = Windows([tokens], T)
    assert len(windows) == 7
    got = windows.rows(range(7))
    assert got.dtype == torch.int64
    assert got.flatten().tolist() == tokens[: 7 * (T + 1)].tolist()


def test_windows_do_not_straddle_shards_of_which_some_are_mapped(tmp_path: Path):
    np.arange(100, 103, dtype=np.uint16).tofile(tmp_path / "x.bin")
    mapped = np.memmap(tmp_path / "x.bin", dtype=np.uint16, mode="r")
    windows = Windows([np.arange(0, 12), mapped, np.arange(200, 215)], T)
    assert windows.rows(range(len(windows)))[:, 0].tolist() == [0, 5, 200, 205, 210]


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_workers_together_read_what_one_would(workers):
    windows = make_windows(17)
    alone = take(windows.batches(0, 1, 6, seed=3), 11)
    group = [take(windows.batches(k, workers, 6, seed=3), 11) for k in range(workers)]
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([worker[step] for worker in group]), batch)
        assert torch.equal(windows.samples(6 * step, 6, seed=3), batch)


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
    before, after, file = fresh(), fresh(), io.BytesIO()
    for _ in range(stop):
        before.state_dict()
        next(before)
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(torch.cat(whole[stop:]), torch.cat(take(after, 20)))


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


def test_global_randomness_is_left_alone():
    before = torch.get_rng_state()
    take(make_windows(5).batches(0, 1, 1, seed=0), 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 3, 10, 11, 100])
def test_validation_windows_are_distinct_and_spread(count, tmp_path: Path):
    for side, windows in (("train", 4), ("val", 11)):
        np.arange(windows * (T + 1) + 2, dtype="<u2").tofile(tmp_path / f"{side}.bin")
    data = Data(corpus=str(tmp_path), sequence_length=T, validation_sequences=count)
    got = data.load().validation
    numbers = window_numbers(got)
    assert got.dtype == torch.int64
    assert len(numbers) == len(set(numbers)) == min(count, 11)
    gaps = np.diff([*numbers, 11])
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("count", [1, 2, 13, 24, 101])
@pytest.mark.parametrize(("rows", "sync_every"), [(1, 1), (2, 3), (3, 7)])
def test_any_dealing_of_shares_reads_every_window_of_an_epoch_once(count, rows, sync_every) -> None:
    windows, draw = make_windows(count), random.Random(count)
    dealt, read = 0, dict[int, list[int]]()
    while dealt * rows * sync_every < 3 * count:
        workers = draw.randrange(1, 6)  # a round: others come and go after it
        hands = draw.sample(range(dealt, dealt + workers), workers)
        dealt += workers
        for index in range(sync_every):
            for share in draw.sample(hands, workers):
                start = (share * sync_every + index) * rows
                read[start] = window_numbers(windows.samples(start, rows, seed=1))
    samples = [number for place in sorted(read) for number in read[place]]
    epochs = [samples[start : start + count] for start in range(0, 3 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
