"""The bandwidth table of Streaming DiLoCo: its simulation, and some of its cells."""

import math
from pathlib import Path

import pytest

from thinwire.fragments import At, Sequential, Strided, Whole

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYERS, STEP_S = 11, 0.1


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import streaming_table

    return streaming_table


def node_by_node(pieces, *, every: int, tau: int, rate: float, steps: int) -> list[float]:
    """The time at the end of every step, forward and backward of each layer one after the other."""
    forward_s, backward_s = STEP_S / 3 / LAYERS, 2 * STEP_S / 3 / LAYERS
    layer_of = {round(3 * LAYERS * piece.needed_at): piece for piece in pieces}
    now_s = free_s = 0.0
    needed: dict[tuple[int, int], float] = {}
    ends = []
    for step in range(1, steps + 1):
        for layer in range(LAYERS):
            now_s = max(now_s, needed.pop((step, layer), 0.0)) + forward_s
        for layer in reversed(range(LAYERS)):
            now_s += backward_s
            piece = layer_of[layer]
            if (step - piece.offset) % every == 0 and step >= piece.first:
                free_s = max(free_s, now_s) + 8 * piece.nbytes / rate
                needed[step + 1 + tau, layer] = free_s
        ends.append(now_s)
    return ends


@pytest.mark.parametrize("rate", [3e4, 3e5, 3e6, 3e8])
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize(
    ("every", "fragments"),
    [
        (1, Whole()),
        (7, Whole()),
        (7, Strided(layers=3)),
        (7, Sequential(layers=2, offsets=At(steps=(0,) * 6))),
    ],
)
def test_layers_by_themselves_run_as_in_the_paper(table, rate, tau, fragments, every) -> None:
    streams = table.Streams.of(
        fragments, parameters=70_001, layers=LAYERS, bits=16, sync_every=every, tau=tau
    )
    ends = node_by_node(streams.pieces, every=every, tau=tau, rate=rate, steps=5 * every)
    found = streams.round_ends(5, step_s=STEP_S, rate=rate)
    assert found == pytest.approx(ends[every - 1 :: every], rel=1e-9)


def test_the_first_layer_is_ready_last_and_needed_first(table) -> None:
    streams = table.Streams.of(Whole(), parameters=5, layers=2, bits=16, sync_every=1, tau=0)
    last, first = streams.pieces
    assert (last.ready_at, last.needed_at) == pytest.approx((2 / 3, 1 / 6))
    assert (first.ready_at, first.needed_at) == pytest.approx((1, 0))
    assert last.nbytes == first.nbytes == 5


def test_the_grid_is_read_below_the_point_that_reaches(table) -> None:
    low, second, third = table.GRID[:3]
    readings = [table.grid_reading(x) for x in (low / 2, low, 1.01 * low, second, 1.01 * second)]
    assert readings == [low, low, low, low, second]
    assert low < second < third
    assert table.grid_reading(2000.0) == math.inf


@pytest.mark.parametrize(
    ("model", "method", "column"),
    [
        ("1B", "Data-Parallel", 4),
        ("10B", "DiLoCo", 2),
        ("1B", "Streaming", 3),
        ("100B", "Streaming + overlap", 1),
        ("10B", "Streaming + overlap + FP4", 4),
    ],
)
def test_published_bandwidths(table, model, method, column) -> None:
    published = table.PUBLISHED[model][method][column]
    cell = table.cell(model, method, table.TARGETS[column], published)
    assert cell["grid_steps"] <= 1
