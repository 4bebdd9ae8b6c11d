import pytest
import torch
from torch import nn

import thinwire as tw
from elastic_twin import ElasticHub
from thinwire.integrations.shares import ShareDataset
from toy import exchange_all

H, ROWS = 3, 2


def worker(hub: ElasticHub, name: str):
    model = nn.Linear(2, 1)
    end = hub.connect(name)
    return end, tw.OuterLoop(model, [], tw.presets.diloco(sync_every=H), transport=end)


def joined(*names: str) -> list[tw.OuterLoop]:
    hub = ElasticHub()
    team = [worker(hub, name) for name in names]
    hub.set_members(*(end for end, _ in team))
    for _, loop in team:
        loop.join()
    return [loop for _, loop in team]


def test_workers_read_every_row_once_and_a_pass_is_a_round() -> None:
    loops = joined("a", "b")
    # So many that the order does not begin anew.
    sets = [ShareDataset(range(36), lambda loop=loop: loop, rows_per_step=ROWS) for loop in loops]
    seen: list[int] = []
    for _ in range(3):
        seen += [row for shares in sets for row in shares]
        for _ in range(H):
            exchange_all(loops)
    assert sorted(seen) == list(range(36))
    assert len(sets[0]) == H * ROWS


def test_the_order_depends_on_the_seed_and_goes_on_behind_the_last_row() -> None:
    (loop,) = joined("a")
    given = {"rows_per_step": 2}
    orders = [list(ShareDataset(range(5), lambda: loop, seed=seed, **given)) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert all(sorted(order[:5]) == list(range(5)) for order in orders)
    # A pass that begins within a round has what is left of it.
    whole = list(ShareDataset(range(100), lambda: loop, rows_per_step=ROWS))
    exchange_all([loop])
    assert list(ShareDataset(range(100), lambda: loop, rows_per_step=ROWS)) == whole[ROWS:]


@pytest.mark.parametrize(
    ("rows", "count", "of", "word"),
    [
        (range(0), 1, None, "the number of rows to 0"),
        (range(3), 0, None, "rows_per_step to 0"),
        (range(9), 1, lambda: worker(ElasticHub(), "a")[1], r"outer\.join\(\)"),
    ],
)
def test_nothing_to_read_is_refused(rows, count: int, of, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        next(iter(ShareDataset(rows, of or (lambda: joined("a")[0]), rows_per_step=count)))


def test_fewer_or_more_rows_than_are_trained_in_a_round_are_refused() -> None:
    (loop,) = joined("a")
    shares = ShareDataset(range(100), lambda: loop, rows_per_step=1)
    list(shares)
    exchange_all([loop])
    with pytest.raises(tw.ConfigurationError, match="read to its end before its round was over"):
        next(iter(shares))
    (loop,) = joined("a")
    rows = iter(ShareDataset(range(100), lambda: loop, rows_per_step=4))
    for _ in range(H):
        next(rows)
        exchange_all([loop])
    with pytest.raises(tw.ConfigurationError, match="not read to its end in its round"):
        next(rows)


def test_a_pass_ends_where_the_worker_is_put_back() -> None:
    (loop,) = joined("a")
    rows = iter(ShareDataset(range(100), lambda: loop, rows_per_step=ROWS))
    next(rows)
    exchange_all([loop])
    next(rows)
    loop._state.step = 0
    loop._state.dealt += 1
    assert list(rows) == []


def test_a_process_of_a_data_loader_is_refused() -> None:
    (loop,) = joined("a")
    shares = ShareDataset(range(100), lambda: loop, rows_per_step=ROWS)
    loader = torch.utils.data.DataLoader(
        shares, batch_size=ROWS, num_workers=1, multiprocessing_context="fork"
    )
    # DataLoader brings the error from its process as one of its own.
    with pytest.raises(RuntimeError, match=r"ConfigurationError: .*num_workers=0"):
        next(iter(loader))
