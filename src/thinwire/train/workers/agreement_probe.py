"""How far simulated workers agree: norms and cosines of pseudo-gradients, spread of anchors."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.train.workers.worker import Worker


def norm(parts: Iterable[Tensor]) -> float:
    """||x|| of a vector that lies in several parts, summed in fp64.

    Args:
        parts: of any shape; none have the norm 0.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    5.0
    """
    return sum(float(part.double().square().sum()) for part in parts) ** 0.5


def mean_norm(vectors: Sequence[Tensor]) -> float:
    """(1/K) sum_k ||d_k||.

    Args:
        vectors: d_k, K >= 1 of them.

    >>> mean_norm([torch.tensor([3.0, 4.0]), torch.zeros(2)])
    2.5
    """
    return sum(norm([vector]) for vector in vectors) / len(vectors)


def mean_cosine(vectors: Sequence[Tensor]) -> float | None:
    """The mean cosine between two different workers, from one sum instead of K (K - 1) / 2 pairs.

    (||sum_k d_k / ||d_k|| ||^2 - K) / (K (K - 1))

    Args:
        vectors: d_k, [n] each.

    Returns:
        None of fewer than two, or where one is zero or not finite and so has no direction.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    >>> round(mean_cosine(list(vectors)), 6)
    0.333333
    """
    workers, norms = len(vectors), [norm([vector]) for vector in vectors]
    if workers < 2 or not all(0 < length < float("inf") for length in norms):
        return None
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, length in zip(vectors, norms, strict=True):
        total += vector.double() / length
    pairs = workers * (workers - 1)
    return max(-1.0, min(1.0, (norm([total]) ** 2 - workers) / pairs))


def relative_spread(vectors: Sequence[Tensor]) -> float | None:
    """rms over workers and numbers of (x_k - mean x), over the rms of mean x.

    Args:
        vectors: x_k, [n] each, K >= 1 of them.

    Returns:
        None where the mean is zero or not finite.

    >>> relative_spread([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    0.5
    """
    mean = torch.stack(list(vectors)).double().mean(0)
    length = norm([mean])
    if not 0 < length < float("inf"):
        return None
    squares = sum(norm([vector.double() - mean]) ** 2 for vector in vectors)
    return (squares / len(vectors)) ** 0.5 / length


class AgreementProbe:
    """Measures how far pseudo-gradients agree, and anchors where every worker has its own.

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

    def set_step(self, step: int) -> None:
        """Note that what is sent from now on is sent after inner step `step`."""
        self._step = step

    def measure(self) -> None:
        """Measure what was sent since the last call."""
        for index in sorted(self._seen[0]):
            self._found |= self._statistics(index)
        self._seen = [{} for _ in self._workers]

    def take(self) -> dict[str, float]:
        """What was measured since the last call, as fields of a record.

        `pseudo_gradient_norm/P`, `cosine/P` and `feedback_norm/P` of fragment P: means over the
        workers, and over their pairs. `spread/P` where every worker has its own anchor: after the
        step in which the fragment was sent.
        """
        found, self._found = self._found, {}
        return found

    def _see(self, place: int, index: int, delta: Tensor) -> None:
        # Decided by the step alone, so that a resumed run measures the same rounds.
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
        if self._workers[0].config.method.outer.has_own_anchors:
            spread = relative_spread([w.outer.flat_anchors()[index] for w in self._workers])
            found |= {} if spread is None else {f"spread/{index}": spread}
        return found

    def _own_feedback(self, worker: Worker, index: int) -> list[Tensor]:
        """Feedback of what the worker sent, not of the mean it passes on as a shard's owner."""
        feedback = worker.outer.unsent_feedback()[index]
        return [value for key, value in feedback.items() if not key.startswith("owner.")]
