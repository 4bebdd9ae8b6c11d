"""What a kernel makes of the memory's bandwidth: the bytes it must move, beside a copy.

encode    reads e and Delta and writes e, 12 bytes a number, and writes the records
mean      of R workers: reads their records, reads and writes the mean, 8 bytes a number;
          of Top-k only the sectors of 32 bytes that hold a number sent

Each is timed by the device's own clock, in turns with a copy of as many numbers.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.result import BenchReport, BenchTable, seconds
from thinwire.bench.shapes import heavy_tailed
from thinwire.codecs import E3M0, Quantise, SignLevels, SignMean, TopK
from thinwire.codecs.kernels import RowKernel, find_kernel, kernel_backend
from thinwire.codecs.levels import RoundKey
from thinwire.codecs.row_format import GroupedCodec
from thinwire.errors import ConfigurationError
from thinwire.fragments.layout import CHUNK

_DECAY = 0.95
_SECTOR_NBYTES = 32
_TORCH_ROWS = 256  # as many as torch's path takes at once
_COMPARED: tuple[GroupedCodec, ...] = (
    TopK(k=64, values=SignLevels()),
    TopK(k=64, values=SignMean()),
    *(Quantise(bits=bits) for bits in (1, 2, 4, 8)),
    E3M0(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """What was measured of one kernel.

    Args:
        name: the format's id.
        work: encode or mean.
        moved_nbytes: what the work must read and write.
        kernel_s: seconds of each repetition.
        copy_s: of a copy, in turns with the above.
        torch_s: of torch's own path, once.
    """

    name: str
    work: str
    moved_nbytes: int
    kernel_s: list[float]
    copy_s: list[float]
    torch_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKernelReport(BenchReport):
    """Kernels of one device.

    Args:
        device: its name.
        backend: what compiled the kernels, with its version.
        parameters: numbers in the vector.
        workers: R, whose records are averaged.
        rows: one for each format and work.
    """

    device: str
    backend: str
    parameters: int
    workers: int
    rows: list[KernelTimes]
    name: str = "gpu-kernels"

    def tables(self) -> Sequence[BenchTable]:
        """One table."""
        return [
            BenchTable(
                title=f"{self.device}, {self.backend}, {self.parameters:,} numbers: bandwidth, its "
                f"share of a copy's, and speed over torch's path; means are of {self.workers}",
                columns=("format", "work", "GB/s", "of copy", "over torch"),
                rows=tuple(
                    (
                        row["name"],
                        row["work"],
                        f"{row['bandwidth_bytes_per_s'] / 1e9:.0f}",
                        f"{row['share_of_copy']:.2f}",
                        f"{row['speed_over_torch']:.1f}",
                    )
                    for row in self.describe()["rows"]
                ),
            )
        ]

    def describe(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        return asdict(self) | {"rows": [self._derive(row) for row in self.rows]}

    def _derive(self, row: KernelTimes) -> dict[str, Any]:
        taken_s = statistics.median(row.kernel_s)
        copied = 8 * self.parameters / statistics.median(row.copy_s)
        return asdict(row) | {
            "bandwidth_bytes_per_s": row.moved_nbytes / taken_s,
            "share_of_copy": row.moved_nbytes / taken_s / copied,
            "speed_over_torch": row.torch_s / taken_s,
        }


def gpu_kernels(
    *,
    device: torch.device | None = None,
    chunks: int = 2**15,
    compared: Sequence[GroupedCodec] = _COMPARED,
    workers: int = 8,
    repeats: int = 20,
) -> GpuKernelReport:
    """Time every kernel on 134M numbers, which no cache holds.

    Args:
        device: the current GPU, unless it is given.
        chunks: of 4096 numbers.
        compared: codecs.
        workers: R.
        repeats: of each.

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
    rows = [times for codec in compared for times in setting.measure(codec)]
    return GpuKernelReport(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        backend=backend,
        parameters=chunks * CHUNK,
        workers=workers,
        rows=rows,
    )


class _Setting:
    """Same for all kernels: the vectors, and the clock."""

    def __init__(self, *, device: torch.device, chunks: int, workers: int, repeats: int) -> None:
        self._workers, self._repeats = workers, repeats
        # The same 16 MiB again and again: drawing all of them would take longer than all the rest.
        part = heavy_tailed(min(chunks, 1024) * CHUNK, seed=0).to(device).view(-1, CHUNK)
        self._delta = part.repeat(-(-chunks // len(part)), 1)[:chunks].contiguous()
        self._e, self._mean = torch.zeros_like(self._delta), torch.zeros_like(self._delta)
        self._seconds = _seconds_on_gpu if device.type == "cuda" else seconds

    def measure(self, codec: GroupedCodec) -> list[KernelTimes]:
        """Encode, then the mean of what was encoded."""
        kernel = find_kernel(codec.kernel_spec(), self._delta.device)
        if kernel is None:
            return []
        chunks, nbytes = len(self._delta), codec.record_nbytes(CHUNK)
        records = torch.empty(chunks, nbytes, dtype=torch.uint8, device=self._delta.device)
        self._e.zero_()
        encode = self._times(
            codec,
            "encode",
            3 * self._delta.nbytes + records.nbytes,
            lambda: kernel.encode(self._e, records, self._delta, _DECAY, 0),
            lambda: self._encode_by_torch(codec, records),
        )
        if isinstance(codec, TopK):
            added_nbytes = self._workers * chunks * codec.k * 2 * _SECTOR_NBYTES
        else:
            added_nbytes = 2 * self._delta.nbytes
        mean = self._times(
            codec,
            "mean",
            self._workers * records.nbytes + added_nbytes,
            lambda: self._add(kernel, records),
            lambda: self._add_by_torch(codec, records),
        )
        return [encode, mean]

    def _times(
        self,
        codec: GroupedCodec,
        work: str,
        moved_nbytes: int,
        ours: Callable[[], None],
        by_torch: Callable[[], None],
    ) -> KernelTimes:
        ours()  # compiles
        pairs = [(self._seconds(ours), self._seconds(self._copy)) for _ in range(self._repeats)]
        by_torch()
        return KernelTimes(
            name=codec.record_id,
            work=work,
            moved_nbytes=moved_nbytes,
            kernel_s=[taken_s for taken_s, _ in pairs],
            copy_s=[taken_s for _, taken_s in pairs],
            torch_s=self._seconds(by_torch),
        )

    def _copy(self) -> None:
        self._mean.copy_(self._delta)

    def _add(self, kernel: RowKernel, records: Tensor) -> None:
        kernel.add(self._mean, None, [records] * self._workers, 1.0 / self._workers)

    def _encode_by_torch(self, codec: GroupedCodec, records: Tensor) -> None:
        for begin in range(0, len(records), _TORCH_ROWS):
            part = slice(begin, begin + _TORCH_ROWS)
            e = self._e[part].mul_(_DECAY).add_(self._delta[part])
            records[part], sent = codec.write(e, RoundKey())
            sent.add_to(e, weight=-1.0)

    def _add_by_torch(self, codec: GroupedCodec, records: Tensor) -> None:
        for begin in range(0, len(records), _TORCH_ROWS):
            part = slice(begin, begin + _TORCH_ROWS)
            of_workers = [records[part]] * self._workers
            for numbers in codec.read(of_workers, CHUNK, RoundKey()):
                numbers.add_to(self._mean[part], weight=1.0 / self._workers)


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    """How long the device takes for one call, launches included where it waits for them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
