"""Inner optimizers that fail at a step: in a module, so that other processes find them."""

import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from thinwire.inner import InnerOptimizer


class _Plain(torch.optim.SGD):
    def __init__(self, parameters: Any, doomed: "_Doomed") -> None:
        super().__init__(parameters, lr=doomed.lr)
        self.doomed, self.taken = doomed, 0

    def step(self, closure=None):
        self.taken += 1
        self.doomed.trouble(self.taken)
        return super().step(closure)


@dataclass(frozen=True, kw_only=True)
class _Doomed(InnerOptimizer):
    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Plain(model.parameters(), self)


def mark(file: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(".")


@final
@dataclass(frozen=True, kw_only=True)
class Killed(_Doomed):
    """Kills its process at step `at`, unless `file` is there; writes a mark for every step there.

    The file is there when the process has been killed once.
    """

    file: str
    at: int

    def trouble(self, taken: int) -> None:
        if Path(self.file).exists():
            mark(self.file)
        elif taken == self.at:
            Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@final
@dataclass(frozen=True, kw_only=True)
class AlwaysKilled(_Doomed):
    """Kills its process at the first step, and adds a mark to `file` each time."""

    file: str

    def trouble(self, taken: int) -> None:
        mark(self.file)
        os.kill(os.getpid(), signal.SIGKILL)


@final
@dataclass(frozen=True, kw_only=True)
class Failing(_Doomed):
    """Raises at the first step."""

    def trouble(self, taken: int) -> None:
        raise RuntimeError("the accelerator is on fire")


@final
@dataclass(frozen=True, kw_only=True)
class Noisy(_Doomed):
    """Prints and warns, also as a library in C would, past Python's streams."""

    def trouble(self, taken: int) -> None:
        print("said to stdout")
        warnings.warn("said to stderr", stacklevel=1)
        os.write(2, b"said past Python\n")
