"""A random stream per worker, although torch has one per process."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RandomStream:
    """The state of torch's generators as one worker sees them.

    Args:
        seed: of the run.
        worker: rank; workers draw independent numbers.
        device: whose generator is used besides the CPU's.
    """

    def __init__(self, *, seed: int, worker: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        mixed = hashlib.sha256(f"thinwire {seed} {worker}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if self._cuda else []):
            torch.manual_seed(int.from_bytes(mixed[:7], "little"))
            self._states = self._current()

    @contextmanager
    def active(self) -> Generator[None]:
        """Everything drawn inside continues this worker's stream."""
        outside = self._current()
        self._install(self._states)
        try:
            yield
        finally:
            self._states = self._current()
            self._install(outside)

    def state_dict(self) -> dict[str, Tensor]:
        """The generators' states."""
        return dict(self._states)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue a stream."""
        self._states = {key: value.cpu() for key, value in state.items()}

    def _current(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._cuda is not None:
            states["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return states

    def _install(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._cuda is not None:
            torch.cuda.set_rng_state(states["cuda"], self._cuda)


def draws_random_numbers(model: nn.Module, tokens: Tensor) -> bool:
    """Whether a forward pass in training mode draws from torch's generators, as dropout does.

    Args:
        model: takes `input_ids`.
        tokens: int64 [batch, time], where the model is, on CPU or CUDA; the pass leaves no trace in
            generators or gradients.
    """
    cuda = [tokens.device] if tokens.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]
        model(input_ids=tokens)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]
        return not all(map(torch.equal, before, after))
