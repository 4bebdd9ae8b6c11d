"""Runs of a tiny model that several test files train, resume, and start as ranks."""

import dataclasses
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked
from processes import fork_ranks
from thinwire.train import recipes
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import resume

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256},
    **{"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "tie_word_embeddings": True},
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """40 kB of prose with some structure: words from a seeded chain."""
    draw = random.Random(0)
    words = ["thin", "wire", "worker", "anchor", "round", "step", "mean", "payload", "sends", "a"]
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        text = " ".join(draw.choice(words) for _ in range(180))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture
def tiny(tmp_path, corpus):
    """A configuration of a model of a few thousand parameters."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"hidden_size": 16, "num_hidden_layers": 1}))

    def make(preset: str = "diloco", **changes) -> TrainConfig:
        config = dataclasses.replace(
            recipes.laptop(preset),
            model=Model(size=str(file)),
            data=Data(corpus=str(corpus), sequence_length=16, validation_sequences=6),
            workers=2,
            steps=12,
            global_batch=4,
            periods=Intervals(log_steps=3, evaluate_steps=6, checkpoint_steps=4),
            machine=Runtime(device="cpu", threads=1),
        )
        if preset not in ("ddp", "demo"):
            changes = {"method": dataclasses.replace(config.method, sync_every=5), **changes}
        return dataclasses.replace(config, **changes)

    return make


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def script(config: TrainConfig, out: Path, *, begin: str = "resume") -> list[str]:
    """The command of a process that runs `config`."""
    file = out.parent / f"{out.name}.py"
    file.write_text(
        "import pickle\nfrom pathlib import Path\nfrom thinwire.train import trainer\n"
        f"trainer.{begin}(pickle.loads({pickle.dumps(config)!r}), Path({str(out)!r}))\n"
    )
    return [sys.executable, str(file)]


def kill_when(process: Forked, ready: Callable[[], bool]) -> None:
    while not ready():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def start_ranked(config: TrainConfig, out: Path, begin: str = "train") -> list[Forked]:
    _, file = script(config, out, begin=begin)
    return fork_ranks(config.workers * config.machine.worker_size, file)


def run_ranked(config: TrainConfig, out: Path, begin: str = "train") -> dict:
    processes = start_ranked(config, out, begin)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    return summary(out)


def stop_after(config: TrainConfig, out: Path, monkeypatch, step: int | None, *observers, **how):
    """Run until `step`, or the first one, and fail there, as a full disk or a user would.

    Returns:
        The workers of the run.
    """
    from thinwire.train.trainer import _Trainer

    original, groups = _Trainer._one_step, []

    def one_step(self):
        if step in (None, self._group.step):
            groups.append(self._group)
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "_one_step", one_step)
        with pytest.raises(KeyboardInterrupt):
            resume(config, out, *observers, **how)
    return groups[0]


def flags(config: TrainConfig, out: Path) -> list[str]:
    """Flags of `thinwire train` for the configuration of `tiny`."""
    return [
        *("--method", config.method.name, "--model", config.model.size, "--workers", "2"),
        *("--corpus", config.data.corpus, "--sequence-length", "16", "--global-batch", "4"),
        *("--steps", str(config.steps), "--sync-every", "5", "--threads", "1", "--device", "cpu"),
        *("--log-steps", "3", "--evaluate-steps", "6", "--checkpoint-steps", "4"),
        *("--seed", str(config.seed), "--out", str(out)),
    ]


class Team:
    """Processes of `thinwire join` (or `serve`) in one run, by the names of their folders."""

    def __init__(
        self, folder: Path, config: TrainConfig, address: str, *more: str, **environment: str
    ) -> None:
        self.folder, self.config, self.address, self.more = folder, config, address, more
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.workers: dict[str, Forked] = {}

    def start(
        self,
        name: str,
        *more: str,
        worker: int | None = None,
        workers: int = 2,
        command: str = "join",
    ) -> Forked:
        numbers = "" if worker is None else f"?workers={workers}&worker={worker}"
        at = self.address + numbers
        given = [at, *flags(self.config, self.folder / name), *self.more, *more]
        self.workers[name] = Forked(("-m", "thinwire", command, *given), self.environment)
        return self.workers[name]

    def until(self, reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < until_s
            gone = [n for n, worker in self.workers.items() if worker.poll() is not None]
            assert not gone, [self.workers[name].stderr for name in gone]
            time.sleep(0.005)

    def finish(self) -> dict[str, dict]:
        said = {name: worker.communicate(timeout=150) for name, worker in self.workers.items()}
        assert not any(worker.returncode for worker in self.workers.values()), said
        return {name: summary(self.folder / name) for name in self.workers}

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *details: object) -> None:
        for worker in self.workers.values():
            worker.kill()
