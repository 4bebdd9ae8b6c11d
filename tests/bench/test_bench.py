import importlib.util
import itertools
import json
from collections import defaultdict
from functools import partial

import pytest
import torch

from thinwire import bench, codecs, presets
from thinwire.bench.naive import ChunkedTopK, TensorTopK
from thinwire.bench.plain_rounds import TorchBlocks
from thinwire.bench.round_memory import with_short_rounds
from thinwire.bench.shapes import gpt2, llama
from thinwire.bench.temporaries import peak_temporary_nbytes
from thinwire.bench.workers import ObservedWorker
from thinwire.cli import bench as cli_bench
from thinwire.cli import main
from thinwire.errors import ConfigurationError
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.layout import CHUNK, Layout

small = partial(llama, vocabulary=37, width=64, layers=1)


def test_a_report_is_printed_and_kept_with_its_context(tmp_path, capsys, monkeypatch) -> None:
    quick = partial(bench.round_memory, build=small, methods=["diloco"])
    monkeypatch.setattr(bench, "round_memory", quick)
    assert main(["bench", "round-memory", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "round-memory.json").read_text())
    assert {"torch", "thinwire", "python", "cores", "command"} <= found.keys()
    assert found["command"] == "thinwire bench round-memory"
    assert [(row["dtype"], row["workers"]) for row in found["rows"]] == [
        ("float32", 1),
        ("float32", 2),
        ("bfloat16", 1),
        ("bfloat16", 2),
    ]
    assert "temporaries" in capsys.readouterr().out


def test_rounds_are_measured_against_plain_torch_that_computes_the_same() -> None:
    threads = torch.get_num_threads()
    report = bench.round(build=small, repeats=2)
    assert torch.get_num_threads() == threads
    rows = json.loads(json.dumps(report.describe()))["rows"]
    plain = ["torch._foreach", "torch in blocks"]
    names = [row["name"] for row in rows if row["threads"] == 1]
    assert [name for name in names if name != "torchft"][:8] == [
        *(*plain, "diloco"),
        *(*plain, "diloco", "muloco in 1 bit", "muloco in 2 bit"),
    ]
    for row in rows:
        assert len(row["begin_cpu_s"]) == len(row["finish_wall_s"]) == len(row["copy_cpu_s"]) == 2
        if row["name"] in (*plain, "diloco", "torchft"):
            # A lone worker steps from its own weights: other roundings, of numbers of one size.
            assert row["difference"] <= (2**-21 if row["workers"] == 1 else 0.0)
        else:
            assert row["difference"] is None
    fastest = [min(r["over_plain"] for r in rows[:3]), *(r["over_plain"] for r in rows[:2])]
    assert 1.0 in fastest
    for table in report.tables():
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_plain_rounds_differ_where_the_outer_optimizer_does() -> None:
    """The control: their difference is not zero whatever they compute."""
    methods = presets.diloco(sync_every=1), presets.muloco(sync_every=1)
    moved = []
    for method in methods:
        rounds = TorchBlocks(small, method, 2)
        for _ in range(2):
            rounds.train()
            rounds.begin()
            rounds.finish()
        moved.append(torch.cat([p.reshape(-1) for p in rounds.parameters()]))
    assert not torch.equal(*moved)


@pytest.mark.slow
def test_kernels_do_not_grow_faster_than_what_they_are_for() -> None:
    """Of a worker, on a model small enough for one batch of a codec."""
    report = bench.round_scaling(
        parameters=1 << 16,
        workers=(2, 4, 16, 32),
        fragments=(1, 4, 8),
        tensors=(10, 40, 160),
        repeats=1,
    )
    assert {len(row) for table in report.tables() for row in table.rows} == {6}
    series = defaultdict(list)
    for row in report.rows:
        assert row.begin_ns > 0
        assert row.finish_ns > 0
        series[row.method, row.axis].append((row.count, row.kernels))
    for (method, axis), points in series.items():
        for (fewer, some), (more, many) in itertools.pairwise(points):
            # Reduce-scatter, which takes over from gather somewhere, has a message for each worker;
            # leftovers of a fragment take a part of their own.
            most = 130 * more if axis == "workers" else 1.1 * some * more / fewer
            assert many <= most, (method, axis, points)


