"""An inner optimizer that fails, in a module of its own so that other processes can import it."""

import os
import signal
import warnings
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import nn

from thinwire.inner import InnerOptimizer


@dataclass(frozen=True, kw_only=True)
class Doomed(InnerOptimizer):
    """SGD whose steps first call the method named `how`."""

    how: str
    file: str = ""
    lr: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer, taken = torch.optim.SGD(model.parameters(), lr=self.lr), count(1)
        optimizer.register_step_pre_hook(lambda *_: getattr(self, self.how)(next(taken)))
        return optimizer

    def mark(self) -> None:
        with Path(self.file).open("a") as opened:
            opened.write(".")

    def kill_once(self, taken: int) -> None:
        """Die in step 5, unless `file` exists: then add a mark to it in every step."""
        if Path(self.file).exists():
            self.mark()
        elif taken == 5:
            Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def kill(self, taken: int) -> None:
        """Die in the first step, and add a mark to `file` each time."""
        self.mark()
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, taken: int) -> None:
        raise RuntimeError("the accelerator is on fire")

    def say(self, taken: int) -> None:
        """Print and warn, also past Python's streams as a C library would."""
        print("said to stdout")
        warnings.warn("said to stderr", stacklevel=1)
        os.write(2, b"said past Python\n")
