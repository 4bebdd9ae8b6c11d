"""The bandwidth table of Streaming DiLoCo, by this planner's simulation, beside the printed one.

python benchmarks/streaming_table.py OUT.json       seconds on one core

Published: arXiv 2501.18512, Table 4: Gbit/s that a compute utilisation of 50 to 99 % needs, for
models of 1, 10 and 100 billion parameters.

Our reading: each layer travels by itself, sent when its backward is done and needed when its
forward begins; a third of a step is forward. Strided fragments of 3, H = 100, tau = 1 with overlap,
a payload that crosses the link once in 16 bits (or 4) and no latency. All printed values lie on a
grid of 50 points from 0.1 to 1000; the printed one is just below the first that reaches the target.
Utilisation is that of the long run: the paper does not say over how many steps it counts, and fewer
cells agree if counted from the first step, 100 steps before the first exchange.
"""

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setting import setting
from thinwire.fragments import Fragments, Strided, Whole
from thinwire.fragments.layers import Part
from thinwire.plan.simulate import least_rate, steady_round_s

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS = {  # parameters, layers, seconds of a step
    "1B": (10**9, 24, 0.1),
    "10B": (10**10, 48, 0.8),
    "100B": (10**11, 108, 4.9),
}
PUBLISHED = {
    "1B": {
        "Data-Parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
        "Streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "Streaming + overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "Streaming + overlap + FP4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        "Data-Parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
        "Streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "Streaming + overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
        "Streaming + overlap + FP4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        "Data-Parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
        "Streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "Streaming + overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "Streaming + overlap + FP4": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
FORWARD = 1 / 3
GRID = tuple(0.1 * 10 ** (4 * point / 49) for point in range(50))
AT_LEAST = 74


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A layer of a fragment; places are shares of an inner step, forward first.

    Args:
        offset: the layer is due when (t - offset) mod H = 0.
        first: the first inner step after which the layer may be due.
        nbytes: size of the layer.
        ready_at: place in the step at which the layer is sent.
        needed_at: place in step t + 1 + tau at which the answer must have arrived.
    """

    offset: int
    first: int
    nbytes: float
    ready_at: float
    needed_at: float


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The schedule of messages, layer by layer.

    Args:
        pieces: layers, in the order in which they are ready.
        sync_every: H.
        tau: inner steps that an answer may take.
    """

    pieces: Sequence[Piece]
    sync_every: int
    tau: int

    @classmethod
    def of(
        cls,
        fragments: Fragments,
        *,
        parameters: int,
        layers: int,
        bits: float,
        sync_every: int,
        tau: int,
    ) -> "Streams":
        each, more = divmod(parameters, layers)
        parts = [
            Part(name=str(i), aliases=(str(i),), numel=each + (i < more), layer=i)
            for i in range(layers)
        ]
        pieces: list[Piece] = []
        for fragment in fragments.plan(parts, sync_every=sync_every):
            held = [int(name) for name in fragment.names]
            nbytes = bits * sum(parts[layer].numel for layer in held) / 8
            pieces += [
                Piece(
                    offset=fragment.offset_steps,
                    first=fragment.first_step,
                    nbytes=1 / len(held) * nbytes,
                    ready_at=FORWARD + (1 - FORWARD) * (layers - layer) / layers,
                    needed_at=FORWARD * layer / layers,
                )
                for layer in held
            ]
        pieces.sort(key=lambda piece: piece.ready_at)
        return cls(pieces=pieces, sync_every=sync_every, tau=tau)

    def round_ends(self, rounds: int, *, step_s: float, rate: float) -> list[float]:
        """Seconds after every H-th inner step of that many rounds, at `rate` bit/s."""
        now_s = free_s = 0.0
        idle, ends = 0, list[float]()
        due_at: dict[int, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            due_at[piece.offset % self.sync_every].append(piece)
        needed: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for step in range(1, rounds * self.sync_every + 1):
            place = step % self.sync_every
            due = [piece for piece in due_at.get(place, ()) if step >= piece.first]
            answers = needed.pop(step, ())
            if place and not due and not answers:
                idle += 1
                continue
            now_s, idle, at = now_s + idle * step_s, 0, 0.0
            for needed_at, done_s in sorted(answers, key=lambda answer: answer[0]):
                now_s = max(now_s + (needed_at - at) * step_s, done_s)
                at = needed_at
            for piece in due:
                now_s += (piece.ready_at - at) * step_s
                at = piece.ready_at
                free_s = max(now_s, free_s) + 8 * piece.nbytes / rate
                needed[step + 1 + self.tau].append((piece.needed_at, free_s))
            now_s += (1.0 - at) * step_s
            if not place:
                ends.append(now_s)
        return ends

    def utilisation(self, *, step_s: float, rate: float) -> float:
        """Long-run share of the time that goes into inner steps."""
        computed_s = self.sync_every * step_s
        held_s = sum(8 * piece.nbytes / rate for piece in self.pieces)
        round_s = steady_round_s(
            lambda rounds: self.round_ends(rounds, step_s=step_s, rate=rate),
            least_s=max(computed_s, held_s),
        )
        return min(1.0, computed_s / round_s)


def streams(method: str, parameters: int, layers: int) -> Streams:
    return Streams.of(
        Strided(layers=3) if "Streaming" in method else Whole(),
        parameters=parameters,
        layers=layers,
        bits=4 if "FP4" in method else 16,
        sync_every=1 if method == "Data-Parallel" else 100,
        tau=1 if "overlap" in method else 0,
    )


def grid_reading(required: float) -> float:
    """`required` as the paper prints it: the grid point below the first that reaches it."""
    for below, point in zip((GRID[0], *GRID), GRID, strict=False):
        if point >= required:
            return below
    return math.inf


def cell(model: str, method: str, target: float, published: float) -> dict[str, Any]:
    parameters, layers, step_s = MODELS[model]
    sent = streams(method, parameters, layers)
    rate = least_rate(lambda rate: sent.utilisation(step_s=step_s, rate=rate) >= target)
    required = rate / 1e9
    printed = grid_reading(required)
    return {
        "model": model,
        "method": method,
        "utilisation": target,
        "required_gbit_per_s": required,
        "read_gbit_per_s": printed,
        "published_gbit_per_s": published,
        "grid_steps": abs(place(printed) - place(published)),
    }


def place(gbit_per_s: float) -> int:
    """Index on the grid; published figures are rounded to one decimal."""
    return min(range(len(GRID)), key=lambda point: abs(math.log(GRID[point] / gbit_per_s)))


def show(cells: list[dict[str, Any]]) -> None:
    header = "".join(f"{target:>16.0%}" for target in TARGETS)
    print(f"{'Gbit/s, ours | published':32}{header}")
    rows = [cells[begin : begin + len(TARGETS)] for begin in range(0, len(cells), len(TARGETS))]
    for row in rows:
        pairs = (f"{c['read_gbit_per_s']:7.1f} |{c['published_gbit_per_s']:7.1f}" for c in row)
        print(f"{row[0]['model']:5}{row[0]['method']:27}" + "".join(pairs))


def main() -> None:
    started_s = time.perf_counter()
    cells = [
        cell(model, method, target, published)
        for model, methods in PUBLISHED.items()
        for method, row in methods.items()
        for target, published in zip(TARGETS, row, strict=True)
    ]
    show(cells)
    equal = sum(c["grid_steps"] == 0 for c in cells)
    near = sum(c["grid_steps"] <= 1 for c in cells)
    seconds = time.perf_counter() - started_s
    print(f"{near} of {len(cells)} within one grid step, {equal} equal; {seconds:.1f} s")
    result = {
        "what": "Gbit/s for a compute utilisation, simulated, beside Table 4 of arXiv 2501.18512",
        "command": "python benchmarks/streaming_table.py OUT.json",
        **setting(),
        "cells_within_one_grid_step": near,
        "cells_equal": equal,
        "cells": cells,
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(near < AT_LEAST)


if __name__ == "__main__":
    main()