@pytest.mark.parametrize("name", ["diloco", "sparse_muloco", "noloco", "muloco:bits=2"])
def test_the_worker_that_is_observed_does_what_its_twin_does(name: str) -> None:
    worker = ObservedWorker(small, with_short_rounds(name), 3)
    for _ in range(3):
        worker.train()
        worker.loop.begin()
        worker.loop.finish()
    (twin, *_) = worker._twins
    assert worker.loop.digest() == twin.digest()
    # Feedback is what this worker itself trained: its message comes back from the record.
    feedback = zip(worker.loop.unsent_feedback(), twin.unsent_feedback(), strict=True)
    for ours, theirs in feedback:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert worker.loop.stats.rounds == 3
    assert worker.loop.stats.sent_bytes == twin.stats.sent_bytes


def test_simulation_is_measured_against_one_worker() -> None:
    result = bench.simulation(workers=2, steps=1, repeats=1)
    assert result.speed_ratio == result.baseline_s[0] / result.ours_s[0]
    assert result.ours == "2 simulated workers"


@pytest.mark.slow
def test_workers_are_measured_against_a_loop_without_thinwire() -> None:
    threads = torch.get_num_threads()
    report = bench.plain_loop(workers=(1, 2), steps=1, repeats=2)
    assert torch.get_num_threads() == threads
    found = json.loads(json.dumps(report.describe()))
    who = ["plain loop", "plain loop, 2 optimizers", "K=1", "K=2"]
    assert {inner: list(each) for inner, each in found["cpu_s"].items()} == {
        "AdamW": who,
        "Muon": who,
    }
    assert all(len(s) == 2 and min(s) > 0 for e in found["cpu_s"].values() for s in e.values())
    measured = found["cpu_s"]["Muon"]
    assert found["ratios"]["Muon"]["K=2"] == min(measured[who[3]]) / min(measured[who[0]])
    (table,) = report.tables()
    assert [len(row) for row in table.rows] == [len(table.columns)] * 8


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs a CPU's kernels")
def test_kernels_are_measured_against_a_copy_and_torch() -> None:
    """On a CPU, whose kernels have the same interface; what is found there says nothing of GPUs."""
    compared = [codecs.E3M0(), codecs.TopK(k=64)]
    report = bench.gpu_kernels(
        device=torch.device("cpu"), chunks=3, compared=compared, workers=2, repeats=2
    )
    found = json.loads(json.dumps(report.describe()))
    works = [(row["name"], row["work"]) for row in found["rows"]]
    names = ["e3m0", "topk-64/sign-levels"]
    assert works == [(name, work) for name in names for work in ("encode", "mean")]
    encode, mean, *_, sparse_mean = found["rows"]
    assert encode["moved_nbytes"] == 3 * (3 * 4 * CHUNK + 2050)
    assert mean["moved_nbytes"] == 3 * (2 * 4 * CHUNK + 2 * 2050)
    assert sparse_mean["moved_nbytes"] == 2 * 3 * (84 + 64 * 64)
    for row in found["rows"]:
        assert len(row["kernel_s"]) == len(row["copy_s"]) == 2
        assert row["share_of_copy"] > 0
        assert row["speed_over_torch"] > 0
    (table,) = report.tables()
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_kernels_are_not_measured_where_there_are_none(monkeypatch) -> None:
    with pytest.raises(ConfigurationError, match="measure kernels on meta"):
        bench.gpu_kernels(device=torch.device("meta"))
    names = ["codecs", "gpu-kernels"]
    monkeypatch.setattr("thinwire.codecs.kernels.kernel_backend", lambda device: "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli_bench._here(names) == ["codecs"]
    monkeypatch.setattr("thinwire.codecs.kernels.kernel_backend", lambda device: "triton 3.7.1")
    assert cli_bench._here(names) == names
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli_bench._here(names) == ["codecs"]


def test_muon_is_measured_against_that_of_torch() -> None:
    threads = torch.get_num_threads()
    report = bench.muon(widths=(8, 17), repeats=2)
    assert torch.get_num_threads() == threads
    found = json.loads(json.dumps(report.describe()))
    assert [row["parameters"] for row in found["rows"]] == [13 * 8 * 8, 13 * 17 * 17]
    for row in found["rows"]:
        assert row["ratio"] == min(row["ours_cpu_s"]) / min(row["torch_cpu_s"])
        assert len(row["ours_cpu_s"]) == len(row["torch_cpu_s"]) == 2
        assert row["ours_nbytes"] > 0 < row["torch_nbytes"]
    (table,) = report.tables()
    assert [len(row) for row in table.rows] == [len(table.columns)] * 2


def test_codecs_are_measured_against_a_loop_over_topk() -> None:
    compared = [codecs.TopK(k=64), codecs.Quantise(bits=2), codecs.CastBF16()]
    layout = gpt2(vocabulary=300, positions=17, width=64, layers=1)
    threads = torch.get_num_threads()
    report = bench.codecs(layout=layout, compared=compared, workers=3, repeats=2, budget_s=60)
    assert torch.get_num_threads() == threads
    found = json.loads(json.dumps(report.describe()))
    names = ["per-tensor torch.topk", "chunked torch.topk", *(codec.id for codec in compared)]
    assert [row["name"] for row in found["rows"]] == names * len(report.blocks)
    assert found["rows"][0]["threads"] == 1
    assert found["rows"][0]["encode_speed_over_naive"] == 1
    for row in found["rows"]:
        assert all(row[field] > 0 for field in row if field.endswith(("floor", "naive", "meter")))
        assert len(row["encode_s"]) == len(row["encode_floor_s"]) > 0
        assert len(row["decode_s"]) == len(row["decode_floor_s"]) > 0
        if row["name"] != names[0]:
            assert len(row["encode_s"]) == len(row["decode_s"]) == 2
    cast = found["rows"][len(names) - 1]
    assert cast["message_nbytes"] == 2 * layout.numel + HEADER_NBYTES
    assert [len(table.rows) for table in report.tables()] == [len(names)] * len(report.blocks)
    for table in report.tables():
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (codecs.TopK(k=64, values=codecs.SignMean()), 0.147),
        (codecs.TopK(k=64, values=codecs.SignLevels()), 0.167),
        (codecs.TopK(k=64, values=codecs.SignLevels(), groups=codecs.Blocks()), 0.167),
        (codecs.Quantise(bits=2), 2.02),
    ],
)
def test_bits_per_parameter_of_a_gpt2(codec: codecs.Codec, bits: float) -> None:
    """Embeddings, norms and biases included, and the header."""
    layout = gpt2()
    assert layout.numel == 51_475_968
    assert 8 * (codec.bind(layout).nbytes + HEADER_NBYTES) / layout.numel <= bits


