"""Costs of a worker's round: temporaries beside state and payload, kernels, bytes."""

import itertools
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

import thinwire as tw
from speed.measuring import peak_temporary_nbytes
from speed.models import gpt2, llama
from speed.round_costs import round_memory, round_scaling, with_short_rounds
from speed.workers import ObservedWorker
from thinwire import codecs
from thinwire.blocks import block_numel
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.layout import Layout
from toy import feedback_of

PROMISED = 4.0
"""Bytes a parameter of the largest fragment."""


# Of two workers the longer contribution is scaled.
CLIPPED = ["diloco:clip_norms=1", "muloco:bits=2:clip_norms=1:drop_outliers=10"]


@pytest.mark.slow_cases(but=("diloco]", "muloco:bits=2]", "noloco", "sparseloco"))
@pytest.mark.parametrize("method", [*tw.presets.names(), "muloco:bits=2", *CLIPPED])
def test_a_round_takes_no_more_memory_than_it_may(method: str) -> None:
    build = partial(llama, vocabulary=4096, width=192, layers=3)
    for row in round_memory(methods=[method], build=build).data["rows"]:
        # A thousandth for sums and flags.
        assert max(row["begin_bytes"], row["finish_bytes"]) <= PROMISED + 0.001, row


build = partial(llama, vocabulary=37, width=64, layers=1)


@pytest.mark.parametrize("name", ["diloco", "sparse_muloco", "noloco"])
def test_the_worker_that_is_observed_does_what_its_twin_does(name: str) -> None:
    worker = ObservedWorker(build, with_short_rounds(name), 3)
    for _ in range(3):
        worker.train()
        worker.loop.begin()
        worker.loop.finish()
    twin = worker.twins[0]
    assert worker.loop.digest() == twin.digest()
    # Feedback is what this worker itself trained: its message comes back from the record.
    for ours, theirs in zip(feedback_of(worker.loop), feedback_of(twin), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert worker.loop.stats.rounds == 3
    assert worker.loop.stats.sent_bytes == twin.stats.sent_bytes


@pytest.mark.slow
def test_kernels_do_not_grow_faster_than_what_they_are_for() -> None:
    """One worker, a model small enough for one batch of a codec."""
    grown = {"workers": (2, 4, 16, 32), "fragments": (1, 4, 8), "tensors": (10, 40, 160)}
    series = defaultdict(list)
    for row in round_scaling(parameters=1 << 16, repeats=1, **grown).data["rows"]:
        series[row["method"], row["axis"]].append((row["count"], row["kernels"]))
    for (_, axis), points in series.items():
        for (fewer, some), (more, many) in itertools.pairwise(points):
            # Reduce-scatter, which takes over from gather somewhere, has a message for each worker;
            # leftovers of a fragment take a part of their own.
            assert many <= (130 * more if axis == "workers" else 1.1 * some * more / fewer), points


def test_bytes_and_temporaries_of_a_codec_are_a_small_share_of_a_model() -> None:
    """Embeddings, norms and biases included, and the header; the share falls with the model."""
    sparse = codecs.TopK(k=64, values=codecs.SignLevels(), groups=codecs.Blocks())
    for codec, bits in (
        (sparse, 0.167),
        (codecs.TopK(k=64), 0.167),
        (codecs.Quantise(bits=2), 2.02),
    ):
        assert 8 * (codec.bind(gpt2()).nbytes + HEADER_NBYTES) / gpt2().numel <= bits
    coder = codecs.TopK(k=64).bind(Layout.of({"w": (2048, 4096)}))
    x = torch.randn(2048 * 4096, generator=torch.Generator().manual_seed(0))
    payload, encoding = peak_temporary_nbytes(lambda: coder.encode_residual(x))
    decoding = peak_temporary_nbytes(lambda: coder.add_to(x, [payload] * 8, weight=0.125))[1]
    assert max(encoding, decoding) <= 0.4 * x.nbytes
    x = torch.zeros(1000)
    assert peak_temporary_nbytes(lambda: x.add_(1))[1] == 0
    assert peak_temporary_nbytes(lambda: ((x + 1) * 2 + 3) * 4)[1] == 4000
    assert peak_temporary_nbytes(lambda: x * 2 + x * 3)[1] == 8000


@pytest.mark.parametrize("method", ["diloco", "streaming_diloco", "sparseloco", "noloco"])
def test_a_snapshot_is_taken_over_in_place(method: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(48)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = with_short_rounds(method, late=16)
    loop = tw.OuterLoop(model, optimizer, method, transport=tw.transport.in_process(1)[0])
    snapshot = deepcopy(loop._state.capture())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    largest = max(f.outer.flat_anchor().numel() for f in loop._state.fragments)
    before = loop._state.progress().digest
    _, peak = peak_temporary_nbytes(lambda: loop._state.load(snapshot))
    # And two blocks of what is written.
    block = block_numel(torch.device("cpu"))
    assert peak <= PROMISED * (largest + 2 * block), (peak, largest, block)
    assert loop._state.progress().digest == before


@pytest.mark.parametrize("method", ["diloco", "streaming_diloco"])
def test_another_number_of_workers_takes_its_outer_settings_in_place(method: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(48)))
    method = with_short_rounds(method, late=16)
    rows = tuple((k, tw.outer.SGD(lr=0.5 + k / 9, momentum=0.9)) for k in (1, 3))
    method = replace(method, outer=tw.outer.ByWorkerCount(table=rows))
    loop = tw.OuterLoop(model, [], method, transport=tw.transport.in_process(1)[0])
    state, snapshot = loop._state, deepcopy(loop._state.capture())
    others, ledger = replace(snapshot, facts={**snapshot.facts, "workers": 4}), loop._storage.ledger
    kept, before = ledger.device_bytes, state.progress(anew=True).digest
    largest = max(f.outer.memory()["anchor"] for f in state.fragments)
    for change, most in (
        (lambda: state.set_outer_workers(2), 0),
        (lambda: state.set_outer_workers(3), 0),
        (lambda: state.set_outer_workers(1), 0),
        (lambda: state.load(others), largest + 2 * PROMISED * block_numel(torch.device("cpu"))),
    ):
        _, peak = peak_temporary_nbytes(change)
        assert peak <= most, (peak, most)
        assert ledger.device_bytes == kept
        assert state.progress(anew=True).digest == before
    assert state.outer_workers == 4
