"""Run folders without runs: files as a run would write them, with losses chosen by a test."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from plan_scenarios import peak_sent_after
from thinwire.plan.models import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.runs.find import find_runs
from thinwire.runs.schema import FinishedRun
from thinwire.train.config import TrainConfig
from thinwire.train.data import Data
from thinwire.train.recipes import laptop

STATES = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")


@cache
def shape() -> Shape:
    return resolve("250k")


def config_of(method: str, *, sync_every: int | None = None, **changes: Any) -> TrainConfig:
    config = laptop(method)
    if sync_every is not None:
        slots = dataclasses.replace(config.method, sync_every=sync_every)
        config = dataclasses.replace(config, method=slots)
    made = {"steps": 23, "global_batch": 8, "data": Data(sequence_length=16), **changes}
    return dataclasses.replace(config, **made)


def write_run(folder: Path, config: TrainConfig, *, loss: float = 2.0, **extra: float) -> Path:
    """The folder of a finished run with three evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    sends = traffic(config.method, shape(), workers=config.workers)
    records = [
        {
            "step": step,
            "tokens": step * config.tokens_per_step,
            "loss": loss + 1 / step,
            "sent_bytes": sends.sent_nbytes(step),
            "received_bytes": sends.received_nbytes(step),
            "wait_s": 0.01 * step,
            "overlapped_s": 0.02 * step,
            "wall_s": 0.5 * step,
            "val_loss": loss + (3 / step - 3 / config.steps),
            **{f"{state}_bytes": 8 for state in STATES},
            **extra,
        }
        for step in (7, 20, config.steps)
    ]
    last, steps = records[-1], config.steps
    summary = {name: last[name] for name in ("tokens", "val_loss", "wall_s", "wait_s")} | {
        "method": config.method.name,
        "workers": config.workers,
        "parameters": shape().parameters,
        "steps": steps,
        "sent_bytes_per_worker": last["sent_bytes"],
        "received_bytes_per_worker": last["received_bytes"],
        "peak_sent_bytes_per_step": peak_sent_after(sends, steps),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
    }
    (folder / "config.json").write_text(json.dumps(config.describe()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def retell(folder: Path, old: str, new: str) -> None:
    """Replace text in the records of a run."""
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace(old, new))


def runs_in(folder: Path) -> list[FinishedRun]:
    return [status.run for status in find_runs([folder]).values() if status.run is not None]


def change(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; `a__b` is field b of field a."""
    data = json.loads(file.read_text())
    for path, value in fields.items():
        *parts, name = path.split("__")
        place = data
        for part in parts:
            place = place[part]
        place[name] = value
    file.write_text(json.dumps(data))


def comparison(folder: Path) -> Path:
    """Runs of several methods, seeds, K and H, some with statistics, and folders to leave out."""
    for method, loss in (("ddp", 1.7), ("diloco", 1.9), ("muloco:bits=2", 1.6)):
        for seed in (0, 1, 2):
            name = f"{method.replace(':', '-')}-seed{seed}"
            noted = {"cosine/0": 0.5, "pseudo_gradient_norm/0": 1.5}
            config = config_of(method, seed=seed)
            write_run(folder / name, config, loss=loss + 0.01 * seed, **noted)
    for workers in (2, 8):
        write_run(folder / f"k{workers}", config_of("diloco", workers=workers), loss=1.95)
    write_run(folder / "h5", config_of("diloco", sync_every=5), loss=1.85)
    streaming = {f"{name}/{p}": 0.1 * p for name in ("cosine", "feedback_norm") for p in range(5)}
    write_run(folder / "streaming", config_of("streaming_diloco:tau=2"), loss=1.8, **streaming)
    (write_run(folder / "unfinished", config_of("muloco", seed=3)) / "summary.json").unlink()
    return folder
