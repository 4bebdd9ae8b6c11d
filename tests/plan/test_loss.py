"""Expected losses: from which evidence they are, and where they must not go."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from thinwire.plan.choice import Choice
from thinwire.plan.loss import LossRange, expected_loss

ROOT = Path(__file__).parents[2]
SMALL, LARGE = 250_000, 400e6


def loss(text: str, *, parameters: float = SMALL, workers: int = 4, **fields) -> LossRange:
    choice = Choice(preset=text, **fields)
    return expected_loss(choice, parameters=parameters, workers=workers).loss


def test_the_committed_evidence_is_that_of_the_results():
    code = "import json, loss_evidence; print(json.dumps(loss_evidence.evidence()))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "benchmarks",
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    committed = json.loads(files("thinwire.plan").joinpath("loss_evidence.json").read_text())
    assert json.loads(told) == committed


def test_dense_methods_at_the_evidence_s_own_setting_are_what_was_measured():
    results = json.loads((ROOT / "benchmarks/results/wire-claims.json").read_text())["rows"]
    base = results["ddp, AdamW"]["val_loss_mean"]
    for preset in ("diloco", "muloco"):
        measured = results[preset]["val_loss_mean"] / base - 1
        assert loss(preset, sync_every=10).middle == pytest.approx(measured, abs=1e-4)


@pytest.mark.parametrize(
    ("preset", "row"), [("diloco", (2.682, 2.808)), ("muloco", (2.682, 2.713))]
)
def test_large_dense_methods_are_the_published_ones(preset, row):
    data_parallel, sixteen = row
    found = loss(preset, parameters=416e6, workers=16, sync_every=30)
    assert found.middle == pytest.approx(sixteen / data_parallel - 1)
    assert found.low < found.middle < found.high


@pytest.mark.parametrize("parameters", [SMALL, LARGE])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16, 64, 1000])
@pytest.mark.parametrize(
    "fields",
    [
        {"text": "diloco"},
        {"text": "muloco"},
        {"text": "muloco", "bits": 1},
        {"text": "sparseloco", "density": 1 / 64},
        {"text": "sparse_muloco", "density": 1 / 8},
        {"text": "streaming_muloco", "tau": 5, "layers": 1},
        {"text": "noloco"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_longer_rounds_never_promise_less_loss_and_ranges_hold_their_middle(
    parameters, workers, fields
):
    found = [
        loss(parameters=parameters, workers=workers, sync_every=every, **fields)
        for every in (1, 5, 7, 10, 11, 20, 30, 64, 65, 256, 10_000)
    ]
    assert all(one.low <= one.middle <= one.high for one in found)
    middles = [one.middle for one in found]
    assert middles == sorted(middles)


def test_more_workers_never_promise_less_loss():
    for fields in ({"text": "muloco", "bits": 1}, {"text": "sparseloco"}, {"text": "noloco"}):
        found = [loss(workers=k, sync_every=30, **fields).middle for k in (1, 2, 4, 8, 16, 32)]
        assert found == sorted(found)


def test_what_no_run_had_is_said():
    far = expected_loss(
        Choice(preset="sparseloco", density=1 / 32, sync_every=256), parameters=1e6, workers=64
    )
    assert far.beyond == ("rounds of more than 30 steps by this method", "more than 16 workers")
    near = expected_loss(
        Choice(preset="sparseloco", density=1 / 32, sync_every=30), parameters=1e6, workers=16
    )
    assert near.beyond == ()


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"preset": "muloco", "bits": 1}, 64),
        ({"preset": "muloco", "bits": 2}, 30),
        ({"preset": "diloco"}, 30),
        ({"preset": "sparse_muloco", "density": 1 / 32}, 30),
        ({"preset": "streaming_muloco", "tau": 1}, 10),
        ({"preset": "noloco"}, 10),
    ],
)
def test_how_long_rounds_were_is_said_of_each_method(fields, longest: int):
    for every, beyond in ((longest, ()), (longest + 1, (f"rounds of more than {longest} steps",))):
        found = expected_loss(Choice(sync_every=every, **fields), parameters=1e6, workers=4).beyond
        assert tuple(text.removesuffix(" by this method") for text in found) == beyond
