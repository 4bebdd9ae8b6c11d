"""Speed on this machine, as ratios against a named baseline in the same run."""

from thinwire.bench.codecs import CodecReport, CodecTimes, codecs
from thinwire.bench.gpu_kernels import GpuKernelReport, KernelTimes, gpu_kernels
from thinwire.bench.muon import MuonReport, MuonTimes, muon
from thinwire.bench.result import BenchReport, BenchResult, BenchTable, compare_alternating
from thinwire.bench.round import round
from thinwire.bench.round_memory import round_memory
from thinwire.bench.round_scaling import round_scaling
from thinwire.bench.simulation import (
    PlainLoopReport,
    plain_loop,
    simulation,
)

__all__ = [
    "BenchReport",
    "BenchResult",
    "BenchTable",
    "CodecReport",
    "CodecTimes",
    "GpuKernelReport",
    "KernelTimes",
    "MuonReport",
    "MuonTimes",
    "PlainLoopReport",
    "codecs",
    "compare_alternating",
    "gpu_kernels",
    "muon",
    "plain_loop",
    "round",
    "round_memory",
    "round_scaling",
    "simulation",
]
