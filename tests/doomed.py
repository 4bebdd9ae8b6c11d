"""Inner optimizers that fail at a step: in a module, so that other processes find them."""

import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from thinwire.inner import InnerOptimizer


class _Plain(torch.optim.SGD):
    trouble = None

    def step(self, closure=None):
        if self.trouble is not None:
            self.trouble()
        return super().step(closure)


@final
@dataclass(frozen=True, kw_only=True)
class Killed(InnerOptimizer):
    """Kills its process at step `at`, unless `file` is there; writes a mark for every step there.

    The file is there when the process has been killed once.
    """

    file: str
    at: int
    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer, taken = _Plain(model.parameters(), lr=self.lr), []

        def trouble() -> None:
            taken.append(0)
            if Path(self.file).exists():
                with Path(self.file).open("a") as file:
                    file.write(".")
            elif len(taken) == self.at:
                Path(self.file).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        optimizer.trouble = trouble
        return optimizer


@final
@dataclass(frozen=True, kw_only=True)
class AlwaysKilled(InnerOptimizer):
    """Kills its process at the first step, and adds a mark to `file` each time."""

    file: str
    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = _Plain(model.parameters(), lr=self.lr)

        def trouble() -> None:
            with Path(self.file).open("a") as file:
                file.write(".")
            os.kill(os.getpid(), signal.SIGKILL)

        optimizer.trouble = trouble
        return optimizer


@final
@dataclass(frozen=True, kw_only=True)
class Failing(InnerOptimizer):
    """Raises at the first step."""

    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = _Plain(model.parameters(), lr=self.lr)

        def trouble() -> None:
            raise RuntimeError("the accelerator is on fire")

        optimizer.trouble = trouble
        return optimizer


@final
@dataclass(frozen=True, kw_only=True)
class Noisy(InnerOptimizer):
    """Prints and warns, also as a library in C would, past Python's streams."""

    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = _Plain(model.parameters(), lr=self.lr)

        def trouble() -> None:
            print("said to stdout")
            warnings.warn("said to stderr", stacklevel=1)
            os.write(2, b"said past Python\n")

        optimizer.trouble = trouble
        return optimizer
