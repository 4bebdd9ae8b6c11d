"""Memory of a worker's round, and the growth of its cost with workers, fragments and tensors."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from speed.measuring import Report, Table, spent, threads
from speed.models import llama, ragged
from speed.workers import LoopRounds, ObservedWorker
from thinwire import Method, codecs, presets
from thinwire.fragments import Strided

LAYERS = 32
SMALL = partial(llama, vocabulary=8192, width=256, layers=3)
METHODS: Sequence[Callable[..., Method]] = (
    presets.diloco,
    partial(presets.diloco, name="diloco in E3M0", codec=codecs.E3M0()),
    partial(presets.muloco, name="muloco in 2 bit", bits=2),
    presets.sparseloco,
    presets.sparse_muloco,
)
Row = dict[str, Any]


# -- memory ----------------------------------------------------------------------------------------


def round_memory(
    *,
    build: Callable[[], nn.Module] = SMALL,
    methods: Sequence[str] = (*presets.names(), "muloco:bits=2"),
    workers: Sequence[int] = (1, 2),
) -> Report:
    """Count what torch allocates in begin() and finish(); the same on any machine.

    Args:
        build: makes the same model at each call; in larger models blocks are a smaller share.
        methods: presets, as in `presets.from_text`.
        workers: numbers of workers.
    """
    rows = [
        _memory(build, with_short_rounds(name), dtype=dtype, workers=count)
        for name in methods
        for dtype in (torch.float32, torch.bfloat16)
        for count in workers
    ]
    table = Table(
        "temporaries of one worker's round beside state and payload, bytes per parameter of the "
        "largest fragment",
        ("method", "weights", "K", "begin", "finish"),
        [
            (
                *(row["method"], row["dtype"], str(row["workers"])),
                *(f"{row['begin_bytes']:.2f}", f"{row['finish_bytes']:.2f}"),
            )
            for row in rows
        ],
    )
    return Report({"rows": rows}, [table])


def _memory(
    build: Callable[[], nn.Module], method: Method, *, dtype: torch.dtype, workers: int
) -> Row:
    """The most that lives at once in begin(), including what stays until finish(), and in finish().

    For one worker over two rounds of every fragment, in bytes per parameter of the largest
    fragment, without state and payload.
    """
    worker = ObservedWorker(lambda: build().to(dtype), method, workers)
    largest = max(f.outer.flat_anchor().numel() for f in worker.loop._state.fragments)
    begin = finish = 0
    for _ in range(2 * method.sync_every):
        worker.train()
        begin = max(begin, worker.temporaries(worker.loop.begin))
        finish = max(finish, worker.temporaries(worker.loop.finish))
    return {
        "method": method.name,
        "dtype": str(dtype).removeprefix("torch."),
        "workers": workers,
        "begin_bytes": begin / largest,
        "finish_bytes": finish / largest,
    }


def with_short_rounds(text: str, *, late: int = 3) -> Method:
    """A preset with one inner step a round, or `late` steps if its exchanges overlap training.

    Args:
        text: name and settings, as in `presets.from_text`.
        late: inner steps; at least the number of fragments.

    >>> with_short_rounds("diloco").sync_every, with_short_rounds("streaming_diloco").sync_every
    (1, 3)
    """
    method = presets.from_text(text)
    is_late = method.overlap.steps(sync_every=method.sync_every) > 0
    return presets.from_text(text, sync_every=late if is_late else 1)


# -- growth ----------------------------------------------------------------------------------------


def round_scaling(
    *,
    parameters: int = 1 << 20,
    workers: Sequence[int] = (2, 4, 8, 16, 32, 64),
    fragments: Sequence[int] = (1, 2, 4, 8, 16, 32),
    tensors: Sequence[int] = (10, 100, 1000, 10_000),
    repeats: int = 3,
) -> Report:
    """Rounds of a small model without a network, on one thread.

    Args:
        parameters: approximate size of the model; a quarter of it along `workers`.
        workers: values of K; the model has 16 tensors in one fragment.
        fragments: numbers of fragments of 32 tensors, one sent after each inner step, K=2.
        tensors: numbers of ragged tensors in one fragment, K=2.
        repeats: rounds of each.
    """
    small = partial(ragged, tensors=16, parameters=parameters // 4)
    layered = partial(ragged, tensors=LAYERS, parameters=parameters)
    rows: list[Row] = []
    with threads(1):
        for method in METHODS:
            whole = method(sync_every=1)
            for count in workers:
                rows.append(_cost(small, whole, "workers", count, count, repeats))
            for count in fragments:
                cut = method(sync_every=count, fragments=Strided(layers=LAYERS // count))
                rows.append(_cost(layered, cut, "fragments", count, 2, repeats))
            for count in tensors:
                build = partial(ragged, tensors=count, parameters=parameters)
                rows.append(_cost(build, whole, "tensors", count, 2, repeats))
    rows.sort(key=lambda row: ("workers", "fragments", "tensors").index(row["axis"]))
    table = Table(
        "a round, one thread: ns of CPU per parameter and worker, and kernels of a worker",
        ("method", "axis", "count", "begin", "finish", "kernels"),
        [
            (
                *(row["method"], row["axis"], f"{row['count']:,}"),
                *(f"{row['begin_ns']:.1f}", f"{row['finish_ns']:.1f}", f"{row['kernels']:,.0f}"),
            )
            for row in rows
        ],
    )
    return Report({"rows": rows}, [table])


def _cost(
    build: Callable[[], nn.Module],
    method: Method,
    axis: str,
    count: int,
    workers: int,
    repeats: int,
) -> Row:
    """Least CPU time per parameter and worker over the repetitions, and operations of a worker.

    A round has the method's number of inner steps. The first round, in which not every fragment is
    due, does not count; the second counts operations.
    """
    rounds = LoopRounds(build, method, workers)

    def take_round(counted: Any = None) -> tuple[float, float]:
        begin_s = finish_s = 0.0
        for _ in range(method.sync_every):
            rounds.train()
            with counted or nullcontext():
                begin_s += spent(rounds.begin).cpu_s
                finish_s += spent(rounds.finish).cpu_s
        return begin_s, finish_s

    take_round()
    kernels = _Kernels()
    take_round(kernels)
    begin_s, finish_s = zip(*(take_round() for _ in range(repeats)), strict=True)
    per = 1e9 / workers / sum(p.numel() for p in rounds.parameters())
    return {
        "method": method.name,
        "axis": axis,
        "count": count,
        "begin_ns": per * min(begin_s),
        "finish_ns": per * min(finish_s),
        "kernels": kernels.count / workers,
    }


class _Kernels(TorchDispatchMode):
    """Counts operations other than views."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
