"""How much codecs of a few bits lose of the vectors that error feedback hands to them.

    python benchmarks/feedback_error.py         about four minutes on two cores

Four methods train the laptop recipe (0.25M parameters, K=4, H=10, 400 steps). In an early, a middle
and a late round, every worker's vector is recorded just before it is encoded, and later encoded by
other codecs too. An error is ||e - decode(encode(e))||^2 / ||e||^2, of the whole vector and of the
parameters of each role, averaged over the workers.
"""

import dataclasses
import importlib.metadata
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from setting import setting
from thinwire import codecs
from thinwire.codecs import BoundCodec, Codec, Levels, Linear, MidRise, Quantise, Statistical, TopK
from thinwire.feedback import ErrorFeedback
from thinwire.fragments.layout import Layout
from thinwire.method import Method
from thinwire.train import launch
from thinwire.train.config import TrainConfig
from thinwire.train.models import Model
from thinwire.train.recipes import laptop

STEPS, ROUNDS, SIZE = 400, (2, 20, 38), "250k"
DENSE, SPARSE = ("muloco:bits=2", "diloco, 2 bits"), ("sparse_muloco", "sparseloco")


@dataclass(frozen=True)
class Recorded:
    """A worker's vector in one round, feedback included, and where parameters lie in it."""

    vector: Tensor
    layout: Layout
    round_number: int


@final
@dataclass(frozen=True, kw_only=True)
class Recording(Codec):
    """`codec`, and a copy of its input in some rounds."""

    codec: Codec
    into: list[Recorded] = field(metadata={"describe": False})

    @property
    def id(self) -> str:
        return self.codec.id

    def bind(self, layout: Layout) -> BoundCodec:
        return RecordingCoder(self.codec.bind(layout), self.into)


@final
class RecordingCoder(BoundCodec):
    def __init__(self, coder: BoundCodec, into: list[Recorded]) -> None:
        super().__init__(coder.id, coder.layout, coder.nbytes)
        self._coder, self._into = coder, into

    def encode(self, x: Tensor, round: int = 0) -> Tensor:
        return self._coder.encode(x, round)

    def encode_residual(self, x: Tensor, round: int = 0) -> Tensor:
        if round in ROUNDS:
            self._into.append(Recorded(x.clone(), self.layout, round))
        return self._coder.encode_residual(x, round)

    def add_to(self, out: Tensor, payloads: Sequence[Tensor], **options: Any) -> None:
        self._coder.add_to(out, payloads, **options)


@final
@dataclass(frozen=True, kw_only=True)
class Even(Levels):
    """A grid that keeps its own levels instead of bin means."""

    grid: Levels

    @property
    def means(self) -> bool:
        return False

    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        return self.grid.place(x, bits)


def dense() -> dict[str, Codec]:
    chunk, row, tensor = codecs.Chunks(), codecs.Rows(), codecs.Tensors()
    table: dict[str, Codec] = {
        "2 bit, mid-rise, chunk": Quantise(bits=2, grid=MidRise(), groups=chunk),
        "2 bit, mid-rise without bin means, chunk": Quantise(bits=2, grid=Even(grid=MidRise())),
    }
    for name, grid in {"statistical": Statistical(), "linear": Linear()}.items():
        for group in (chunk, row, tensor):
            table[f"2 bit, {name}, {group.id}"] = Quantise(bits=2, grid=grid, groups=group)
    table |= {f"{bits} bit, mid-rise, chunk": Quantise(bits=bits) for bits in (1, 4, 8)}
    table |= {f"4 bit, linear, {g.id}": Quantise(bits=4, grid=Linear(), groups=g) for g in (row,)}
    return table | {"e3m0, chunk": codecs.E3M0(), "bf16": codecs.CastBF16()}


def methods() -> dict[str, Method]:
    two_bits = {"codec": Quantise(bits=2), "feedback": ErrorFeedback(decay=0.9)}
    named = {name: laptop(name).method for name in ("muloco:bits=2", "diloco")}
    named |= {name: laptop(f"{name}:density=1/64").method for name in SPARSE}
    named["diloco, 2 bits"] = dataclasses.replace(named.pop("diloco"), **two_bits)
    return named


