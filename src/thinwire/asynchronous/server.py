"""The server of an asynchronous run, as a state without a network."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.asynchronous.assignment import Assignment, AsyncOptions, AsyncStats, dynamic_steps
from thinwire.asynchronous.model_vector import ModelVector
from thinwire.checksums import anchor_digest
from thinwire.errors import ExchangeError
from thinwire.exchange.message import read_origin
from thinwire.handshake import check_same_run, digest
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.rejection import Rejection, RejectReason
from thinwire.storage import choose_storage


class AsyncServer:
    """Holds theta and the outer optimizer, hands out theta, and steps once per arrival.

        on arrival of g from worker w:  theta = OuterOpt(theta, g)
        worker w fetches theta and takes H_w inner steps:  g = theta_start - theta_w

    It reads no clock and knows no network: `now_s` is an argument, of any clock that does not go
    back. A message that is damaged, not finite, or started from a theta that this server did not
    give to its sender is refused with a reason and leaves no trace but a count.

    Args:
        model: its weights are the first theta; afterwards it holds theta.
        method: the workers' method; `outer` steps once per arrival.
        workers: K; workers are numbered from 0 to K-1.
        total_steps: inner steps of all workers together, after which the run is finished; None for
            a run without an end.
        options: how workers of different speeds are treated.
        facts: what else the workers must share with it, such as the data, as texts.
        outer_device: where theta and the outer optimizer rest between arrivals; "cpu" is the host's
            memory, None the model's device.

    Attributes:
        message_nbytes: size of a worker's message.
        theta_message: theta as workers receive it: the bytes of its fp32 numbers, uint8.
        speeds: inner steps per second of each worker, where known; set by the caller.
        stats: arrivals, staleness, refusals and bytes so far.
        restart_s: when workers whose messages have arrived may start again; minus infinity before
            the first.

    Raises:
        ConfigurationError: the method cannot run asynchronously.

    Source: Asynchronous Local-SGD (arXiv 2401.09135).

    >>> import thinwire as tw
    >>> method = tw.presets.diloco(sync_every=2, outer=tw.outer.DelayedNesterov(every=1))
    >>> server = AsyncServer(nn.Linear(2, 1), method, workers=1)
    >>> server.assign(0, now_s=0.0).steps
    2
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        workers: int,
        total_steps: int | None = None,
        options: AsyncOptions | None = None,
        facts: Mapping[str, str] | None = None,
        outer_device: torch.device | str | None = None,
    ) -> None:
        self.model, self.method, self.workers = model, method, workers
        self.options, self.total_steps = options or AsyncOptions(), total_steps
        self._live = LiveWeights(model, [])
        storage = choose_storage(outer_device, self._live.device)
        self._vector = ModelVector(method, self._live, storage, facts or {})
        self.message_nbytes = self._vector.delta_nbytes
        self._outer = self._vector.outer_state(workers)
        self.stats = AsyncStats(steps_of=dict.fromkeys(range(workers), 0))
        # By worker: the assignment that it has not answered yet, and when it was given.
        self._given: dict[int, tuple[Assignment, float]] = {}
        self.speeds: dict[int, float] = {}
        self.restart_s = -math.inf
        self._prepare_theta()

    def describe(self) -> dict[str, str]:
        """All that server and workers must have in common, as one text per field."""
        return self._vector.describe()

    # -- handing out theta -------------------------------------------------------------------------

    def assign(self, worker: int, *, now_s: float) -> Assignment | None:
        """The next assignment of idle worker `worker`, which starts from `theta_message`.

        An assignment that the worker has not answered becomes void: a restarted worker goes on from
        the current theta.

        Returns:
            None if there is nothing to do, for now or because the run is finished.
        """
        if self.is_finished or now_s < self.restart_s:
            return None
        self._given.pop(worker, None)
        steps = self.method.sync_every
        if self.options.dynamic_steps and worker in self.speeds:
            steps = dynamic_steps(steps, self.speeds[worker], max(self.speeds.values()))
        if self.total_steps is not None:
            oldest_s = now_s - self.options.lost_after_s
            under_way = sum(a.steps for a, since_s in self._given.values() if since_s >= oldest_s)
            steps = min(steps, self.total_steps - self.stats.steps_done - under_way)
        if steps < 1:
            return None
        assignment = Assignment(self.version + 1, self._anchor, steps, self.stats.steps_done)
        self._given[worker] = assignment, now_s
        self.stats.sent_bytes += len(self.theta_message)
        return assignment

    @property
    def version(self) -> int:
        """Outer steps that theta has taken."""
        return self.stats.arrivals

    @property
    def versions_in_use(self) -> set[int]:
        """Versions of theta that unanswered assignments start from."""
        return {assignment.round - 1 for assignment, _ in self._given.values()}

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run are in theta."""
        return self.total_steps is not None and self.stats.steps_done >= self.total_steps

    # -- arrivals ----------------------------------------------------------------------------------

    def receive(self, message: Tensor, *, now_s: float) -> Rejection | None:
        """Take the outer step of a worker's pseudo-gradient, or refuse it; never raises.

        Args:
            message: uint8, as `AsyncWorker.finish` made it.
            now_s: the time.

        Returns:
            Why it was not applied; None if it was.
        """
        self.stats.received_bytes += message.numel()
        rejection = self._take(message, now_s)
        if rejection is not None:
            name = rejection.reason.name
            self.stats.refused[name] = self.stats.refused.get(name, 0) + 1
        return rejection

    def _take(self, message: Tensor, now_s: float) -> Rejection | None:
        try:
            origin = read_origin(message)
        except ExchangeError as error:
            return Rejection(reason=RejectReason.DAMAGED, detail=error.because)
        worker, (given, _) = origin.sender, self._given.get(origin.sender, (None, 0.0))
        if given is None or (given.round, given.anchor) != (origin.round, origin.anchor):
            detail = (
                f"worker {worker} started exchange {origin.round} from outer parameters with "
                f"digest {origin.anchor.hex()}, which this server did not give to it, or not last"
            )
            return Rejection(reason=RejectReason.DRIFTED, detail=detail)
        opened = self._vector.open_delta(message, origin)
        if isinstance(opened, Rejection):
            return opened
        self._outer.apply(opened)
        stats, staleness = self.stats, self.version + 1 - given.round
        stats.arrivals += 1
        stats.steps_done += given.steps
        stats.steps_of[worker] = stats.steps_of.get(worker, 0) + given.steps
        stats.staleness_counts[staleness] = stats.staleness_counts.get(staleness, 0) + 1
        del self._given[worker]
        self._prepare_theta()
        if now_s > self.restart_s:
            self.restart_s = now_s + self.options.grace_s
        if not self._given:  # all workers have answered, so there is none to wait for
            self.restart_s = min(self.restart_s, now_s)
        return None

    def _prepare_theta(self) -> None:
        flat = self._outer.flat_anchor()
        self._anchor = anchor_digest(flat)
        self.theta_message = flat.to("cpu", copy=True).view(torch.uint8)

    # -- results -----------------------------------------------------------------------------------

    def anchor(self) -> dict[str, Tensor]:
        """Theta, fp32, by the names of the parameters; it shares memory until the next arrival."""
        return self._live.unflatten(self._vector.names, self._outer.flat_anchor())

    def digest(self) -> str:
        """SHA-256 of theta."""
        return digest(self.anchor())

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: plain tensors, numbers and texts.

        The tensors share memory with the server: save them before the next arrival.
        """
        return {
            "run": self.describe(),
            "outer": self._outer.state_dict(),
            "stats": asdict(self.stats),
            "given": {w: (asdict(given), since_s) for w, (given, since_s) in self._given.items()},
            "speeds": dict(self.speeds),
            "restart_s": self.restart_s,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, now_s: float | None = None) -> None:
        """Continue from `state`.

        Answers to assignments in `state` still count when they arrive. Answers to later ones are
        refused, because this server does not know them; their workers fetch theta and go on.

        Args:
            state: state of a server of the same run.
            now_s: the time, if the clock is not the one that `state` was saved by, as in another
                process.

        Raises:
            MismatchError: `state` is from another run.
        """
        check_same_run(state["run"], self.describe())
        self._outer.load_state_dict(state["outer"])
        self._outer.reset_live(None)
        self.stats = AsyncStats(**state["stats"])
        self._given = {
            w: (Assignment(**given), since_s if now_s is None else now_s)
            for w, (given, since_s) in state["given"].items()
        }
        self.speeds = dict(state["speeds"])
        self.restart_s = state["restart_s"] if now_s is None else now_s
        self._prepare_theta()
