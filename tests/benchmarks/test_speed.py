"""Benchmarks import, run at their smallest size, and compute the published cells."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import bench
from speed.models import gpt2, llama
from thinwire import codecs
from thinwire.fragments.layout import CHUNK

SCRIPTS = sorted(file.stem for file in Path(bench.__file__).parent.glob("*.py"))
model = partial(llama, vocabulary=37, width=64, layers=1)
layout = gpt2(vocabulary=300, positions=17, width=64, layers=1)
CPU = torch.device("cpu")
SMALLEST = {
    "simulation": {"workers": 2, "steps": 1, "repeats": 1},
    "plain-loop": {"workers": (1, 2), "steps": 1, "repeats": 1},
    "muon": {"widths": (8, 17), "repeats": 1},
    "round": {"build": model, "repeats": 1},
    "round-memory": {"build": model, "methods": ["diloco"]},
    "round-scaling": {"workers": [2], "fragments": [2], "tensors": [10], "repeats": 1},
    "codecs": {"layout": layout, "compared": [codecs.TopK(k=64)], "repeats": 1},
    "gpu-kernels": {"device": CPU, "chunks": 3, "compared": [codecs.E3M0()], "repeats": 1},
    "gpu-rounds": {"device": CPU, "vocabulary": 11, "width": 8, "layers": 1},
}


def test_every_script_imports() -> None:
    for name in SCRIPTS:
        importlib.import_module(name)


@pytest.mark.slow_cases("simulation", "plain-loop", "round-")  # test_round_costs.py has the last
@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_a_report_is_printed_and_kept_with_its_context(name, tmp_path, capsys, monkeypatch) -> None:
    if name == "gpu-kernels":  # on a CPU, whose kernels have the same interface
        pytest.importorskip("numba")
    small = {name: partial(bench.BENCHMARKS[name], **SMALLEST[name])}
    monkeypatch.setattr(bench, "BENCHMARKS", small)
    bench.main([name, "--out", str(tmp_path)])
    assert len(capsys.readouterr().out.splitlines()) > 3
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"torch", "thinwire", "python", "cores"} <= found.keys()
    if name == "round":
        for row in found["rows"]:
            if row["difference"] is not None:
                # A lone worker steps from its own weights: other roundings, of numbers of one size.
                assert row["difference"] <= (2**-21 if row["workers"] == 1 else 0.0)
    if name == "gpu-kernels":
        moved = [row["moved_nbytes"] for row in found["rows"]]
        assert moved == [3 * (3 * 4 * CHUNK + 2050), 3 * (2 * 4 * CHUNK + 8 * 2050)]


def test_cells_of_tables_are_those_published() -> None:
    clock = importlib.import_module("muloco_wall_clock")
    for rate, method in ((10, "MuLoCo K=1"), (10, "DiLoCo K=16"), (6400, "MuLoCo K=16")):
        row = clock.row(rate, method, clock.PUBLISHED_H[rate][method])
        assert abs(row["off"]) <= clock.AT_MOST
        assert row["hours"] == pytest.approx(row["closed_form_hours"], rel=1e-9)
    table = importlib.import_module("streaming_table")
    published = table.PUBLISHED["1B"]["Streaming"][3]
    assert table.cell("1B", "Streaming", table.TARGETS[3], published)["grid_steps"] <= 1
