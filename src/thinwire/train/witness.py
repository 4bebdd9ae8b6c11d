"""Looks at what simulated workers send, now and then, and measures how far they agree."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from thinwire.train.alignment import mean_cosine, mean_norm, norm
from thinwire.train.worker import Worker

__all__ = ["Witness", "witness_of"]


@final
class Witness:
    """Sees every pseudo-gradient that local workers send, and keeps those that it is to measure.

    It changes nothing: a run with it has the same outer parameters bit for bit.

    Args:
        workers: all of the run.
        every: inner steps; a fragment is measured where its round has a multiple of them.
    """

    def __init__(self, workers: Sequence[Worker], *, every: int) -> None:
        self._workers, self._every = workers, every
        self._step = 0
        self._seen: list[dict[int, Tensor]] = [{} for _ in workers]
        self._found: dict[str, float] = {}
        for place, worker in enumerate(workers):
            worker.outer.watch(lambda index, delta, place=place: self._see(place, index, delta))

    def at(self, step: int) -> None:
        """What is sent from now on is sent after inner step `step`."""
        self._step = step

    def measure(self) -> None:
        """Measure what was seen; called once it is sent."""
        for index in sorted(self._seen[0]):
            self._found |= self._statistics(index)
        self._seen = [{} for _ in self._workers]

    def take(self) -> dict[str, float]:
        """What was measured since the last call, as fields of a record.

        `pseudo_gradient_norm/P`, `cosine/P` and `feedback_norm/P` of fragment P: means over the
        workers, and over their pairs.
        """
        found, self._found = self._found, {}
        return found

    def _see(self, place: int, index: int, delta: Tensor) -> None:
        # From the step alone, so that a resumed run looks where the other would have.
        begun = self._step - self._workers[0].config.method.sync_every
        if self._step // self._every > begun // self._every:
            self._seen[place][index] = delta.clone()

    @torch.no_grad()
    def _statistics(self, index: int) -> dict[str, float]:
        deltas = [seen[index] for seen in self._seen]
        found = {f"pseudo_gradient_norm/{index}": mean_norm(deltas)}
        cosine = mean_cosine(deltas)
        if cosine is not None:
            found[f"cosine/{index}"] = cosine
        held = [self._own_feedback(worker, index) for worker in self._workers]
        if held[0]:
            found[f"feedback_norm/{index}"] = sum(map(norm, held)) / len(held)
        return found

    def _own_feedback(self, worker: Worker, index: int) -> list[Tensor]:
        """Of what the worker sent; the owner of a shard has another, of what it passes on."""
        feedback = worker.outer.unsent_feedback()[index]
        return [value for key, value in feedback.items() if not key.startswith("owner.")]


def witness_of(workers: Sequence[Worker], *, every: int) -> Witness | None:
    """Who looks at what all of a run's workers send; None: nobody is to, or one agrees with none.

    Args:
        workers: all of the run, in this process.
        every: inner steps between two looks; 0 looks never.
    """
    return Witness(workers, every=every) if every and len(workers) > 1 else None
