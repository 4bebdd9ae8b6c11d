"""Files, classes and calls of a DiLoCo round: a budget that only falls."""

import gc
import sys
from pathlib import Path
from types import FrameType

import torch

import thinwire as tw
from toy import Team

# Upper bounds, to be lowered whenever the round gets simpler.
FILES = 18
CLASSES = 28
CALLS = 292

ROOT = str(Path(tw.__file__).parent) + "/"


def calls_of_worker_0() -> list[tuple[str, str]]:
    """(file, class or "") of every call while worker 0 sends and applies a round."""
    calls = []

    def model() -> torch.nn.Module:
        return torch.nn.ParameterDict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            names = code.co_qualname.replace(".<locals>", "").split(".")
            owner = next((n for n in names[:-1] if n.strip("_")[:1].isupper()), "")
            file = code.co_filename.removeprefix(ROOT)
            calls.append((file, owner and f"{file}:{owner}"))

    team = Team(tw.presets.diloco(sync_every=2), lambda _: [], 2, model=model)
    for _ in range(3):
        team.exchange()
    first, second = team.loops
    gc.disable()
    try:
        for half in ("begin", "finish"):
            sys.setprofile(profile)
            getattr(first, half)()
            sys.setprofile(None)
            getattr(second, half)()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert [loop.stats.rounds for loop in team.loops] == [2, 2]
    return calls


def test_a_round_stays_within_its_budget() -> None:
    calls = calls_of_worker_0()
    files = sorted({file for file, _ in calls})
    classes = sorted({owner for _, owner in calls if owner})
    assert len(files) <= FILES, files
    assert len(classes) <= CLASSES, classes
    assert len(calls) <= CALLS
