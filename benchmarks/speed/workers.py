"""Workers whose training is noise, so that only the round itself costs time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from speed.measuring import peak_temporary_nbytes
from thinwire import Method, OuterLoop
from thinwire.transport import in_process
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
    Transport,
    WrappedTransport,
    wrapped,
)

T = TypeVar("T")

_PARTS = 1021  # beginnings of the noise


def train_on_noise(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    """One step of `optimizer` on gradients that need no data: parts of the same noise.

    Args:
        model: gets the gradients.
        optimizer: optimizer of the model.
        seed: selects the part of the noise.
    """
    parameters = list(model.parameters())
    noise = _noise(max(p.numel() for p in parameters), parameters[0].dtype)
    start = 37 * seed % _PARTS
    for p in parameters:
        # A copy, because with ddp the mean overwrites it.
        p.grad = noise[start : start + p.numel()].view_as(p).to(p.device, copy=True)
    optimizer.step()


@cache
def _noise(numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 20, generator=generator).mul_(1e-3)
    return noise.repeat(-(-(numel + _PARTS) // len(noise))).to(dtype)


class Rounds(ABC):
    """K workers in this process, one after the other in each half of a round.

    Args:
        models: one equal model for each worker.
    """

    name: str

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
        self._steps = 0

    def train(self) -> None:
        """One inner step of every worker."""
        self._steps += 1
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_on_noise(model, optimizer, seed=len(self.models) * self._steps + rank)

    @abstractmethod
    def begin(self) -> None:
        """The first half of the round, for all workers."""

    @abstractmethod
    def finish(self) -> None:
        """The second half of the round, for all workers."""

    def parameters(self) -> list[Tensor]:
        """Live weights of the first worker."""
        return [p.detach() for p in self.models[0].parameters()]


class LoopRounds(Rounds):
    """Rounds of `OuterLoop`.

    Args:
        build: makes the same model at each call.
        method: method of all workers.
        count: K.
    """

    def __init__(self, build: Callable[[], nn.Module], method: Method, count: int) -> None:
        super().__init__([build() for _ in range(count)])
        self.name = method.name
        parts = zip(self.models, self.optimizers, in_process(count), strict=True)
        self.loops = [
            OuterLoop(model, optimizer, method, transport=end) for model, optimizer, end in parts
        ]

    def begin(self) -> None:
        """Every worker sends."""
        for loop in self.loops:
            loop.begin()

    def finish(self) -> None:
        """Every worker applies the mean."""
        for loop in self.loops:
            loop.finish()


# -- one worker alone ------------------------------------------------------------------------------


class ObservedWorker:
    """The first of K workers, alone: it gets what the others sent in a recorded twin round.

    If all workers share a process, one thread carries the whole round, and the work of one worker
    cannot be told from that of the others.

    Args:
        build: makes the same model at each call.
        method: method of all workers.
        count: K.
        prepare: called with this worker's model, before its optimizer and loop are built.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        method: Method,
        count: int,
        *,
        prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        answers: list[list[Received]] = []
        first, *others = in_process(count)
        self._models = [build() for _ in range(count)]
        self.model = prepare(build())
        models = [*self._models, self.model]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        ends = [_Noting(first, answers), *others, _Replayed(answers, count)]
        *self.twins, self.loop = [
            OuterLoop(model, optimizer, method, transport=end)
            for model, optimizer, end in zip(models, self._optimizers, ends, strict=True)
        ]
        self._steps = 0

    def train(self) -> None:
        """One inner step of this worker, and one of the twins with their round."""
        self._steps += 1
        seeds = range(len(self.twins) * self._steps, len(self.twins) * (self._steps + 1))
        models = [*self._models, self.model]
        for model, optimizer, seed in zip(
            models, self._optimizers, [*seeds, seeds[0]], strict=True
        ):
            train_on_noise(model, optimizer, seed=seed)
        for twin in self.twins:
            twin.begin()
        for twin in self.twins:
            twin.finish()

    def temporaries(self, half: Callable[[], None]) -> int:
        """Peak bytes of `half` of a round (the loop's `begin` or `finish`), less what it sends."""
        before = self.loop.stats.sent_bytes
        _, nbytes = peak_temporary_nbytes(half)
        return nbytes - (self.loop.stats.sent_bytes - before)


class _Noting(WrappedTransport):
    """Records the answers to its exchanges."""

    def __init__(self, inner: Transport, answers: list[list[Received]]) -> None:
        super().__init__(inner)
        self._answers = answers

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        answers: list[Received] = []
        self._answers.append(answers)

        def carry(post: Post) -> Generator[Post, Received, Received]:
            answers.append((yield post))
            return answers[-1]

        return self._inner.run(wrapped(posts, carry), tag)


class _Replayed(Transport):
    """Rank 0 of a world with recorded answers: the n-th exchange gets those of the n-th list."""

    def __init__(self, answers: list[list[Received]], workers: int) -> None:
        self._answers, self._workers, self._next = answers, workers, 0

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self._workers

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        del tag
        return {0: card}

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        del tag
        number, self._next = self._next, self._next + 1
        return _ReplayedRound(RunningExchange(posts), self._answers[number])


class _ReplayedRound(Round[T]):
    def __init__(self, running: RunningExchange[T], answers: list[Received]) -> None:
        self._running, self._answers = running, answers

    def wait(self) -> T:
        for answer in self._answers:
            self._running.answer(answer)
        return self._running.wait()