@pytest.mark.parametrize("kind", [TensorTopK, ChunkedTopK])
def test_the_baselines_send_the_largest_and_keep_the_rest(kind) -> None:
    layout = Layout.of({"w": (CHUNK + 128,), "b": (3,)})
    naive = kind(layout, decay=1.0)
    delta = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    payloads = [naive.encode(delta)]
    assert torch.cat(naive._residuals)[int(delta.abs().argmax())] == 0
    payloads.append(naive.encode(delta))
    mean = torch.cat([part.flatten() for part in naive.mean(payloads)])
    residual = torch.cat(naive._residuals)
    torch.testing.assert_close(2 * mean + residual, 2 * delta)
    assert naive.nbytes(payloads[0]) == 12 * (CHUNK // 64 + 2 + 1)


def test_temporaries_are_what_lives_at_once_beside_the_result() -> None:
    x = torch.zeros(1000)
    assert peak_temporary_nbytes(lambda: x + 1)[1] == 0
    assert peak_temporary_nbytes(lambda: x.add_(1))[1] == 0
    assert peak_temporary_nbytes(lambda: ((x + 1) * 2 + 3) * 4)[1] == 4000
    assert peak_temporary_nbytes(lambda: x * 2 + x * 3)[1] == 8000


def test_a_sparse_codec_needs_a_small_share_of_the_model_beside_it() -> None:
    """Batches have a fixed size, so the share falls as the model grows."""
    layout = Layout.of({"w": (4096, 4096)})
    coder = codecs.TopK(k=64).bind(layout)
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    payload, encoding = peak_temporary_nbytes(lambda: coder.encode_residual(x))
    decoding = peak_temporary_nbytes(lambda: coder.add_to(x, [payload] * 8, weight=0.125))[1]
    assert encoding <= 0.4 * x.nbytes
    assert decoding <= 0.4 * x.nbytes
