"""The memory bandwidth that a kernel reaches with the bytes it must move, next to a copy.

encode    reads e and Delta and writes e, 12 bytes a number, and writes the records
mean      over R workers: reads their records, reads and writes the mean, 8 bytes a number;
          for Top-k only the 32-byte sectors that hold a number sent

The device's own clock times each, in turns with a copy of as many numbers. `gpu_rounds` times whole
rounds next to a few lines of torch.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speed.measuring import Report, Table, seconds
from speed.models import heavy_tailed, llama
from speed.plain_rounds import TorchForeach
from speed.round_costs import with_short_rounds
from speed.workers import LoopRounds, Rounds
from thinwire.codecs import E3M0, Quantise, SignLevels, SignMean, TopK
from thinwire.codecs.kernels import find_kernel, kernel_backend
from thinwire.codecs.levels import RoundKey
from thinwire.codecs.row_format import GroupedCodec
from thinwire.errors import ConfigurationError
from thinwire.fragments.layout import CHUNK

DECAY = 0.95
SECTOR_NBYTES = 32
TORCH_ROWS = 256  # as many as torch's path takes at once
COMPARED: tuple[GroupedCodec, ...] = (
    TopK(k=64, values=SignLevels()),
    TopK(k=64, values=SignMean()),
    *(Quantise(bits=bits) for bits in (1, 2, 4, 8)),
    E3M0(),
)


def gpu_kernels(
    *,
    device: torch.device | None = None,
    chunks: int = 2**15,
    compared: Sequence[GroupedCodec] = COMPARED,
    workers: int = 8,
    repeats: int = 20,
) -> Report:
    """Time every kernel on 134M numbers, which no cache holds.

    Args:
        device: default the current GPU.
        chunks: number of chunks of 4096 numbers.
        compared: codecs to compare.
        workers: R.
        repeats: repetitions of each.

    Raises:
        ConfigurationError: the device has no kernels.
    """
    device = torch.device("cuda") if device is None else device
    backend = kernel_backend(device)
    if backend == "torch":
        raise ConfigurationError(
            f"measure kernels on {device.type}",
            because="no backend has any for it",
            do="install numba for a CPU, or torch with CUDA, which brings triton, for a GPU",
        )
    setting = _Setting(device=device, chunks=chunks, workers=workers, repeats=repeats)
    rows = [row for codec in compared for row in setting.measure(codec)]
    name = _name(device)
    data = {"device": name, "backend": backend, "parameters": chunks * CHUNK, "workers": workers}
    table = Table(
        f"{name}, {backend}, {chunks * CHUNK:,} numbers: bandwidth, its share of a copy's, and "
        f"speed over torch's path; means are of {workers}",
        ("format", "work", "GB/s", "of copy", "over torch"),
        [
            (
                *(row["name"], row["work"], f"{row['bandwidth_bytes_per_s'] / 1e9:.0f}"),
                *(f"{row['share_of_copy']:.2f}", f"{row['speed_over_torch']:.1f}"),
            )
            for row in rows
        ],
    )
    return Report(data | {"rows": rows}, [table])


class _Setting:
    """The vectors and the clock, which all kernels share."""

    def __init__(self, *, device: torch.device, chunks: int, workers: int, repeats: int) -> None:
        self._workers, self._repeats = workers, repeats
        # The same 16 MiB repeated: drawing all numbers would take longer than everything else.
        part = heavy_tailed(min(chunks, 1024) * CHUNK, seed=0).to(device).view(-1, CHUNK)
        self._delta = part.repeat(-(-chunks // len(part)), 1)[:chunks].contiguous()
        self._e, self._mean = torch.zeros_like(self._delta), torch.zeros_like(self._delta)
        self._seconds = _seconds_on_gpu if device.type == "cuda" else seconds

    def measure(self, codec: GroupedCodec) -> list[dict[str, Any]]:
        """Times of encoding, then of the mean of the records; nothing without a kernel."""
        e, delta, out, workers = self._e, self._delta, self._mean, self._workers
        kernel = find_kernel(codec, delta.device)
        if kernel is None:
            return []
        nbytes = (len(delta), codec.record_nbytes(CHUNK))
        records = torch.empty(nbytes, dtype=torch.uint8, device=delta.device)
        parts = [slice(begin, begin + TORCH_ROWS) for begin in range(0, len(delta), TORCH_ROWS)]

        def encode_by_torch() -> None:
            for part in parts:
                wanted = e[part].mul_(DECAY).add_(delta[part])
                records[part] = codec.write(wanted, RoundKey())
                for sent in codec.read([records[part]], CHUNK, RoundKey()):
                    sent.add_to(wanted, weight=-1.0)

        def add_by_torch() -> None:
            for part in parts:
                for numbers in codec.read([records[part]] * workers, CHUNK, RoundKey()):
                    numbers.add_to(out[part], weight=1.0 / workers)

        e.zero_()
        encode = self._times(
            lambda: kernel.encode(e, records, delta, DECAY),
            encode_by_torch,
            moved_nbytes=3 * delta.nbytes + records.nbytes,
        )
        added_nbytes = 2 * delta.nbytes
        if isinstance(codec, TopK):
            added_nbytes = workers * len(delta) * codec.k * 2 * SECTOR_NBYTES
        mean = self._times(
            lambda: kernel.add(out, [records] * workers, 1.0 / workers, None),
            add_by_torch,
            moved_nbytes=workers * records.nbytes + added_nbytes,
        )
        works = (("encode", encode), ("mean", mean))
        return [{"name": codec.record_id, "work": work} | times for work, times in works]

    def _times(
        self, ours: Callable[[], object], by_torch: Callable[[], None], *, moved_nbytes: int
    ) -> dict[str, Any]:
        """Each repetition of the kernel and of a copy, in turns, and torch's own path, once."""
        ours()  # compiles
        pairs = [
            (self._seconds(ours), self._seconds(lambda: self._mean.copy_(self._delta)))
            for _ in range(self._repeats)
        ]
        by_torch()
        kernel_s, copy_s = ([pair[i] for pair in pairs] for i in range(2))
        torch_s, taken_s = self._seconds(by_torch), statistics.median(kernel_s)
        copied_bytes_per_s = 2 * self._delta.nbytes / statistics.median(copy_s)
        return {
            "moved_nbytes": moved_nbytes,
            "kernel_s": kernel_s,
            "copy_s": copy_s,
            "torch_s": torch_s,
            "bandwidth_bytes_per_s": moved_nbytes / taken_s,
            "share_of_copy": moved_nbytes / taken_s / copied_bytes_per_s,
            "speed_over_torch": torch_s / taken_s,
        }


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    """How long the device takes for one call, launches included where it waits for them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def gpu_rounds(
    *,
    device: torch.device | None = None,
    vocabulary: int = 32_000,
    width: int = 768,
    layers: int = 12,
) -> Report:
    """Time the halves of a worker's round, by the host's clock, and count the device's memory.

    Args:
        device: a CUDA device, by default the current one; on any other no memory is counted.
        vocabulary: of the model.
        width: likewise.
        layers: likewise.
    """
    device = torch.device("cuda") if device is None else device
    model = llama(vocabulary=vocabulary, width=width, layers=layers).to(device)
    numel = sum(p.numel() for p in model.parameters())
    names = ("diloco", "muloco:bits=4", "muloco:bits=2", "sparseloco", "sparse_muloco", "demo")
    rows: list[dict[str, Any]] = []
    for name in ("torch._foreach", *names, "noloco"):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        kind = TorchForeach if name == "torch._foreach" else LoopRounds
        method = with_short_rounds("diloco" if kind is TorchForeach else name)
        begin_s, finish_s = _halves(kind(lambda: copy.deepcopy(model), method, 2), device)
        peak = torch.cuda.max_memory_allocated() / 2 / numel if device.type == "cuda" else 0.0
        row = {"name": name, "kernels": kernel_backend(device), "peak_bytes_per_parameter": peak}
        rows.append(row | {"begin_s": begin_s, "finish_s": finish_s})
    table = Table(
        f"{numel:,} parameters on {device}, K=2: a worker's round in ms",
        ("method", "begin", "finish", "peak bytes a parameter"),
        [
            (
                *(row["name"], f"{1e3 * row['begin_s']:.1f}", f"{1e3 * row['finish_s']:.1f}"),
                f"{row['peak_bytes_per_parameter']:.1f}",
            )
            for row in rows
        ],
    )
    return Report({"device": _name(device), "parameters": numel, "rows": rows}, [table])


def _halves(rounds: Rounds, device: torch.device, repeats: int = 6) -> tuple[float, float]:
    """Medians of begin() and finish() a worker; the first two rounds compile and allocate."""
    spent: list[list[float]] = []
    for _ in range(repeats):
        rounds.train()
        spent.append([_waited(half, device) / 2 for half in (rounds.begin, rounds.finish)])
    begin_s, finish_s = (statistics.median(each[half] for each in spent[2:]) for half in (0, 1))
    return begin_s, finish_s


def _waited(work: Callable[[], object], device: torch.device) -> float:
    def end_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began_s = end_s()
    work()
    return end_s() - began_s


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