def record(method: Method) -> list[Recorded]:
    into: list[Recorded] = []
    method = dataclasses.replace(method, codec=Recording(codec=method.codec, into=into))
    config = TrainConfig(method=method, model=Model(size=SIZE), steps=STEPS)
    config = launch.resolve(config)
    group = launch.assemble(config, config.data.load())
    for _ in range(STEPS):
        group.inner_step()
        group.outer_step()
    group.close()
    return into


def decoded(codec: Codec, recorded: Recorded) -> Tensor:
    coder = codec.bind(recorded.layout)
    return coder.decode(coder.encode(recorded.vector))


def energies(x: Tensor, layout: Layout) -> dict[str, float]:
    """Squared norm of the whole vector and of each role's parameters."""
    squares = x.double().square()
    sums = {"all": float(squares.sum())}
    for s in layout.segments:
        sums[s.role] = sums.get(s.role, 0.0) + float(squares[s.start : s.stop].sum())
    return sums


def over(these: dict[str, float], those: dict[str, float]) -> dict[str, float]:
    return {role: these[role] / those[role] for role in these}


def dense_errors(recorded: Recorded) -> dict[str, dict[str, float]]:
    """The loss of each dense codec, and where the energy lies."""
    x, layout = recorded.vector, recorded.layout
    total = energies(x, layout)
    errors = {
        name: over(energies(x - decoded(codec, recorded), layout), total)
        for name, codec in dense().items()
    }
    return errors | {"share of the energy": {r: e / total["all"] for r, e in total.items()}}


def kept_errors(recorded: Recorded) -> dict[str, dict[str, float]]:
    """The share of the kept values' energy that each format of values loses."""
    layout = recorded.layout
    kept = decoded(TopK(k=64, values=codecs.F32()), recorded)
    total = energies(kept, layout)
    errors = {
        values.id: over(energies(kept - decoded(TopK(values=values), recorded), layout), total)
        for values in (codecs.SignMean(), codecs.SignLevels(), codecs.BF16())
    }
    return errors | {
        "2 bit statistical per tensor, as published": over(
            energies(kept - published(kept, layout), layout), total
        ),
        "share of the energy that is kept": over(total, energies(recorded.vector, layout)),
    }


def published(kept: Tensor, layout: Layout) -> Tensor:
    """`kept` with the values of every tensor on its own statistical grid."""
    codec, out = Quantise(bits=2, grid=Statistical(), groups=codecs.Tensors()), kept.clone()
    for s in layout.segments:
        part = out[s.start : s.stop]
        values = part[part != 0]
        part[part != 0] = codec.decode(codec.encode(values), len(values))
    return out


def measure(name: str, method: Method) -> dict[str, dict[str, dict[str, float]]]:
    vectors = record(method)
    errors = dense_errors if name in DENSE else kept_errors
    return {
        f"round {number}": mean([errors(v) for v in vectors if v.round_number == number])
        for number in ROUNDS
    }


def mean(tables: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean of every number over the workers."""
    return {
        name: {role: statistics.fmean(t[name][role] for t in tables) for role in row}
        for name, row in tables[0].items()
    }


def main() -> None:
    found: dict[str, Any] = {}
    for name, method in methods().items():
        found[name] = measure(name, method)
        for number, rows in found[name].items():
            print(f"{name}, {number}", flush=True)
            for what, row in rows.items():
                numbers = "  ".join(f"{role} {value:.4f}" for role, value in row.items())
                print(f"    {what:45}  {numbers}", flush=True)
    write(found)


def write(found: dict[str, Any]) -> None:
    result = {
        "what": "relative squared error of one encoding of error-feedback vectors (of sparse "
        f"methods: of their kept values, k=64); laptop recipe with model {SIZE}, K=4, H=10, "
        f"{STEPS} steps, all workers in rounds {ROUNDS[0]} and {ROUNDS[1]}",
        "command": "python benchmarks/feedback_error.py",
        **setting(),
        "thinwire": importlib.metadata.version("thinwire"),
        "errors": found,
    }
    path = Path(__file__).parent / "results" / "feedback-error.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
