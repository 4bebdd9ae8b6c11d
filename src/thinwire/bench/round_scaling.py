"""How a round's cost grows with workers, fragments and tensors."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import codecs, presets
from thinwire.bench.result import BenchReport, BenchTable, spent, threads
from thinwire.bench.workers import LoopRounds
from thinwire.fragments import Strided
from thinwire.method import Method

_LAYERS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """A round, per parameter and worker.

    Args:
        method: its name.
        axis: what grows: workers, fragments or tensors.
        count: how many of these there are.
        begin_ns: CPU time of begin(), the least of the repetitions.
        finish_ns: likewise of finish().
        kernels: operations of torch in a worker's round that are no views.
    """

    method: str
    axis: str
    count: int
    begin_ns: float
    finish_ns: float
    kernels: float

    @classmethod
    def of(
        cls,
        build: Callable[[], nn.Module],
        method: Method,
        *,
        axis: str,
        count: int,
        workers: int,
        repeats: int,
    ) -> "RoundCost":
        """Measure rounds of all workers in this process.

        Args:
            build: makes the same model at each call.
            method: of all workers; a round is as many inner steps as it says.
            axis: what grows.
            count: how many of these there are.
            workers: K.
            repeats: rounds that are timed, after one whose kernels are counted.
        """
        rounds = LoopRounds(build, method, workers)
        # Not every fragment is due in the first round.
        for _ in range(method.sync_every):
            rounds.train()
            rounds.begin()
            rounds.finish()
        kernels = _Kernels()
        for _ in range(method.sync_every):
            rounds.train()
            with kernels:
                rounds.begin()
                rounds.finish()
        begin_s, finish_s = [0.0] * repeats, [0.0] * repeats
        for number in range(repeats):
            for _ in range(method.sync_every):
                rounds.train()
                begin_s[number] += spent(rounds.begin).cpu_s
                finish_s[number] += spent(rounds.finish).cpu_s
        per = 1e9 / workers / sum(p.numel() for p in rounds.parameters())
        return cls(
            method=method.name,
            axis=axis,
            count=count,
            begin_ns=per * min(begin_s),
            finish_ns=per * min(finish_s),
            kernels=kernels.count / workers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundScalingReport(BenchReport):
    """Costs by number of workers, of fragments and of tensors.

    Args:
        rows: ascending along each axis.
    """

    rows: list[RoundCost]
    name: str = "round-scaling"

    def tables(self) -> Sequence[BenchTable]:
        """One table."""
        return [
            BenchTable(
                title="a round, one thread: ns of CPU per parameter and worker, and kernels of a "
                "worker",
                columns=("method", "axis", "count", "begin", "finish", "kernels"),
                rows=tuple(
                    (
                        row.method,
                        row.axis,
                        f"{row.count:,}",
                        f"{row.begin_ns:.1f}",
                        f"{row.finish_ns:.1f}",
                        f"{row.kernels:,.0f}",
                    )
                    for row in self.rows
                ),
            )
        ]

    def describe(self) -> dict[str, Any]:
        """All rows."""
        return {"name": self.name, "rows": [asdict(row) for row in self.rows]}


def round_scaling(
    *,
    parameters: int = 1 << 20,
    workers: Sequence[int] = (2, 4, 8, 16, 32, 64),
    fragments: Sequence[int] = (1, 2, 4, 8, 16, 32),
    tensors: Sequence[int] = (10, 100, 1000, 10_000),
    repeats: int = 3,
) -> RoundScalingReport:
    """Rounds of a small model without a network, on one thread.

    Args:
        parameters: of the model, about; a quarter of it along `workers`.
        workers: K; the model has 16 tensors in one fragment.
        fragments: of 32 tensors, one sent after each inner step, K=2.
        tensors: ragged ones in one fragment, K=2.
        repeats: rounds of each.
    """
    with threads(1):
        rows = [
            RoundCost.of(
                lambda: ragged(tensors=16, parameters=parameters // 4),
                method(sync_every=1),
                axis="workers",
                count=count,
                workers=count,
                repeats=repeats,
            )
            for method in _METHODS
            for count in workers
        ]
        rows += [
            RoundCost.of(
                lambda: ragged(tensors=_LAYERS, parameters=parameters),
                method(sync_every=count, fragments=Strided(layers=_LAYERS // count)),
                axis="fragments",
                count=count,
                workers=2,
                repeats=repeats,
            )
            for method in _METHODS
            for count in fragments
        ]
        rows += [
            RoundCost.of(
                lambda count=count: ragged(tensors=count, parameters=parameters),
                method(sync_every=1),
                axis="tensors",
                count=count,
                workers=2,
                repeats=repeats,
            )
            for method in _METHODS
            for count in tensors
        ]
    return RoundScalingReport(rows=rows)


_METHODS: Sequence[Callable[..., Method]] = (
    presets.diloco,
    partial(presets.diloco, name="diloco in E3M0", codec=codecs.E3M0()),
    partial(presets.muloco, name="muloco in 2 bit", bits=2),
    presets.sparseloco,
    presets.sparse_muloco,
)


def ragged(*, tensors: int, parameters: int) -> nn.Module:
    """A stack of as many matrices of sizes that no chunk divides; the same at each call.

    Args:
        tensors: how many.
        parameters: of all of them, about.

    >>> [tuple(p.shape) for p in ragged(tensors=3, parameters=3000).parameters()]
    [(7, 142), (7, 143), (7, 144)]
    """
    columns = parameters // tensors // 7
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(columns + number % 5, 7, bias=False) for number in range(tensors)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02, generator=generator)
    return nn.Sequential(*layers)


class _Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
