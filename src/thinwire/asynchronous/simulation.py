"""A server and its workers in one process, by a virtual clock: workers have speeds."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.asynchronous.assignment import Assignment, TryLater
from thinwire.asynchronous.server import AsyncServer
from thinwire.asynchronous.worker import AsyncWorker
from thinwire.errors import check


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpeeds:
    """How fast simulated workers compute, and how long their messages travel.

    Args:
        steps_per_s: v_w, virtual inner steps a second, one for each worker.
        latency_s: of a message, one way.
        rate_bits_per_s: of each worker's link to the server, both ways; it shares it with no other.

    Raises:
        ConfigurationError: a speed or a rate is not above 0, or the latency is negative.

    >>> WorkerSpeeds(steps_per_s=(2.0, 1.0)).synchronous_round_s(10)
    10.0
    """

    steps_per_s: tuple[float, ...]
    latency_s: float = 0.0
    rate_bits_per_s: float = math.inf

    def __post_init__(self) -> None:
        speeds_fit = bool(self.steps_per_s) and all(0 < v < math.inf for v in self.steps_per_s)
        check(
            speeds_fit and self.rate_bits_per_s > 0 and 0 <= self.latency_s < math.inf,
            f"simulate workers with {self}",
            because="speeds and rates are above 0, and a latency is not negative",
            do="pass one speed for each worker",
        )

    def compute_s(self, worker: int, steps: int) -> float:
        """Virtual seconds in which worker `worker` takes `steps` inner steps."""
        return steps / self.steps_per_s[worker]

    def transfer_s(self, nbytes: int) -> float:
        """Virtual seconds in which a message of `nbytes` travels one way."""
        return self.latency_s + 8 * nbytes / self.rate_bits_per_s

    def synchronous_round_s(self, sync_every: int, *, sent: int = 0, received: int = 0) -> float:
        """A round of synchronous training at these speeds: all wait for the slowest worker.

            max_w H / v_w, and the time of one message out and one in

        Args:
            sync_every: H.
            sent: bytes that a worker sends in a round.
            received: bytes that a worker receives in a round.
        """
        compute_s = max(self.compute_s(w, sync_every) for w in range(len(self.steps_per_s)))
        return compute_s + self.transfer_s(sent) + self.transfer_s(received)


class Simulation:
    """Runs a server and its workers by a virtual clock, event by event.

    Worker w fetches theta, takes H_w steps in H_w / v_w virtual seconds, and its message arrives;
    arrivals at the same moment are applied in rank order. All that is computed is computed really,
    one task after the other, so runs are deterministic.

    Args:
        server: of the run; its `total_steps` ends it.
        workers: all K, in rank order.
        speeds: of the workers.
        train: takes `assignment.steps` inner steps of worker `rank`, called with both.

    Raises:
        ConfigurationError: there are not as many workers and speeds as the server has workers.
    """

    def __init__(
        self,
        server: AsyncServer,
        workers: Sequence[AsyncWorker],
        speeds: WorkerSpeeds,
        train: Callable[[int, Assignment], None],
    ) -> None:
        counts = len(workers), len(speeds.steps_per_s)
        check(
            set(counts) == {server.workers},
            f"simulate a server of {server.workers} workers",
            because=f"there are {counts[0]} workers and {counts[1]} speeds",
            do="pass as many of each",
        )
        self.server, self._workers, self._speeds = server, list(workers), speeds
        # Before the first assignment, which would else not know who is fastest.
        for rank, speed in enumerate(speeds.steps_per_s):
            server.note_speed(rank, speed)
        self._train, self.now_s = train, 0.0
        # What is computed already and arrives later: the earliest first, of equals the lowest rank.
        self._travelling: list[tuple[float, int, Tensor]] = []
        self._idle = list(range(server.workers))

    def advance(self) -> list[int]:
        """Go on to the next arrival, and to those within the server's grace of it.

        Returns:
            the ranks of workers whose messages were applied, in that order; [] at the end.
        """
        self._assign_idle()
        if not self._travelling:
            return []
        arrived = [self._arrive()]
        while self._travelling and self._travelling[0][0] <= self.server.restart_s:
            arrived.append(self._arrive())
        self.now_s = max(self.now_s, self.server.restart_s)
        self._idle = sorted({*self._idle, *arrived})
        return arrived

    def _arrive(self) -> int:
        self.now_s, rank, message = heapq.heappop(self._travelling)
        self._workers[rank].settle(self.server.receive(message, now_s=self.now_s))
        return rank

    def _assign_idle(self) -> None:
        waiting: list[int] = []
        for rank in self._idle:
            given = self.server.assign(rank, now_s=self.now_s)
            if isinstance(given, Assignment):
                self._begin(rank, given)
            elif isinstance(given, TryLater):
                # All steps are under way: those of one that is refused would be given out again.
                waiting.append(rank)
        self._idle = waiting

    def _begin(self, rank: int, assignment: Assignment) -> None:
        worker = self._workers[rank]
        worker.start(assignment)
        self._train(rank, assignment)
        message = worker.finish()
        arrives_s = (
            self.now_s
            + self._speeds.transfer_s(assignment.message.numel())
            + self._speeds.compute_s(rank, assignment.steps)
            + self._speeds.transfer_s(message.numel())
        )
        heapq.heappush(self._travelling, (arrives_s, rank, message))

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The clock and what travels; server, workers and what they train are saved beside it."""
        return {
            "now_s": self.now_s,
            "travelling": sorted(self._travelling, key=lambda event: event[:2]),
            "idle": list(self._idle),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with server and workers as they were."""
        self.now_s = float(state["now_s"])
        self._travelling = [(at_s, rank, message) for at_s, rank, message in state["travelling"]]
        heapq.heapify(self._travelling)
        self._idle = list(state["idle"])
