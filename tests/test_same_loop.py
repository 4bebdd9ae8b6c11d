"""Two workers under another library's trainer compute what `thinwire train` computes."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import free_port, run_workers
from thinwire.train.config import Intervals, WarmupCosine
from thinwire.train.trainer import train
from training import corpus, records, tiny

__all__ = ["corpus", "tiny"]

# Newton-Schulz, in bf16, makes more of a difference in the last bit than AdamW does.
LARGEST_DIFFERENCE = {"diloco": 1e-5, "muloco": 5e-4}


@pytest.mark.slow_cases("diloco-lightning", "muloco")
@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.parametrize("method", LARGEST_DIFFERENCE)
def test_it_is_the_loop_of_thinwire_train(tiny, library: str, method: str, tmp_path: Path) -> None:
    config = tiny(
        method,
        schedule=WarmupCosine(warmup_steps=3),
        periods=Intervals(log_steps=1, evaluate_steps=12, checkpoint_steps=12),
    )
    train(config, tmp_path / "run")
    wanted = [line["loss"] for line in records(tmp_path / "run")]
    assert len(wanted) == 12

    file = tmp_path / "config.pickle"
    file.write_bytes(pickle.dumps(config))
    (out := tmp_path / "out").mkdir()
    meet = f"tcp://127.0.0.1:{free_port()}"
    where = {"THINWIRE_AT": meet, "CONFIG": str(file), "OUT": str(out)}
    said = []
    for process in run_workers("same_loop.py", library, 2, **where):
        assert process.returncode == 0, process.stderr
        said.append(json.loads(process.stdout.splitlines()[-1]))
    assert said[0]["digest"] == said[1]["digest"]
    found = [sum(losses) / 2 for losses in zip(*(each["losses"] for each in said), strict=True)]
    # Means are taken in another order, and what is lost is lost again in every step.
    assert found == pytest.approx(wanted, rel=2e-6)
    mine = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    theirs = torch.load(tmp_path / "out" / "anchor0.pt")
    for name, value in mine.items():
        assert (theirs[name] - value).abs().max() < LARGEST_DIFFERENCE[method], name


def test_another_rate_is_another_loop(tiny, tmp_path: Path) -> None:
    """The control: what the tolerances above must tell apart."""
    config = tiny("diloco", periods=Intervals(log_steps=1, evaluate_steps=12, checkpoint_steps=12))
    other = dataclasses.replace(config, schedule=WarmupCosine(warmup_steps=21))
    losses = []
    for name, each in (("a", config), ("b", other)):
        train(each, tmp_path / name)
        losses.append([line["loss"] for line in records(tmp_path / name)])
    assert losses[0] != pytest.approx(losses[1], rel=2e-5)
