"""What a whole round costs beside plain torch, torchft and a copy of as many bytes."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import codecs, presets
from thinwire.bench.plain_rounds import TorchBlocks, TorchForeach, TorchFT
from thinwire.bench.result import BenchReport, BenchTable, Spent, spent, threads
from thinwire.bench.shapes import llama
from thinwire.bench.workers import LoopRounds, Rounds
from thinwire.errors import ConfigurationError
from thinwire.feedback import ErrorFeedback
from thinwire.method import Method

_COPIED_BYTES = 8  # a parameter that is copied in fp32 is read and written


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimes:
    """The repetitions of one round, all workers of it together.

    Args:
        name: of the method or the baseline.
        workers: K.
        threads: of torch.
        parameters: of the model.
        begin_bytes: that begin() has to read and write, a parameter.
        finish_bytes: likewise of finish(), before the first of which nothing is known.
        difference: largest one of the outer parameters to those of plain torch after all rounds,
            over the largest of these; None where there is nothing to compare with.
        begin: CPU and wall seconds of each repetition.
        finish: likewise.
        copy: of a copy of all parameters, in turns with the others.
    """

    name: str
    workers: int
    threads: int
    parameters: int
    begin_bytes: int
    finish_bytes: int
    difference: float | None
    begin: list[Spent]
    finish: list[Spent]
    copy: list[Spent]

    @property
    def whole(self) -> list[Spent]:
        """Of both halves together."""
        return [
            Spent(cpu_s=b.cpu_s + f.cpu_s, wall_s=b.wall_s + f.wall_s)
            for b, f in zip(self.begin, self.finish, strict=True)
        ]

    def over_floor(self, half: str) -> float:
        """CPU time of `half` ("begin", "finish") over a copy of as many bytes: of minima."""
        copied_s = min(s.cpu_s for s in self.copy) * self.workers
        floor_s = copied_s * getattr(self, f"{half}_bytes") / _COPIED_BYTES
        return min(s.cpu_s for s in getattr(self, half)) / floor_s

    def describe(self, plain: "RoundTimes") -> dict[str, Any]:
        """Everything, ns per parameter and worker, and the ratio to the round of plain torch."""
        per = 1e9 / self.parameters / self.workers
        row: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("name", "workers", "threads", "begin_bytes", "finish_bytes", "difference")
        }
        for half in ("begin", "finish", "whole"):
            times: list[Spent] = getattr(self, half)
            row |= {
                f"{half}_cpu_ns": per * min(s.cpu_s for s in times),
                f"{half}_cpu_median_ns": per * statistics.median(s.cpu_s for s in times),
                f"{half}_wall_ns": per * min(s.wall_s for s in times),
                f"{half}_cpu_s": [s.cpu_s for s in times],
                f"{half}_wall_s": [s.wall_s for s in times],
            }
        row["copy_cpu_s"] = [s.cpu_s for s in self.copy]
        if self.begin_bytes:
            row |= {f"{half}_over_floor": self.over_floor(half) for half in ("begin", "finish")}
        row["over_plain"] = min(s.cpu_s for s in self.whole) / min(s.cpu_s for s in plain.whole)
        return row


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReport(BenchReport):
    """Rounds and their baselines, by number of threads and of workers.

    Args:
        blocks: rows of one number of threads and workers each, one of plain torch among them.
    """

    blocks: list[list[RoundTimes]]
    name: str = "round"

    def tables(self) -> Sequence[BenchTable]:
        """A table for each number of threads."""
        return [self._table(block) for block in self.blocks]

    def describe(self) -> dict[str, Any]:
        """All rows."""
        return {
            "name": self.name,
            "parameters": self.blocks[0][0].parameters,
            "rows": [row.describe(_plain(block)) for block in self.blocks for row in block],
        }

    def _table(self, block: Sequence[RoundTimes]) -> BenchTable:
        first = block[0]
        count = f"{first.threads} thread" + ("s" if first.threads > 1 else "")
        return BenchTable(
            title=f"a round of {first.parameters:,} parameters, {count}: ns of CPU per parameter "
            "and worker; over a copy of as many bytes; over plain torch",
            columns=("round", "K", "begin", "/floor", "finish", "/floor", "whole", "/plain"),
            rows=tuple(_texts(row.describe(_plain(block))) for row in block),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A method, and the bytes a parameter that its round reads and writes at least.

    Args:
        method: with a round at every step.
        begin_bytes: live weights and anchor, and what is sent or left over.
        finish_bytes: what arrived, outer momentum and anchor, and live weights.
    """

    method: Method
    begin_bytes: int
    finish_bytes: int


