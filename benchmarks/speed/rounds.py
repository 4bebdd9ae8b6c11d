"""The cost of a whole round, next to plain torch, torchft and a copy of as many bytes."""

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from speed.measuring import Report, Spent, Table, spent, threads
from speed.models import llama
from speed.plain_rounds import TorchBlocks, TorchForeach, TorchFT
from speed.workers import LoopRounds, Rounds
from thinwire import Method, codecs, presets
from thinwire.feedback import ErrorFeedback

COPIED_BYTES = 8  # a parameter that is copied in fp32 is read and written
Row = dict[str, Any]


class Case(NamedTuple):
    """A method with a round at every step, and the fewest bytes per parameter that a round moves.

    begin() reads live weights and anchor, and reads and writes what is sent or left over; finish()
    does so with what arrived, outer momentum, anchor and live weights.
    """

    method: Method
    begin_bytes: int
    finish_bytes: int


def round(
    *, build: Callable[[], nn.Module] = llama, workers: Sequence[int] = (1, 2), repeats: int = 5
) -> Report:
    """Rounds without a network, between inner steps that cost nothing, on one thread and on all.

    Args:
        build: makes the same model at each call; the default has 42,082,816 parameters in 74
            tensors.
        workers: numbers of workers, all in this process.
        repeats: rounds of each, in turns, after one that does not count.
    """
    rows: list[Row] = []
    tables: list[Table] = []
    for count in dict.fromkeys((1, os.cpu_count() or 1)):
        with threads(count):
            of_threads = [row for k in workers for row in _block(build, k, repeats)]
        rows += of_threads
        title = f"a round, threads: {count}; ns of CPU per parameter and worker; over a copy of as "
        title += "many bytes; over plain torch"
        columns = ("round", "K", "begin", "/floor", "finish", "/floor", "whole", "/plain")
        tables.append(Table(title, columns, [_texts(row) for row in of_threads]))
    data = {"parameters": sum(p.numel() for p in build().parameters()), "rows": rows}
    return Report(data, tables)


def _cases(workers: int) -> list[Case]:
    cases = [Case(presets.diloco(sync_every=1), 12, 20 + 4 * workers)]
    if workers == 1:
        return cases
    for bits in (1, 2):
        coded = presets.muloco(name=f"muloco in {bits} bit", bits=bits, sync_every=1)
        cases.append(Case(coded, 16, 20))
    feedback = ErrorFeedback(decay=0.9)
    e3m0 = presets.diloco(
        name="diloco in E3M0", sync_every=1, codec=codecs.E3M0(), feedback=feedback
    )
    return [
        *cases,
        Case(e3m0, 16, 20),
        Case(presets.sparseloco(sync_every=1), 16, 12),
        Case(presets.sparse_muloco(sync_every=1), 16, 12),
    ]


def _block(build: Callable[[], nn.Module], workers: int, repeats: int) -> list[Row]:
    """Rows for one number of workers, relative to the faster of the two plain torch rounds."""
    diloco, *others = _cases(workers)
    kinds = [TorchForeach, TorchBlocks]
    baselines: list[Rounds] = [kind(build, diloco.method, workers) for kind in kinds]
    if workers == 1:
        with suppress(ImportError):  # an extra, and not on every platform
            baselines.append(TorchFT(build, diloco.method))
    rows = _rows(baselines, diloco, build, workers, repeats)
    del baselines
    for case in others:
        rows += _rows([], case, build, workers, repeats)
    plain_s = min(min(row["whole_cpu_s"]) for row in rows[:2])
    for row in rows:
        row["over_plain"] = min(row["whole_cpu_s"]) / plain_s
    return rows


def _rows(
    baselines: Sequence[Rounds],
    case: Case,
    build: Callable[[], nn.Module],
    workers: int,
    repeats: int,
) -> list[Row]:
    """The loop's rounds and the baselines', in turns with a copy; the first of each does not count.

    `difference` is the largest difference of outer parameters to those of plain torch after all
    rounds, relative to the largest of these; None if there is nothing to compare with.
    """
    measured = [*baselines, LoopRounds(build, case.method, workers)]
    source = torch.cat([p.reshape(-1).float() for p in measured[-1].parameters()])
    target = torch.zeros_like(source)
    copies: list[Spent] = []
    times: list[tuple[list[Spent], list[Spent]]] = [([], []) for _ in measured]
    for _ in range(repeats + 1):
        copies.append(spent(lambda: target.copy_(source)))
        for rounds, (begin, finish) in zip(measured, times, strict=True):
            rounds.train()
            begin.append(spent(rounds.begin))
            finish.append(spent(rounds.finish))
    copy_cpu_s = [s.cpu_s for s in copies[1:]]
    found: list[Row] = []
    for rounds, (begin, finish) in zip(measured, times, strict=True):
        difference = None
        if baselines:
            pairs = list(zip(rounds.parameters(), baselines[0].parameters(), strict=True))
            apart = max(float((a - b).abs().max()) for a, b in pairs)
            difference = apart / max(float(b.abs().max()) for _, b in pairs)
        row = {
            "name": rounds.name,
            "workers": workers,
            "threads": torch.get_num_threads(),
            "begin_bytes": case.begin_bytes,
            "finish_bytes": case.finish_bytes,
            "difference": difference,
            "copy_cpu_s": copy_cpu_s,
        }
        both = zip(begin, finish, strict=True)
        whole = [Spent(b.cpu_s + f.cpu_s, b.wall_s + f.wall_s) for b, f in both]
        per = 1e9 / source.numel() / workers
        for half, spent_s in (("begin", begin), ("finish", finish), ("whole", whole)):
            cpu_s, wall_s = [s.cpu_s for s in spent_s[1:]], [s.wall_s for s in spent_s[1:]]
            row |= {
                f"{half}_cpu_s": cpu_s,
                f"{half}_wall_s": wall_s,
                f"{half}_cpu_ns": per * min(cpu_s),
                f"{half}_cpu_median_ns": per * statistics.median(cpu_s),
                f"{half}_wall_ns": per * min(wall_s),
            }
        for half in ("begin", "finish"):
            floor_s = min(copy_cpu_s) * workers * row[f"{half}_bytes"] / COPIED_BYTES
            row[f"{half}_over_floor"] = min(row[f"{half}_cpu_s"]) / floor_s
        found.append(row)
    return found


def _texts(row: Row) -> tuple[str, ...]:
    halves = [
        text
        for half in ("begin", "finish")
        for text in (f"{row[f'{half}_cpu_ns']:.2f}", f"{row[f'{half}_over_floor']:.1f}")
    ]
    whole = f"{row['whole_cpu_ns']:.2f}"
    return (row["name"], str(row["workers"]), *halves, whole, f"{row['over_plain']:.2f}")
