"""A fixture: finished runs of a tiny model, whose folders the planner reads."""

from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.train.trainer import train
from training import corpus, tiny

__all__ = ["corpus", "simulated", "tiny"]

MADE: dict[str, Path] = {}


@pytest.fixture
def simulated(tiny, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run of two workers in one process; no test may write to it."""

    def run(text: str) -> Path:
        if text not in MADE:
            MADE[text] = tmp_path_factory.mktemp("run") / "out"
            train(tiny(text, steps=13), MADE[text])
        return MADE[text]

    return run
