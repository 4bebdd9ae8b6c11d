"""What a codec costs beside the memory it must touch, and beside a loop over torch.topk.

encode    e = beta e + Delta; payload = encode(e); e = e - decode(payload)
decode    zeros, then the mean of the payloads of R workers

Floors, taken in turns with every repetition: for encoding one pass over three vectors that reads
12 and writes 4 bytes a parameter (anchor, local and e in, e out); for decoding, writing 4 bytes.
"""

import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.bench.naive import ChunkedTopK, NaiveTopK, Record, TensorTopK
from thinwire.bench.result import BenchReport, BenchTable, seconds, threads
from thinwire.bench.shapes import gpt2, heavy_tailed
from thinwire.bench.temporaries import peak_temporary_nbytes
from thinwire.blocks import DenseVector
from thinwire.codecs import (
    DCT,
    E3M0,
    Blocks,
    CastBF16,
    Codec,
    Hadamard,
    Quantise,
    SignLevels,
    SignMean,
    TopK,
)
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.feedback import ErrorFeedback
from thinwire.fragments.layout import Layout
from thinwire.storage import OnDevice

P = TypeVar("P")

_DECAY = 0.95
_COMPARED: tuple[Codec, ...] = (
    TopK(k=64, values=SignMean()),
    TopK(k=64, values=SignLevels()),
    TopK(k=64, values=SignLevels(), groups=Blocks()),
    TopK(k=32, values=SignLevels(), groups=Blocks(), transform=DCT()),
    TopK(k=32, values=SignLevels(), groups=Blocks(), transform=Hadamard()),
    Quantise(bits=1),
    Quantise(bits=2),
    Quantise(bits=4),
    Quantise(bits=8),
    E3M0(),
    CastBF16(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecTimes:
    """What was measured of one codec, or of one baseline.

    Args:
        name: the codec's id.
        threads: of torch.
        message_nbytes: of one worker, header included.
        encode_s: seconds of each repetition.
        encode_floor_s: of the floor, in turns with the above.
        decode_s: seconds of each repetition: the mean over the workers.
        decode_floor_s: of the floor, in turns with the above.
        encode_temporary_nbytes: peak memory beside residual, delta and payload.
        decode_temporary_nbytes: peak memory beside payloads and result.
    """

    name: str
    threads: int
    message_nbytes: int
    encode_s: list[float]
    encode_floor_s: list[float]
    decode_s: list[float]
    decode_floor_s: list[float]
    encode_temporary_nbytes: int
    decode_temporary_nbytes: int

    def describe(self, parameters: int, naive: "CodecTimes") -> dict[str, Any]:
        """The fields, and what follows from them: medians per parameter and ratios."""
        return asdict(self) | {
            "bits_per_parameter": 8 * self.message_nbytes / parameters,
            "encode_ns_per_parameter": 1e9 * statistics.median(self.encode_s) / parameters,
            "encode_over_floor": _paired(self.encode_s, self.encode_floor_s),
            "encode_speed_over_naive": _medians(naive.encode_s, self.encode_s),
            "encode_temporary_share": self.encode_temporary_nbytes / (4 * parameters),
            "decode_ns_per_parameter": 1e9 * statistics.median(self.decode_s) / parameters,
            "decode_over_floor": _paired(self.decode_s, self.decode_floor_s),
            "decode_speed_over_naive": _medians(naive.decode_s, self.decode_s),
            "decode_temporary_share": self.decode_temporary_nbytes / (4 * parameters),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecReport(BenchReport):
    """Codecs and baselines on one thread and on all.

    Args:
        parameters: numbers in the vector.
        workers: R, whose payloads are averaged.
        blocks: for each number of threads, the naive baseline and after it all others.
    """

    parameters: int
    workers: int
    blocks: list[list[CodecTimes]]
    name: str = "codecs"

    def tables(self) -> Sequence[BenchTable]:
        """A table for each number of threads."""
        return [self._table(block) for block in self.blocks]

    def describe(self) -> dict[str, Any]:
        """All rows, the naive baseline of their number of threads first."""
        rows = [row.describe(self.parameters, block[0]) for block in self.blocks for row in block]
        return {
            "name": self.name,
            "parameters": self.parameters,
            "workers": self.workers,
            "naive": self.blocks[0][0].name,
            "rows": rows,
        }

    def _table(self, block: Sequence[CodecTimes]) -> BenchTable:
        threads = f"{block[0].threads} thread" + ("s" if block[0].threads > 1 else "")
        return BenchTable(
            title=f"{self.parameters:,} parameters, {threads}: bits and ns per parameter to encode "
            f"and to average {self.workers}; over the memory floor; speed over {block[0].name}",
            columns=("codec", "bits", "encode", "/floor", "speed", "mean", "/floor", "speed"),
            rows=tuple(_texts(row.describe(self.parameters, block[0])) for row in block),
        )


def codecs(
    *,
    layout: Layout | None = None,
    compared: Sequence[Codec] = _COMPARED,
    workers: int = 8,
    repeats: int = 5,
    budget_s: float = 1.0,
) -> CodecReport:
    """Time every codec on a GPT-2 of 51,475,968 parameters, on one thread and on all.

    Repetitions are rounds of error feedback, so the encoded vector is what feedback makes of it;
    the workers' payloads are those of successive rounds. The naive baseline runs after every third
    codec, so that all have seen the same machine.

    Args:
        layout: of another model.
        compared: codecs.
        workers: R.
        repeats: most repetitions of each.
        budget_s: seconds after which no further repetition begins; one there is always.
    """
    setting = _Conditions(
        layout=layout or gpt2(), workers=workers, repeats=repeats, budget_s=budget_s
    )
    blocks: list[list[CodecTimes]] = []
    for count in dict.fromkeys((1, os.cpu_count() or 1)):
        with threads(count):
            blocks.append(_block(setting, compared))
    return CodecReport(parameters=setting.layout.numel, workers=workers, blocks=blocks)


class _Conditions:
    """Same for all codecs: the vector, the floors, and when to stop."""

    def __init__(self, *, layout: Layout, workers: int, repeats: int, budget_s: float) -> None:
        self.layout, self.workers = layout, workers
        self.repeats, self.budget_s = repeats, budget_s
        self.delta = heavy_tailed(layout.numel, seed=0)
        self._a, self._b = torch.ones_like(self.delta), torch.zeros_like(self.delta)

    def read_and_write(self) -> None:
        """16 bytes a parameter: three vectors in, one of them out."""
        self._a.addcmul_(self._b, self.delta)

    def write(self) -> None:
        """4 bytes a parameter."""
        self._b.zero_()


class _Subject(ABC, Generic[P]):
    """What is timed.

    Args:
        name: of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def encode(self, delta: Tensor) -> P:
        """A round's payload."""

    @abstractmethod
    def mean(self, payloads: Sequence[P]) -> object:
        """The mean of what they stand for."""

    @abstractmethod
    def nbytes(self, payload: P) -> int:
        """Bytes of the numbers in it."""


class _CodecSubject(_Subject[Tensor]):
    def __init__(self, codec: Codec, layout: Layout) -> None:
        super().__init__(codec.id)
        self._coder, self._mean = codec.bind(layout), torch.zeros(layout.numel)
        self._feedback = ErrorFeedback(decay=_DECAY).bind(
            layout.numel, OnDevice(torch.device("cpu"))
        )

    def encode(self, delta: Tensor) -> Tensor:
        payload = torch.empty(self._coder.nbytes, dtype=torch.uint8)
        self._feedback.encode_to(payload, DenseVector(delta), self._coder)
        return payload

    def mean(self, payloads: Sequence[Tensor]) -> Tensor:
        # Into memory that is there: what fresh pages cost is the allocator's cost.
        self._mean.zero_()
        self._coder.add_to(self._mean, payloads, weight=1.0 / len(payloads))
        return self._coder.to_vector(self._mean)

    def nbytes(self, payload: Tensor) -> int:
        return payload.nbytes


class _NaiveSubject(_Subject[list[Record]]):
    def __init__(self, naive: NaiveTopK) -> None:
        super().__init__(naive.name)
        self._naive = naive

    def encode(self, delta: Tensor) -> list[Record]:
        return self._naive.encode(delta)

    def mean(self, payloads: Sequence[list[Record]]) -> list[Tensor]:
        return self._naive.mean(payloads)

    def nbytes(self, payload: list[Record]) -> int:
        return self._naive.nbytes(payload)


class _Measurement(Generic[P]):
    """The repetitions of one subject; the first ones, which are not timed, count its memory."""

    def __init__(self, subject: _Subject[P], setting: _Conditions) -> None:
        self._subject, self._setting = subject, setting
        payload, self._encode_nbytes = peak_temporary_nbytes(lambda: subject.encode(setting.delta))
        self._payloads = [payload]
        _, self._decode_nbytes = peak_temporary_nbytes(
            lambda: subject.mean(self._payloads_of_all())
        )
        self._encode_s: list[tuple[float, float]] = []
        self._decode_s: list[tuple[float, float]] = []

    def once(self) -> None:
        self._encode_once()
        self._decode_once()

    def repeat(self) -> None:
        """Encode, then decode: the workers' payloads are those of all rounds."""
        for step, done in (
            (self._encode_once, self._encode_s),
            (self._decode_once, self._decode_s),
        ):
            while not done or (
                len(done) < self._setting.repeats
                and sum(s for s, _ in done) < self._setting.budget_s
            ):
                step()

    def times(self) -> CodecTimes:
        return CodecTimes(
            name=self._subject.name,
            threads=torch.get_num_threads(),
            message_nbytes=self._subject.nbytes(self._payloads[0]) + HEADER_NBYTES,
            encode_s=[s for s, _ in self._encode_s],
            encode_floor_s=[s for _, s in self._encode_s],
            decode_s=[s for s, _ in self._decode_s],
            decode_floor_s=[s for _, s in self._decode_s],
            encode_temporary_nbytes=self._encode_nbytes,
            decode_temporary_nbytes=self._decode_nbytes,
        )

    def _encode_once(self) -> None:
        taken_s = seconds(self._encode)
        self._encode_s.append((taken_s, seconds(self._setting.read_and_write)))

    def _encode(self) -> None:
        self._payloads.append(self._subject.encode(self._setting.delta))
        del self._payloads[: -self._setting.workers]

    def _decode_once(self) -> None:
        payloads = self._payloads_of_all()
        taken_s = seconds(lambda: self._subject.mean(payloads))
        self._decode_s.append((taken_s, seconds(self._setting.write)))

    def _payloads_of_all(self) -> list[P]:
        count = len(self._payloads)
        return [self._payloads[worker % count] for worker in range(self._setting.workers)]


def _block(setting: _Conditions, compared: Sequence[Codec]) -> list[CodecTimes]:
    naive = _Measurement(_naive_subject(TensorTopK, setting), setting)
    rows: list[CodecTimes] = []
    for number, codec in enumerate(compared):
        ours = _Measurement(_CodecSubject(codec, setting.layout), setting)
        ours.repeat()
        if number % 3 == 0:
            naive.once()
        rows.append(ours.times())
    chunked = _Measurement(_naive_subject(ChunkedTopK, setting), setting)
    chunked.repeat()
    return [naive.times(), chunked.times(), *rows]


def _naive_subject(kind: type[NaiveTopK], setting: _Conditions) -> _NaiveSubject:
    return _NaiveSubject(kind(setting.layout, decay=_DECAY))


def _paired(these_s: Sequence[float], those_s: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(these_s, those_s, strict=True))


def _medians(these_s: Sequence[float], those_s: Sequence[float]) -> float:
    return statistics.median(these_s) / statistics.median(those_s)


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    texts = [row["name"], f"{row['bits_per_parameter']:.3f}"]
    for work in ("encode", "decode"):
        texts += [
            f"{row[f'{work}_ns_per_parameter']:.1f}",
            f"{row[f'{work}_over_floor']:.1f}",
            f"{row[f'{work}_speed_over_naive']:.1f}",
        ]
    return tuple(texts)
