"""The server of an asynchronous run, as a state without a network."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.asynchronous.assignment import (
    Assignment,
    AsyncOptions,
    AsyncStats,
    Receipt,
    RunFinished,
    TryLater,
    dynamic_steps,
)
from thinwire.asynchronous.model_vector import ModelVector
from thinwire.blocks import StreamedVector
from thinwire.checksums import anchor_digest
from thinwire.errors import CheckpointError, ExchangeError, check
from thinwire.exchange.message import Origin, read_origin
from thinwire.handshake import check_same, digest
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.rejection import Rejection, RejectReason
from thinwire.storage import choose_storage

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """An assignment that was not answered yet.

    Args:
        round: number of its exchange.
        anchor: digest of the theta that it starts from.
        steps: of it.
        since_s: when it was given.
    """

    round: int
    anchor: bytes
    steps: int
    since_s: float


class AsyncServer:
    """Holds theta and the outer optimizer, hands out theta, and steps once for every arrival.

        on arrival of g from worker w:  theta = OuterOpt(theta, g)
        worker w fetches theta and takes H_w inner steps:  g = theta_start - theta_w

    It reads no clock and knows no network: `now_s` is an argument, of any clock that does not go
    back. What is damaged, not finite, or started from a theta that this server did not give to its
    sender is refused by name and leaves no trace but a count.

    Args:
        model: theta to begin with; afterwards it holds theta.
        method: as the workers have it; `outer` steps for every arrival.
        workers: K, whose numbers are 0 to K-1.
        total_steps: inner steps of all workers together, after which the run is finished; None for
            a run without an end.
        options: how workers of different speeds are treated.
        facts: what else workers must have in common with it, such as the data, as texts.
        outer_device: where theta and the outer optimizer rest between arrivals; "cpu" is the host's
            memory, None the model's device.

    Attributes:
        message_nbytes: of a worker's message.
        restart_s: when workers whose answers have arrived may start again; minus infinity before
            any.

    Raises:
        ConfigurationError: a number is out of range, or the method cannot be run asynchronously.

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
        for name, value in (("workers", workers), ("total_steps", total_steps)):
            check(
                value is None or value >= 1,
                f"serve a run with {name}={value}",
                because="it is a number from 1",
                do=f"pass {name} >= 1",
            )
        self.model, self.method, self.workers = model, method, workers
        self.options = AsyncOptions() if options is None else options
        self.total_steps, self._facts = total_steps, dict(facts or {})
        self._live = LiveWeights(model, [])
        storage = choose_storage(outer_device, self._live.device)
        self._vector = ModelVector(method, self._live, storage)
        self.message_nbytes = self._vector.delta_nbytes
        self._outer = self._vector.outer_state(workers)
        self.version = self.steps_done = 0
        self._given: dict[int, _Given] = {}
        self._last: dict[int, Origin] = {}
        self._speeds: dict[int, float] = {}
        self.restart_s = -math.inf
        self._staleness: Counter[int] = Counter()
        self._steps_of: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()
        self._repeated = self._received_bytes = self._sent_bytes = 0
        self._prepare_theta()

    # -- who takes part ----------------------------------------------------------------------------

    def check_worker(self, worker: int, description: Mapping[str, str]) -> None:
        """Refuse a worker that is not of this run.

        Args:
            worker: its number.
            description: what `AsyncWorker.describe` returned there.

        Raises:
            MismatchError: it has another model, method or version; names the field and both values.
            ConfigurationError: there is no worker of that number.
        """
        self._check_number(worker)
        check_same(
            self.describe(),
            description,
            cannot=f"let worker {worker} take part",
            whose="the server",
            do="start server and workers from the same script, arguments and thinwire version",
        )

    def describe(self) -> dict[str, str]:
        """All that server and workers must have in common, as one text per field."""
        return self._facts | self._vector.describe()

    def _check_number(self, worker: int) -> None:
        check(
            0 <= worker < self.workers,
            f"take part as worker {worker}",
            because=f"the run has {self.workers} workers, counted from 0",
            do=f"pass a number from 0 to {self.workers - 1}",
        )

    # -- handing out theta -------------------------------------------------------------------------

    def assign(
        self, worker: int, *, now_s: float, speed: float | None = None
    ) -> Assignment | TryLater | RunFinished:
        """What worker `worker`, which has nothing to do, is to do next.

        An assignment that it had not answered is void: a worker that was restarted goes on from the
        present theta.

        Args:
            worker: its number.
            now_s: the time.
            speed: its inner steps a second, if it is known.

        Raises:
            ConfigurationError: there is no such worker, or the speed is not above 0.
        """
        self._check_number(worker)
        if speed is not None:
            self.note_speed(worker, speed)
        if self.is_finished:
            return RunFinished()
        if now_s < self.restart_s:
            return TryLater(self.restart_s - now_s)
        self._given.pop(worker, None)
        steps = self.method.sync_every
        if self.options.dynamic_steps and worker in self._speeds:
            steps = dynamic_steps(steps, self._speeds[worker], max(self._speeds.values()))
        if self.total_steps is not None:
            oldest_s = now_s - self.options.lost_after_s
            under_way = sum(g.steps for g in self._given.values() if g.since_s >= oldest_s)
            steps = min(steps, self.total_steps - self.steps_done - under_way)
        if steps < 1:
            return TryLater(_POLL_S)
        round = self.version + 1
        self._given[worker] = _Given(round=round, anchor=self._anchor, steps=steps, since_s=now_s)
        self._sent_bytes += len(self._message)
        return Assignment(
            message=self._message,
            round=round,
            anchor=self._anchor,
            steps=steps,
            steps_done=self.steps_done,
        )

    def note_speed(self, worker: int, speed: float) -> None:
        """Take worker `worker` for one of `speed` inner steps a second from now on."""
        check(
            0.0 < speed < math.inf,
            f"take part with {speed} inner steps a second",
            because="shares of the fastest worker's steps are computed from it",
            do="pass a finite speed above 0",
        )
        self._speeds[worker] = speed

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run are in theta."""
        return self.total_steps is not None and self.steps_done >= self.total_steps

    # -- arrivals ----------------------------------------------------------------------------------

    def receive(self, message: Tensor, *, now_s: float) -> Receipt:
        """Take the outer step of a worker's pseudo-gradient, or refuse it; nothing is raised.

        Args:
            message: uint8, as `AsyncWorker.finish` made it.
            now_s: the time.
        """
        self._received_bytes += message.numel()
        try:
            origin = read_origin(message)
        except ExchangeError as error:
            return self._refuse(Rejection(reason=RejectReason.DAMAGED, detail=error.because))
        if self._last.get(origin.sender) == origin:
            # Its worker did not hear that it had arrived.
            self._repeated += 1
            return Receipt(is_repeated=True)
        given = self._given.get(origin.sender)
        if given is None or (given.round, given.anchor) != (origin.round, origin.anchor):
            detail = (
                f"worker {origin.sender} started exchange {origin.round} from outer parameters "
                f"with digest {origin.anchor.hex()}, which this server did not give to it, or not "
                "last"
            )
            return self._refuse(Rejection(reason=RejectReason.DRIFTED, detail=detail))
        opened = self._vector.open_delta(message, origin)
        if isinstance(opened, Rejection):
            return self._refuse(opened)
        return self._apply(opened, origin, given.steps, now_s)

    def _refuse(self, rejection: Rejection) -> Receipt:
        self._refused[rejection.reason.name] += 1
        return Receipt(rejection=rejection)

    def _apply(self, g: StreamedVector, origin: Origin, steps: int, now_s: float) -> Receipt:
        staleness = self.version - (origin.round - 1)
        self._outer.apply(g)
        self.version += 1
        self.steps_done += steps
        self._steps_of[origin.sender] += steps
        self._staleness[staleness] += 1
        del self._given[origin.sender]
        self._last[origin.sender] = origin
        self._prepare_theta()
        if now_s > self.restart_s:
            self.restart_s = now_s + self.options.grace_s
        if not self._given:  # all workers have answered: no other is waited for
            self.restart_s = min(self.restart_s, now_s)
        return Receipt(staleness=staleness)

    def _prepare_theta(self) -> None:
        flat = self._outer.flat_anchor()
        self._anchor = anchor_digest(flat)
        self._message = self._vector.seal_anchor(flat, round=self.version + 1, anchor=self._anchor)

    # -- results -----------------------------------------------------------------------------------

    @property
    def stats(self) -> AsyncStats:
        """Arrivals, staleness, refusals and bytes so far."""
        return AsyncStats(
            arrivals=self.version,
            steps_done=self.steps_done,
            steps_of=dict(sorted(self._steps_of.items())),
            staleness_counts=dict(sorted(self._staleness.items())),
            refused=dict(sorted(self._refused.items())),
            repeated=self._repeated,
            received_bytes=self._received_bytes,
            sent_bytes=self._sent_bytes,
        )

    def anchor(self) -> dict[str, Tensor]:
        """Theta, fp32, by the names of the parameters; it shares memory until the next arrival."""
        return self._live.unflatten(self._vector.names, self._outer.flat_anchor())

    def digest(self) -> str:
        """SHA-256 of theta."""
        return digest(self.anchor())

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor` and `outer state`."""
        return self._outer.memory()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on bit for bit: plain tensors, numbers and texts.

        The tensors share memory with the server: save them before the next arrival.
        """
        return {
            "run": self.describe(),
            "outer": self._outer.state_dict(),
            "version": self.version,
            "steps_done": self.steps_done,
            "given": {w: (g.round, g.anchor.hex(), g.steps) for w, g in self._given.items()},
            "last": {w: (origin.round, origin.anchor.hex()) for w, origin in self._last.items()},
            "speeds": dict(self._speeds),
            "window_end_s": self.restart_s,
            "counts": {
                "staleness": dict(self._staleness),
                "steps_of": dict(self._steps_of),
                "refused": dict(self._refused),
                "repeated": self._repeated,
                "received_bytes": self._received_bytes,
                "sent_bytes": self._sent_bytes,
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, now_s: float | None = None) -> None:
        """Continue from `state`.

        What workers were given before still counts when it arrives. What they were given after
        `state` was saved is refused, for this server does not know it; they fetch theta and go on.

        Args:
            state: of a server of the same run.
            now_s: the time, where the clock is another one than that of `state`, such as that of
                another process.

        Raises:
            MismatchError: it is of another run. CheckpointError: it is no state of a server.
        """
        check(
            "given" in state,
            "load the state of an asynchronous server",
            because=f"it has {sorted(state)}",
            do="pass what AsyncServer.state_dict() returned",
            kind=CheckpointError,
        )
        check_same(
            state["run"],
            self.describe(),
            cannot="load this checkpoint",
            whose="the checkpoint",
            do="resume with the model and method that wrote it",
        )
        self._outer.load_state_dict(state["outer"])
        self._outer.reset_live(None)
        self.version, self.steps_done = int(state["version"]), int(state["steps_done"])
        since_s = -math.inf if now_s is None else now_s
        self._given = {
            w: _Given(round=round, anchor=bytes.fromhex(anchor), steps=steps, since_s=since_s)
            for w, (round, anchor, steps) in state["given"].items()
        }
        self._last = {
            w: Origin(sender=w, round=round, anchor=bytes.fromhex(anchor))
            for w, (round, anchor) in state["last"].items()
        }
        self._speeds = dict(state["speeds"])
        self.restart_s = float(state["window_end_s"]) if now_s is None else now_s
        counts = state["counts"]
        self._staleness = Counter(counts["staleness"])
        self._steps_of = Counter(counts["steps_of"])
        self._refused = Counter(counts["refused"])
        self._repeated = int(counts["repeated"])
        self._received_bytes = int(counts["received_bytes"])
        self._sent_bytes = int(counts["sent_bytes"])
        self._prepare_theta()
