import dataclasses
import itertools
import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from thinwire.train.config import Machine, Periods, TrainConfig
from thinwire.train.data import Data
from thinwire.train.recipes import laptop
from thinwire.train.trainer import train
from thinwire.train.workers.agreement_probe import mean_cosine, mean_norm, norm, relative_spread


def vectors(workers: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(workers)
    drawn = torch.randn(workers, 2 * numel, generator=generator).to(dtype)
    return [row[::2] for row in drawn]  # not contiguous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("workers", "numel"), [(2, 1), (3, 7), (5, 1009)])
def test_the_mean_cosine_is_that_of_all_pairs(workers: int, numel: int, dtype) -> None:
    these = [vector.double() for vector in vectors(workers, numel, dtype)]
    pairs = [torch.dot(a, b) / (a.norm() * b.norm()) for a, b in itertools.combinations(these, 2)]
    found = mean_cosine(vectors(workers, numel, dtype))
    assert found == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-12)
    assert mean_norm(vectors(workers, numel, dtype)) == pytest.approx(
        sum(float(v.norm()) for v in these) / workers
    )


def test_without_a_direction_there_is_no_cosine() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    for these in ([], [one], [one, zero], [one, one * float("nan")], [one, one * float("inf")]):
        assert mean_cosine(these) is None
    assert mean_cosine([torch.zeros(0), torch.zeros(0)]) is None
    assert mean_cosine([one, -one]) == -1.0
    assert mean_cosine([one * 1e-30, one * 1e30]) == pytest.approx(1.0)
    assert norm([]) == 0.0


def config(
    method: str, simulation: Literal["threads", "stacked"] = "threads", **changes
) -> TrainConfig:
    made = {
        "steps": 11,
        "workers": 2,
        "global_batch": 2,
        "data": Data(sequence_length=8, validation_sequences=2),
        "periods": Periods(log_steps=1, statistics_steps=5),
    }
    config = dataclasses.replace(laptop(method), **{**made, **changes})
    machine = Machine(threads=1, simulation=simulation)
    slots = config.method
    if slots.sync_every > 1:
        slots = dataclasses.replace(slots, sync_every=5)
    return dataclasses.replace(config, machine=machine, method=slots)


def noted(out: Path) -> dict[int, set[str]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {r["step"]: {key for key in r if "/" in key} for r in records}
    return {step: keys for step, keys in found.items() if keys}


@pytest.mark.slow_cases("ddp", "streaming")
@pytest.mark.parametrize("simulation", ["threads", "stacked"])
@pytest.mark.parametrize("method", ["ddp", "muloco:bits=2", "streaming_diloco:tau=2", "noloco"])
def test_a_probe_changes_nothing(tmp_path, method: str, simulation) -> None:
    watched = train(config(method, simulation), tmp_path / "watched")
    unwatched = config(method, simulation, periods=Periods(log_steps=1))
    alone = train(unwatched, tmp_path / "alone")
    assert watched["outer_digest"] == alone["outer_digest"]
    assert noted(tmp_path / "alone") == {}
    found = noted(tmp_path / "watched")
    if method == "ddp":
        assert found == {step: {"pseudo_gradient_norm/0", "cosine/0"} for step in (5, 10)}
    if method == "muloco:bits=2":
        names = {"pseudo_gradient_norm/0", "cosine/0", "feedback_norm/0"}
        assert (found[5], found[10]) == (names, names)
    if method == "noloco":
        names = {"pseudo_gradient_norm/0", "cosine/0", "spread/0"}
        assert (found[5], found[10]) == (names, names)
    if method.startswith("streaming"):
        assert {key for keys in found.values() for key in keys} == {
            f"{name}/{p}" for name in ("pseudo_gradient_norm", "cosine") for p in range(5)
        }


def test_spread_is_relative_to_the_mean() -> None:
    apart = [torch.tensor([3.0, 4.0]) * (1 + sign * 0.1) for sign in (-1, 1)]
    assert relative_spread(apart) == pytest.approx(0.1)
    assert relative_spread([100 * x for x in apart]) == pytest.approx(0.1)
    assert relative_spread(apart[:1]) == 0.0
    assert relative_spread([x.bfloat16() for x in apart]) == pytest.approx(0.1, rel=0.1)
    assert relative_spread([torch.zeros(0), torch.zeros(0)]) is None
    assert relative_spread([apart[0], -apart[0]]) is None
    assert relative_spread([torch.tensor([float("nan")])] * 2) is None


def test_the_spread_that_is_noted_is_that_of_the_anchors(tmp_path, monkeypatch) -> None:
    from thinwire.train.workers import agreement_probe as agreement_probe

    seen = []

    def keep(vectors):
        seen.append([vector.clone() for vector in vectors])
        return relative_spread(vectors)

    monkeypatch.setattr(agreement_probe, "relative_spread", keep)
    data = Data(sequence_length=8, validation_sequences=4)
    train(config("noloco", steps=5, workers=4, global_batch=4, data=data), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    (anchors,) = seen
    mean = torch.stack(anchors).mean(0)
    squares = sum((anchor - mean).square().sum() for anchor in anchors)
    assert record["spread/0"] == pytest.approx(float((squares / 4).sqrt() / mean.norm()), rel=1e-4)
    assert record["spread/0"] > 1e-4


def test_what_is_noted_of_feedback_is_what_it_holds(tmp_path, monkeypatch) -> None:
    from thinwire.train.workers import agreement_probe as agreement_probe

    held = []

    def keep(self, worker, index):
        residual = worker.outer.unsent_feedback()[index]["residual"]
        held.append(float(residual.norm()))
        return [residual]

    monkeypatch.setattr(agreement_probe.AgreementProbe, "_own_feedback", keep)
    train(config("muloco:bits=2", steps=5), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["feedback_norm/0"] == pytest.approx(sum(held) / 2, rel=1e-6)
    assert record["feedback_norm/0"] > 0


def test_a_lone_worker_agrees_with_nobody(tmp_path) -> None:
    train(config("diloco", workers=1, steps=5), tmp_path / "run")
    assert noted(tmp_path / "run") == {}
