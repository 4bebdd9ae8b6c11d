"""Triton's kernels: in its interpreter, as PTX, and on a GPU where there is one.

The interpreter computes what a kernel says, in numpy. What it cannot show is in the PTX: a product
fused with a sum, or a division that is only nearly right.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_parity import CHUNK, CODECS, check
from thinwire.codecs import E3M0, Quantise, TopK
from thinwire.codecs.kernels import find_kernel

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA wheels for Linux")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from thinwire.codecs.kernels import triton_backend  # noqa: E402

GPU = torch.device("cuda")
INTERPRETER = {"THINWIRE_KERNELS": "triton", "TRITON_INTERPRET": "1"}
HERE = Path(__file__).parents[2]


@pytest.mark.slow_cases(but=("e3m0",))
@pytest.mark.parametrize("name", CODECS)
def test_every_format_gives_the_bits_of_the_torch_path_in_the_interpreter(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "kernel_parity.py", "2", name],
        env=os.environ | INTERPRETER | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.parametrize("name", CODECS)
def test_it_gives_the_bits_of_the_torch_path_on_a_gpu(name: str) -> None:
    kernel = find_kernel(CODECS[name], GPU)
    assert kernel is not None
    check(CODECS[name], kernel, "cuda", seeds=3)


def test_there_are_kernels_for_powers_of_two() -> None:
    assert not any(triton_backend.build(TopK(k=k)) for k in (1, 8, 100, 4096))
    assert all(map(triton_backend.build, (TopK(k=16), TopK(k=2048), Quantise(bits=2), E3M0())))


class NoGpu:
    """A driver that compiles for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # for what is compiled is kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """What kernels that are called compile to; none of them runs."""
    kernels: list = []
    run = JITFunction.run

    def compile_only(kernel, *arguments, warmup, **options):
        kernels.append(run(kernel, *arguments, warmup=True, **options))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", None)
    return kernels


def compile_all(name: str, capability: int) -> None:
    """Call all kernels of a format with what they can be called with."""
    driver.set_active(NoGpu(capability))
    kernel, nbytes = triton_backend.build(CODECS[name]), CODECS[name].record_nbytes(CHUNK)
    assert kernel is not None
    x, records = torch.zeros(2, CHUNK), torch.zeros(2, nbytes, dtype=torch.uint8)
    kernel.encode(x, records, x.clone(), 0.5)
    kernel.encode(x, records, None, 0.5)
    kernel.add(x, [records, records], 0.5, x.clone())
    if kernel.largest is not None:
        kernel.largest(records)


def roundings(ptx: str) -> set[str]:
    """Floating-point instructions that do not round each operation to the nearest number."""
    instructions = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.]*\.f(?:32|64))\b", ptx, re.M)
    return {i for i in instructions if re.search(r"^fma|^mad|\.full|\.approx|\.ftz|^rcp|f64$", i)}


def test_what_rounds_otherwise_is_found() -> None:
    ptx = """
    add.rn.f32 \t%r1, %r2, %r3;
    div.rn.f32 \t%r1, %r2, %r3;
    @%p1 fma.rn.f32 \t%r1, %r2, %r3, %r4;
    div.full.f32 \t%r1, %r2, %r3;
    sqrt.approx.ftz.f32 \t%r1, %r2;
    """
    assert roundings(ptx) == {"fma.rn.f32", "div.full.f32", "sqrt.approx.ftz.f32"}


def stack_nbytes(program: Path) -> list[str]:
    """What ptxas had no registers for."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run(
        [tool, "-res-usage", program], capture_output=True, text=True, check=True
    )
    return re.findall(r"STACK:(\d+)", shown.stdout + shown.stderr)


@pytest.mark.slow_cases(but=("e3m0",))
@pytest.mark.parametrize("name", CODECS)
def test_every_format_rounds_every_operation_and_stays_in_registers(
    name: str, compiled: list, tmp_path: Path
) -> None:
    for capability in (80, 90, 100):
        compile_all(name, capability)
    program = tmp_path / "kernel.cubin"
    assert compiled
    for kernel in compiled:
        assert roundings(kernel.asm["ptx"]) == set()
        program.write_bytes(kernel.asm["cubin"])
        assert stack_nbytes(program) == ["0"]


@pytest.mark.filterwarnings("ignore:AnnAssign")  # Triton's own, on Python 3.13
def test_it_reads_levels_only_when_all_of_them_are_written(compiled: list) -> None:
    compile_all("table-4", 90)
    before, after = compiled[0].asm["ptx"].rsplit("bar.sync", 1)
    assert "ld.global.b8" not in before
    assert "ld.global.b8" in after
    assert "st.global.b8" not in after
