"""What a step of Muon costs beside torch's own: CPU time and memory."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from thinwire.bench.result import BenchReport, BenchTable
from thinwire.bench.temporaries import peak_temporary_nbytes
from thinwire.optim import Muon

_LAYERS = {128: 8, 256: 5, 512: 3, 1024: 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonTimes:
    """The hidden matrices of one width.

    Args:
        width: of the residual stream.
        parameters: in all matrices.
        ours_cpu_s: CPU seconds of each step.
        torch_cpu_s: of each of torch's, in turns.
        ours_nbytes: most bytes of temporaries.
        torch_nbytes: of torch's.
    """

    width: int
    parameters: int
    ours_cpu_s: Sequence[float]
    torch_cpu_s: Sequence[float]
    ours_nbytes: int
    torch_nbytes: int

    @property
    def ratio(self) -> float:
        """The least of ours over the least of torch's: other processes only add time."""
        return min(self.ours_cpu_s) / min(self.torch_cpu_s)


@dataclass(frozen=True, kw_only=True)
class MuonReport(BenchReport):
    """A row for each width."""

    rows: Sequence[MuonTimes]
    name: str = "muon"

    def tables(self) -> Sequence[BenchTable]:
        """Time as a ratio, temporaries in bytes for each parameter."""
        rows = tuple(
            (
                str(row.width),
                f"{1000 * min(row.ours_cpu_s):.1f}",
                f"{row.ratio:.2f}",
                f"{row.ours_nbytes / row.parameters:.2f}",
                f"{row.torch_nbytes / row.parameters:.2f}",
            )
            for row in self.rows
        )
        title = "a step of Muon against torch.optim.Muon, CPU time of one thread, temporaries"
        columns = ("width", "ms", "ratio", "B/param", "torch's")
        return [BenchTable(title=title, columns=columns, rows=rows)]

    def describe(self) -> dict[str, Any]:
        """The fields and the ratios."""
        return {"rows": [asdict(row) | {"ratio": row.ratio} for row in self.rows]} | {
            "name": self.name
        }


def muon(*, widths: Sequence[int] = (128, 256, 512, 1024), repeats: int = 15) -> MuonReport:
    """thinwire's Muon against torch's on the hidden matrices of small Llamas, in turns.

    Each layer has four matrices [w, w], two [3w, w] and one [w, 3w].

    Args:
        widths: of the models.
        repeats: steps of each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [_measure(width, repeats) for width in widths]
    torch.set_num_threads(threads)
    return MuonReport(rows=rows)


def _measure(width: int, repeats: int) -> MuonTimes:
    mine, theirs = _matrices(width), _matrices(width)
    ours = Muon(
        [{"params": mine, "rule": "muon"}],
        lr=0.01,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.1,
        scale="rms",
    )
    other = torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw")
    ours.step()
    other.step()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for measured, optimizer in zip(times, (ours, other), strict=True):
            started_s = time.process_time()
            optimizer.step()
            measured.append(time.process_time() - started_s)
    return MuonTimes(
        width=width,
        parameters=sum(p.numel() for p in mine),
        ours_cpu_s=times[0],
        torch_cpu_s=times[1],
        ours_nbytes=peak_temporary_nbytes(ours.step)[1],
        torch_nbytes=peak_temporary_nbytes(other.step)[1],
    )


def _matrices(width: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    square, up, down = (width, width), (3 * width, width), (width, 3 * width)
    made: list[nn.Parameter] = []
    for shape in [*[square] * 4, up, up, down] * _LAYERS.get(width, 1):
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        made.append(parameter)
    return made
