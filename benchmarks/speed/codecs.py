"""The cost of a codec, compared with the memory it must touch and a loop over torch.topk.

encode    e = beta e + Delta; payload = encode(e); e = e - decode(payload)
decode    zeros, then the mean of the payloads of R workers

Floors, measured in turns with every repetition: for encoding one pass over three vectors that reads
12 and writes 4 bytes a parameter (anchor, local and e in, e out); for decoding, writing 4 bytes.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speed.measuring import Report, Table, peak_temporary_nbytes, seconds, threads
from speed.models import gpt2, heavy_tailed
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
from thinwire.fragments.layout import CHUNK, Layout
from thinwire.storage import StatePlacement

DECAY = 0.95
COMPARED: tuple[Codec, ...] = (
    TopK(k=64, values=SignMean()),
    TopK(k=64, values=SignLevels()),
    TopK(k=64, values=SignLevels(), groups=Blocks()),
    TopK(k=32, values=SignLevels(), groups=Blocks(), transform=DCT()),
    TopK(k=32, values=SignLevels(), groups=Blocks(), transform=Hadamard()),
    *(Quantise(bits=bits) for bits in (1, 2, 4, 8)),
    E3M0(),
    CastBF16(),
)


def codecs(
    *,
    layout: Layout | None = None,
    compared: Sequence[Codec] = COMPARED,
    workers: int = 8,
    repeats: int = 5,
    budget_s: float = 1.0,
) -> Report:
    """Time every codec on a GPT-2 of 51,475,968 parameters, on one thread and on all.

    Repetitions are rounds of error feedback, so the encoded vector includes what feedback added;
    payloads of successive rounds stand for those of the workers. The naive baseline runs after
    every third codec, so that all see the same machine.

    Args:
        layout: layout of another model.
        compared: codecs to compare.
        workers: R.
        repeats: most repetitions of each.
        budget_s: seconds after which no further repetition begins; there is always one.
    """
    layout = layout or gpt2()
    delta = heavy_tailed(layout.numel, seed=0)
    tables: list[Table] = []
    found: list[dict[str, Any]] = []
    for count in dict.fromkeys((1, os.cpu_count() or 1)):
        with threads(count):
            naive = _Measurement(_naive(layout, chunked=False), delta, workers)
            measured = [naive, _Measurement(_naive(layout, chunked=True), delta, workers)]
            for number, codec in enumerate(compared):
                measured.append(_Measurement(_coded(codec, layout), delta, workers))
                measured[-1].repeat(repeats, budget_s)
                if number % 3 == 0:
                    naive.repeat(1, budget_s)
            measured[1].repeat(repeats, budget_s)
        rows = [each.describe(naive, count) for each in measured]
        found += rows
        title = f"{layout.numel:,} parameters, threads: {count}; bits and ns per parameter to "
        title += f"encode and to average {workers}; over the memory floor; speed over {naive.name}"
        columns = ("codec", "bits", "encode", "/floor", "speed", "mean", "/floor", "speed")
        tables.append(Table(title, columns, [_texts(row) for row in rows]))
    data = {"parameters": layout.numel, "workers": workers, "naive": naive.name, "rows": found}
    return Report(data, tables)


class _Subject(NamedTuple):
    """The code to time: encoding a round's delta, the mean of payloads, and the bytes of one."""

    name: str
    encode: Callable[[Tensor], Any]
    mean: Callable[[Sequence[Any]], object]
    nbytes: Callable[[Any], int]


def _coded(codec: Codec, layout: Layout) -> _Subject:
    coder, mean = codec.bind(layout), torch.zeros(layout.numel)
    feedback = ErrorFeedback(decay=DECAY).bind(layout.numel, StatePlacement(torch.device("cpu")))

    def encode(delta: Tensor) -> Tensor:
        payload = torch.empty(coder.nbytes, dtype=torch.uint8)
        feedback.encode_to(payload, DenseVector(delta), coder)
        return payload

    def average(payloads: Sequence[Tensor]) -> Tensor:
        # Into existing memory, because the cost of fresh pages is the allocator's.
        coder.add_to(mean.zero_(), payloads, weight=1.0 / len(payloads))
        return coder.to_vector(mean)

    return _Subject(codec.id, encode, average, lambda payload: payload.nbytes)


