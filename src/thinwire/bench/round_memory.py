"""How much memory a worker's round takes for the time being."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire import presets
from thinwire.bench.result import BenchReport, BenchTable
from thinwire.bench.shapes import llama
from thinwire.bench.workers import ObservedWorker
from thinwire.method import Method

_SMALL = partial(llama, vocabulary=8192, width=256, layers=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMemory:
    """Bytes a parameter of the largest fragment, beside state and payload.

    Args:
        method: its name.
        dtype: of the live weights.
        workers: K.
        begin_bytes: most that lives at once in begin(), what stays until finish() included.
        finish_bytes: most that finish() adds to it.
    """

    method: str
    dtype: str
    workers: int
    begin_bytes: float
    finish_bytes: float

    @classmethod
    def of(
        cls, build: Callable[[], nn.Module], method: Method, *, dtype: torch.dtype, workers: int
    ) -> "RoundMemory":
        """Measure one worker over two rounds of every fragment.

        Args:
            build: makes the same model at each call.
            method: of all workers.
            dtype: of the live weights.
            workers: K.
        """
        worker = ObservedWorker(lambda: build().to(dtype), method, workers)
        largest = max(len(anchor) for anchor in worker.loop.flat_anchors())
        begin = finish = 0
        for _ in range(2 * method.sync_every):
            worker.train()
            begin = max(begin, worker.temporaries(worker.loop.begin))
            finish = max(finish, worker.temporaries(worker.loop.finish))
        return cls(
            method=method.name,
            dtype=str(dtype).removeprefix("torch."),
            workers=workers,
            begin_bytes=begin / largest,
            finish_bytes=finish / largest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMemoryReport(BenchReport):
    """Temporaries of every method.

    Args:
        rows: one for each method, dtype and number of workers.
    """

    rows: list[RoundMemory]
    name: str = "round-memory"

    def tables(self) -> Sequence[BenchTable]:
        """One table."""
        return [
            BenchTable(
                title="temporaries of one worker's round beside state and payload, bytes per "
                "parameter of the largest fragment",
                columns=("method", "weights", "K", "begin", "finish"),
                rows=tuple(
                    (
                        row.method,
                        row.dtype,
                        str(row.workers),
                        f"{row.begin_bytes:.2f}",
                        f"{row.finish_bytes:.2f}",
                    )
                    for row in self.rows
                ),
            )
        ]

    def describe(self) -> dict[str, Any]:
        """All rows."""
        return {"name": self.name, "rows": [asdict(row) for row in self.rows]}


def round_memory(
    *,
    build: Callable[[], nn.Module] = _SMALL,
    methods: Sequence[str] = (*presets.names(), "muloco:bits=2"),
    workers: Sequence[int] = (1, 2),
) -> RoundMemoryReport:
    """Count what torch allocates in begin() and finish(); the same on any machine.

    Args:
        build: makes the same model at each call; larger ones have smaller shares of blocks.
        methods: presets, as in `presets.from_text`.
        workers: numbers of them.
    """
    return RoundMemoryReport(
        rows=[
            RoundMemory.of(build, with_short_rounds(name), dtype=dtype, workers=count)
            for name in methods
            for dtype in (torch.float32, torch.bfloat16)
            for count in workers
        ]
    )


def with_short_rounds(text: str) -> Method:
    """A preset with the fewest inner steps a round that its overlap allows, three if there is one.

    Args:
        text: its name, and settings as in `presets.from_text`.

    >>> with_short_rounds("diloco").sync_every, with_short_rounds("streaming_diloco").sync_every
    (1, 3)
    """
    method = presets.from_text(text)
    is_late = method.overlap.steps(sync_every=method.sync_every) > 0
    return presets.from_text(text, sync_every=3 if is_late else 1)