def _cases(workers: int) -> list[_Case]:
    feedback = ErrorFeedback(decay=0.9)
    e3m0 = presets.diloco(
        name="diloco in E3M0", sync_every=1, codec=codecs.E3M0(), feedback=feedback
    )
    diloco = _Case(
        method=presets.diloco(sync_every=1), begin_bytes=12, finish_bytes=20 + 4 * workers
    )
    if workers == 1:
        return [diloco]
    return [
        diloco,
        *(
            _Case(
                method=presets.muloco(name=f"muloco in {bits} bit", bits=bits, sync_every=1),
                begin_bytes=16,
                finish_bytes=20,
            )
            for bits in (1, 2)
        ),
        _Case(method=e3m0, begin_bytes=16, finish_bytes=20),
        _Case(method=presets.sparseloco(sync_every=1), begin_bytes=16, finish_bytes=12),
        _Case(method=presets.sparse_muloco(sync_every=1), begin_bytes=16, finish_bytes=12),
    ]


def round(
    *, build: Callable[[], nn.Module] = llama, workers: Sequence[int] = (1, 2), repeats: int = 5
) -> RoundReport:
    """Rounds without a network, between inner steps that cost nothing, on one thread and on all.

    Args:
        build: makes the same model at each call; the default has 42,082,816 parameters in 74
            tensors.
        workers: numbers of workers, all in this process.
        repeats: rounds of each, in turns, after one that is not counted.
    """
    blocks: list[list[RoundTimes]] = []
    for count in dict.fromkeys((1, os.cpu_count() or 1)):
        with threads(count):
            blocks += [_block(build, k, repeats) for k in workers]
    return RoundReport(blocks=blocks)


def _block(build: Callable[[], nn.Module], workers: int, repeats: int) -> list[RoundTimes]:
    diloco, *others = _cases(workers)
    plain = [
        TorchForeach(build, diloco.method, workers),
        TorchBlocks(build, diloco.method, workers),
    ]
    rows = _rows([*plain, *_peers(build, diloco.method, workers)], diloco, build, workers, repeats)
    del plain
    for case in others:
        rows += _rows([], case, build, workers, repeats)
    return rows


def _peers(build: Callable[[], nn.Module], method: Method, workers: int) -> list[Rounds]:
    if workers > 1:
        return []
    try:
        return [TorchFT(build, method)]
    except ConfigurationError:  # an extra, and not on every platform
        return []


def _rows(
    baselines: Sequence[Rounds],
    case: _Case,
    build: Callable[[], nn.Module],
    workers: int,
    repeats: int,
) -> list[RoundTimes]:
    ours = LoopRounds(build, case.method, workers)
    measured = [_Measured(rounds) for rounds in (*baselines, ours)]
    source = torch.cat([p.reshape(-1).float() for p in ours.parameters()])
    target = torch.zeros_like(source)
    copies: list[Spent] = []
    for _ in range(repeats + 1):
        copies.append(spent(lambda: target.copy_(source)))
        for each in measured:
            each.once()
    reference = baselines[0].parameters() if baselines else None
    return [
        RoundTimes(
            name=each.rounds.name,
            workers=workers,
            threads=torch.get_num_threads(),
            parameters=source.numel(),
            begin_bytes=case.begin_bytes,
            finish_bytes=case.finish_bytes,
            difference=None
            if reference is None
            else _difference(each.rounds.parameters(), reference),
            begin=each.begin[1:],
            finish=each.finish[1:],
            copy=copies[1:],
        )
        for each in measured
    ]


@dataclass(eq=False)  # state: it fills up with repetitions
class _Measured:
    """Rounds, and what each took."""

    rounds: Rounds
    begin: list[Spent] = field(default_factory=list)
    finish: list[Spent] = field(default_factory=list)

    def once(self) -> None:
        self.rounds.train()
        self.begin.append(spent(self.rounds.begin))
        self.finish.append(spent(self.rounds.finish))


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return apart / max(float(b.abs().max()) for _, b in pairs)


def _plain(block: Sequence[RoundTimes]) -> RoundTimes:
    """The faster one of the two that are plain torch."""
    return min(block[:2], key=lambda row: min(s.cpu_s for s in row.whole))


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    halves = [
        text
        for half in ("begin", "finish")
        for text in (f"{row[f'{half}_cpu_ns']:.2f}", f"{row[f'{half}_over_floor']:.1f}")
    ]
    whole = f"{row['whole_cpu_ns']:.2f}"
    return (row["name"], str(row["workers"]), *halves, whole, f"{row['over_plain']:.2f}")
