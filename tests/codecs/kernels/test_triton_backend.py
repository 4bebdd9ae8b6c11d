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
from thinwire.codecs import MidRise
from thinwire.codecs.kernels import E3M0Spec, TableSpec, TopKSpec, find_kernel

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA wheels for Linux")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from thinwire.codecs.kernels import (  # noqa: E402
    triton_backend,
    triton_dense,
    triton_e3m0,
    triton_quantise,
    triton_topk,
)
from thinwire.codecs.levels import Levels  # noqa: E402

GPU = torch.device("cuda")
INTERPRETER = {"THINWIRE_KERNELS": "triton", "TRITON_INTERPRET": "1"}
HERE = Path(__file__).parents[2]
INTERPRETED = {
    "topk": ("topk-64/sign-levels",),
    "table": ("table-1 Statistical", "table-2 MidRise", "table-4 Linear"),
    "others": ("affine-8 MidRise", "affine-8 Linear", "e3m0"),
}


def interpret(seeds: int, *names: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "kernel_parity.py", str(seeds), *names],
        env=os.environ | INTERPRETER | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == list(names)


@pytest.mark.parametrize("group", INTERPRETED)
def test_it_gives_the_bits_of_the_torch_path_in_the_interpreter(group: str) -> None:
    interpret(1, *INTERPRETED[group])


@pytest.mark.parametrize("name", CODECS)
def test_every_format_gives_the_bits_of_the_torch_path_in_the_interpreter(name: str) -> None:
    interpret(2, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.parametrize("name", CODECS)
def test_it_gives_the_bits_of_the_torch_path_on_a_gpu(name: str) -> None:
    kernel = find_kernel(CODECS[name].row_format(), CHUNK, GPU)
    assert kernel is not None
    check(CODECS[name], kernel, "cuda", seeds=3)


@pytest.mark.parametrize(
    ("k", "found"), [(1, False), (8, False), (16, True), (100, False), (2048, True), (4096, False)]
)
def test_there_is_a_kernel_for_powers_of_two(k: int, found: bool) -> None:
    assert (
        triton_backend.build(TopKSpec(k=k, two_levels=True, nbytes=1), GPU) is not None
    ) == found


def test_a_grid_of_another_package_has_no_kernel() -> None:
    class Odd(Levels):
        means = False

        def place(self, x, bits):
            return x[:, :1], x[:, :1]

    assert triton_backend.build(TableSpec(bits=2, grid=Odd(), nbytes=1032), GPU) is None
    assert triton_backend.build(TableSpec(bits=2, grid=MidRise(), nbytes=1032), GPU) is not None
    assert triton_backend.build(E3M0Spec(nbytes=2050), GPU) is not None


FLOATS, BYTES, INTS, ADDRESSES = "*fp32", "*u8", "*i32", "*i64"
ENCODED = {"x": FLOATS, "delta": FLOATS, "decay": "fp32", "out": BYTES}
ADDED = {"out": FLOATS, "senders": FLOATS, "records": ADDRESSES, "workers": "i32", "weight": "fp32"}
CHOSEN = {"x": FLOATS, "delta": FLOATS, "decay": "fp32", "places": INTS, "kept": FLOATS}
WRITTEN = {"x": FLOATS, "out": BYTES, "places": INTS, "kept": FLOATS}
SCATTERED = {"out": FLOATS, "senders": FLOATS, "records": BYTES, "wrong": INTS, "weight": "fp32"}

GRIDS = (triton_quantise._mid_rise, triton_quantise._statistical, triton_quantise._linear)
KERNELS = {
    "e3m0": (triton_e3m0._encode, ENCODED, {}, 4),
    "e3m0 added": (
        triton_dense._add,
        ADDED,
        {"head": 2, "bits": 4, "value_of": triton_e3m0._value_of},
        4,
    ),
    **{
        f"table {grid.__name__}": (
            triton_quantise._encode_table,
            ENCODED,
            {"bits": 2, "place": grid, "means": grid is not triton_quantise._linear},
            4,
        )
        for grid in GRIDS
    },
    "table added": (
        triton_dense._add,
        ADDED,
        {"head": 32, "bits": 4, "value_of": triton_quantise._level_of},
        4,
    ),
    **{
        f"affine {grid.__name__}": (triton_quantise._encode_affine, ENCODED, {"place": grid}, 4)
        for grid in GRIDS
    },
    "affine added": (
        triton_dense._add,
        ADDED,
        {"head": 8, "bits": 8, "value_of": triton_quantise._point_of},
        4,
    ),
    "topk chosen": (triton_topk._choose, CHOSEN, {"k": 64}, 4),
    "topk written": (triton_topk._write, WRITTEN, {"k": 64, "two_levels": True}, 1),
    "topk added": (triton_topk._add, SCATTERED, {"k": 64, "two_levels": True}, 1),
    "topk of 2048 written": (triton_topk._write, WRITTEN, {"k": 2048, "two_levels": True}, 8),
    "topk of 2048 added": (triton_topk._add, SCATTERED, {"k": 2048, "two_levels": True}, 8),
}


def compiled(name: str, capability: int, *, fused: bool = False) -> dict[str, str]:
    """The PTX and the program of a kernel; no GPU is needed for either."""
    kernel, signature, constants, warps = KERNELS[name]
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
    )
    options = {"num_warps": warps, "enable_fp_fusion": fused}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


def roundings(ptx: str) -> set[str]:
    """Floating-point instructions that do not round each operation to the nearest number."""
    return {
        instruction
        for instruction in re.findall(r"^\s+(?:@\S+ )?([a-z][\w.]*\.f(?:32|64))\b", ptx, re.M)
        if re.search(r"^fma|^mad|\.full|\.approx|\.ftz|^rcp|\.f64$", instruction)
    }


def stack_nbytes(program: Path) -> list[str]:
    """What ptxas had no registers for."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run(
        [tool, "-res-usage", program], capture_output=True, text=True, check=True
    )
    return re.findall(r"STACK:(\d+)", shown.stdout + shown.stderr)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", [90, 80])
def test_it_rounds_every_operation_and_stays_in_registers(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled(name, capability)
    assert roundings(found["ptx"]) == set()
    program = tmp_path / "kernel.cubin"
    program.write_bytes(found["cubin"])
    assert stack_nbytes(program) == ["0"]


def test_a_fused_product_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert roundings(compiled("e3m0", 90, fused=True)["ptx"]) == {"fma.rn.f32"}