def _naive(layout: Layout, *, chunked: bool) -> _Subject:
    """Top-k with error feedback as it is usually written: a loop over tensors, or their chunks.

    e = beta e + Delta; send the largest 1/64 of e, with int64 places; e = e - sent.
    """
    places: list[tuple[slice, tuple[int, int]]] = []
    for s in layout.segments:
        rows = s.numel // CHUNK if chunked else 0
        whole = s.start + rows * CHUNK
        places += [(slice(s.start, whole), (rows, CHUNK))] if rows else []
        places += [(slice(whole, s.stop), (1, s.stop - whole))] if s.stop > whole else []
    residuals = [torch.zeros(shape) for _, shape in places]

    def encode(delta: Tensor) -> list[tuple[Tensor, Tensor]]:
        records: list[tuple[Tensor, Tensor]] = []
        for (place, shape), e in zip(places, residuals, strict=True):
            e.mul_(DECAY).add_(delta[place].view(shape))
            indices = e.abs().topk(max(1, shape[1] // 64), dim=-1).indices
            records.append((indices, e.gather(-1, indices)))
            e.scatter_(-1, indices, 0.0)
        return records

    def mean(payloads: Sequence[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        means: list[Tensor] = []
        for place, (_, shape) in enumerate(places):
            total = torch.zeros(shape)
            for payload in payloads:
                total += torch.zeros(shape).scatter_add_(-1, *payload[place])
            means.append(total.div_(len(payloads)))
        return means

    name = "chunked torch.topk" if chunked else "per-tensor torch.topk"
    return _Subject(name, encode, mean, lambda p: sum(x.nbytes for record in p for x in record))


class _Measurement:
    """The repetitions of one subject; the first, which are not timed, measure its memory."""

    def __init__(self, subject: _Subject, delta: Tensor, workers: int) -> None:
        self.name, self._subject, self._delta, self._workers = subject.name, subject, delta, workers
        payload, self._encode_nbytes = peak_temporary_nbytes(lambda: subject.encode(delta))
        self._payloads = [payload]
        self._decode_nbytes = peak_temporary_nbytes(self._decode)[1]
        self._a, self._b = torch.ones_like(delta), torch.zeros_like(delta)
        self.encode_s: list[tuple[float, float]] = []
        self.decode_s: list[tuple[float, float]] = []

    def repeat(self, repeats: int, budget_s: float) -> None:
        """Encode, then decode, each next to its floor, as often as the budget allows."""

        def read_and_write() -> None:
            self._a.addcmul_(self._b, self._delta)

        for work, floor, done in (
            (self._encode, read_and_write, self.encode_s),
            (self._decode, self._b.zero_, self.decode_s),
        ):
            until_s = time.perf_counter() + budget_s
            for number in range(repeats):
                if number == 0 or time.perf_counter() < until_s:
                    done.append((seconds(work), seconds(floor)))

    def describe(self, naive: "_Measurement", threads: int) -> dict[str, Any]:
        """All repetitions, with medians per parameter and ratios."""
        numel = self._delta.numel()
        message_nbytes = self._subject.nbytes(self._payloads[0]) + HEADER_NBYTES
        row: dict[str, Any] = {"name": self.name, "threads": threads}
        row |= {"message_nbytes": message_nbytes, "bits_per_parameter": 8 * message_nbytes / numel}
        for work, times, theirs, nbytes in (
            ("encode", self.encode_s, naive.encode_s, self._encode_nbytes),
            ("decode", self.decode_s, naive.decode_s, self._decode_nbytes),
        ):
            median_s, their_s = (statistics.median(s for s, _ in t) for t in (times, theirs))
            row |= {
                f"{work}_s": [s for s, _ in times],
                f"{work}_floor_s": [floor_s for _, floor_s in times],
                f"{work}_ns_per_parameter": 1e9 * median_s / numel,
                f"{work}_over_floor": statistics.median(s / floor_s for s, floor_s in times),
                f"{work}_speed_over_naive": their_s / median_s,
                f"{work}_temporary_nbytes": nbytes,
                f"{work}_temporary_share": nbytes / (4 * numel),
            }
        return row

    def _encode(self) -> None:
        self._payloads.append(self._subject.encode(self._delta))
        del self._payloads[: -self._workers]

    def _decode(self) -> object:
        count = len(self._payloads)
        return self._subject.mean([self._payloads[w % count] for w in range(self._workers)])


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    texts = [row["name"], f"{row['bits_per_parameter']:.3f}"]
    for work in ("encode", "decode"):
        keys = ("ns_per_parameter", "over_floor", "speed_over_naive")
        texts += [f"{row[f'{work}_{key}']:.1f}" for key in keys]
    return tuple(texts)
