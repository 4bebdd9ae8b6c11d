"""A server and workers of given speeds in one process, by a virtual clock."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.asynchronous.assignment import Assignment
from thinwire.asynchronous.server import AsyncServer
from thinwire.asynchronous.worker import AsyncWorker
from thinwire.errors import check


class Simulation:
    """Runs a server and its workers by a virtual clock, event by event.

    Worker w fetches theta, takes H_w steps in H_w / v_w virtual seconds, and its message arrives at
    once; arrivals at the same moment are applied in rank order. All computation is real and runs
    one task after the other, so runs are deterministic.

    Args:
        server: the run's server; its `total_steps` ends the run.
        workers: all K workers, in rank order.
        speeds: v_w, virtual inner steps per second of each worker.
        train: called with a rank and an assignment; takes `assignment.steps` inner steps.

    Attributes:
        now_s: the virtual time.

    Raises:
        ConfigurationError: there are not K workers and speeds, or a speed is not above 0.
    """

    def __init__(
        self,
        server: AsyncServer,
        workers: Sequence[AsyncWorker],
        speeds: Sequence[float],
        train: Callable[[int, Assignment], None],
    ) -> None:
        check(
            len(workers) == len(speeds) == server.workers and all(0 < v < math.inf for v in speeds),
            f"simulate {len(workers)} of {server.workers} workers with speeds {list(speeds)}",
            because="each worker has a speed, which is a number above 0",
            do="pass one worker and one speed for each worker of the server",
        )
        self.server, self._workers, self._speeds = server, workers, speeds
        # Before the first assignment, which must know the fastest worker.
        server.speeds |= dict(enumerate(speeds))
        self._train, self.now_s = train, 0.0
        # Messages computed already that arrive later: the earliest first, then the lowest rank.
        self._travelling: list[tuple[float, int, Tensor]] = []
        self._idle = list(range(server.workers))

    def advance(self) -> list[int]:
        """Advance to the next arrival, and to those within the server's grace period after it.

        Returns:
            Ranks of the workers whose messages arrived, in that order; [] at the end.
        """
        # While all steps are under way none are left to assign; refused ones are assigned again.
        self._idle = [rank for rank in self._idle if not self._begin(rank)]
        arrived: list[int] = []
        while self._travelling and (not arrived or self._travelling[0][0] <= self.server.restart_s):
            self.now_s, rank, message = heapq.heappop(self._travelling)
            self._workers[rank].settle(self.server.receive(message, now_s=self.now_s))
            arrived.append(rank)
        if arrived:
            self.now_s = max(self.now_s, self.server.restart_s)
        self._idle = sorted({*self._idle, *arrived})
        return arrived

    def _begin(self, rank: int) -> bool:
        """Let worker `rank` train its next assignment; returns whether there was one."""
        assignment, worker = self.server.assign(rank, now_s=self.now_s), self._workers[rank]
        if assignment is not None:
            worker.start(assignment, self.server.theta_message)
            self._train(rank, assignment)
            arrives_s = self.now_s + assignment.steps / self._speeds[rank]
            heapq.heappush(self._travelling, (arrives_s, rank, worker.finish()))
        return assignment is not None

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The clock and messages under way; save server, workers and what they train beside it."""
        return {"now_s": self.now_s, "travelling": self._travelling, "idle": self._idle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with server and workers as they were."""
        self.now_s, self._travelling = state["now_s"], list(state["travelling"])
        self._idle = list(state["idle"])
