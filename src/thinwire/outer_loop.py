"""The one loop: what is due is sent, what has arrived is applied. It never asks for the method."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from thinwire.agreement import (
    check_cards,
    check_same,
    digest,
    flatten_description,
    make_card,
)
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.feedback import FeedbackState
from thinwire.fragments import Fragment
from thinwire.method import Method
from thinwire.outer import OuterState
from thinwire.replica import Replica
from thinwire.transport import Distributed, Label, Metered, Pending, Traffic, Transport
from thinwire.version import __version__

__all__ = ["OuterLoop", "Stats"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a worker's outer loop has done so far.

    Args:
        rounds: exchanges applied, each fragment's counted.
        sent_bytes: payload bytes handed to the transport, metadata included.
        received_bytes: payload bytes that came from other workers.
        peak_sent_bytes_per_step: the most sent after any one inner step.
        wait_s: seconds spent waiting for exchanges.
        overlapped_s: seconds exchanges travelled before anybody waited for them.
    """

    rounds: int
    sent_bytes: int
    received_bytes: int
    peak_sent_bytes_per_step: int
    wait_s: float
    overlapped_s: float


@final
class _Track:
    """One fragment's state on this worker."""

    def __init__(self, fragment: Fragment, outer: OuterState, feedback: FeedbackState) -> None:
        self.fragment, self.outer, self.feedback = fragment, outer, feedback
        self.sent_at_step = 0
        self.pending: Pending | None = None


@final
class OuterLoop:
    """Connects a worker's training loop to those of the others.

    Call `step()` after every inner step, or use the loop as a context manager: it then follows the
    (last) optimizer by itself and sends what is left over at the end.

    Args:
        model: the worker's model; all workers start from the same weights.
        optimizer: what steps it, or a list of optimizers, stepped in that order.
        method: the description of what happens.
        transport: the connection; default `Distributed()`, which is a world of one in plain python.

    Raises:
        MismatchError: the workers differ in method, parameters, weights or world.
        ConfigurationError: the model or the optimizer does not fit the method.

    >>> import thinwire as tw
    >>> model = nn.Linear(2, 1)
    >>> method = tw.presets.diloco(sync_every=2)
    >>> with OuterLoop(model, method.inner.build(model), method) as outer:
    ...     pass
    >>> outer.stats.rounds
    0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        *,
        transport: Transport | None = None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self.method = method
        self._replica = Replica(model, optimizers)
        self._transport = Metered(Distributed() if transport is None else transport)
        self._step = self._rounds = self._peak_sent_bytes = 0
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._busy = self._closed = False
        self._tracks = [self._track(fragment) for fragment in self._plan()]
        try:
            check_cards(self._transport.introduce(make_card(self._card(), self._anchors())))
        except BaseException:
            self.close()
            raise

    # -- a round -----------------------------------------------------------------------------------

    def step(self) -> None:
        """`begin()` and `finish()`: call it after every inner step.

        Raises:
            ConfigurationError: the loop follows an optimizer and does this by itself.
        """
        if self._hook is not None and not self._busy:
            raise ConfigurationError(
                "step an outer loop that follows its optimizer",
                because="the inner step would count twice",
                do="leave out either outer.step() or the with block",
            )
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Count an inner step and send every fragment that is due.

        Raises:
            NonFiniteError: something to be sent is not finite; names parameter and step.
        """
        self._step += 1
        due = (t for t in self._tracks if self._is_due(t.fragment))
        self._send_all(list(due))

    def begin_last(self) -> None:
        """Send every fragment that was trained since it was last sent, due or not."""
        self._send_all([t for t in self._tracks if t.sent_at_step < self._step])

    def finish(self) -> None:
        """Apply what was sent: wait for all workers' payloads and take the outer step.

        Raises:
            ExchangeError: a peer died or stayed silent; names what was being exchanged.
        """
        for track in self._tracks:
            if track.pending is not None:
                pending, track.pending = track.pending, None
                self._apply(track, pending)

    def flush(self) -> None:
        """`begin_last()` and `finish()`: call it after the last inner step."""
        self.begin_last()
        self.finish()

    @torch.no_grad()
    def _send_all(self, tracks: list[_Track]) -> None:
        before = self._transport.traffic.sent_bytes
        for track in tracks:
            self._send(track)
        sent_bytes = self._transport.traffic.sent_bytes - before
        self._peak_sent_bytes = max(self._peak_sent_bytes, sent_bytes)

    def _send(self, track: _Track) -> None:
        if track.pending is not None:
            raise ConfigurationError(
                f"send {_name(track.fragment)} again at inner step {self._step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        self._replica.check_unchanged()
        names, codec = track.fragment.names, self.method.codec
        delta = track.outer.collect()
        self._replica.check_finite(
            names, delta, what="pseudo-gradient", when=f"inner step {self._step}"
        )
        wanted = track.feedback.add(delta)
        payload = codec.encode(wanted)
        track.feedback.settle(wanted, codec.decode(payload, wanted.numel()))
        label = Label(what=_name(track.fragment), round=self._rounds + 1)
        track.pending = self._transport.start(payload, label)
        track.sent_at_step = self._step

    def _apply(self, track: _Track, pending: Pending) -> None:
        numel = self._replica.numel(track.fragment.names)
        payloads = pending.wait()
        with torch.no_grad():
            decoded = (
                self.method.codec.decode(p, numel).to(self._replica.device) for p in payloads
            )
            mean = self.method.aggregate.combine(decoded, workers=len(payloads))
        track.outer.apply(mean)
        self._rounds += 1

    def _is_due(self, fragment: Fragment) -> bool:
        return fragment.is_due(step=self._step, sync_every=self.method.sync_every)

    # -- results -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Rounds, bytes and seconds so far."""
        traffic = self._transport.traffic
        return Stats(
            rounds=self._rounds,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            peak_sent_bytes_per_step=self._peak_sent_bytes,
            wait_s=traffic.wait_s,
            overlapped_s=traffic.overlapped_s,
        )

    def anchor(self) -> dict[str, Tensor]:
        """The outer parameters as a state dict of the model (fp32; buffers are this worker's).

        The tensors share memory with the loop's state until the next round: copy them to keep them.
        """
        live: dict[str, Tensor] = self._replica.model.state_dict(keep_vars=True)
        by_identity = {id(self._replica.parameters[n]): v for n, v in self._anchors().items()}
        return {name: by_identity.get(id(value), value.detach()) for name, value in live.items()}

    def digest(self) -> str:
        """SHA-256 of the outer parameters: equal on all workers after every round."""
        return digest(self._anchors())

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Hold the outer parameters in the model for an evaluation, then the live weights again."""
        with self._replica.holding(self._anchors()):
            yield

    def _anchors(self) -> dict[str, Tensor]:
        return {name: v for track in self._tracks for name, v in track.outer.anchor().items()}

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume bit for bit besides model and optimizer: plain tensors and numbers.

        Raises:
            CheckpointError: between `begin()` and `finish()`.
        """
        if any(track.pending is not None for track in self._tracks):
            raise CheckpointError(
                "save the outer loop between begin() and finish()",
                because="what is in flight would be lost",
                do="save after finish()",
            )
        return {
            "run": self._comparable(),
            "step": self._step,
            "rounds": self._rounds,
            "peak_sent_bytes": self._peak_sent_bytes,
            "traffic": asdict(self._transport.traffic),
            "fragments": [self._track_state(track) for track in self._tracks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a loop over the same model, method and world.

        Raises:
            MismatchError: it is from another one; names the field and both values.
        """
        if "run" not in state:
            raise CheckpointError(
                "load this state",
                because=f"it has {sorted(state)}, not the keys of an outer loop",
                do="pass what state_dict() of an OuterLoop returned",
            )
        check_same(
            state["run"],
            self._comparable(),
            cannot="load this checkpoint",
            whose="the checkpoint",
            do="resume with the model, method and workers that wrote it",
        )
        self._step, self._rounds = int(state["step"]), int(state["rounds"])
        self._peak_sent_bytes = int(state["peak_sent_bytes"])
        self._transport.traffic = Traffic(**state["traffic"])
        for track, saved in zip(self._tracks, state["fragments"], strict=True):
            track.outer.load_state_dict(saved["outer"])
            track.feedback.load_state_dict(saved["feedback"])
            track.sent_at_step = int(saved["sent_at_step"])

    def _track_state(self, track: _Track) -> dict[str, Any]:
        return {
            "outer": track.outer.state_dict(),
            "feedback": track.feedback.state_dict(),
            "sent_at_step": track.sent_at_step,
        }

    # -- following an optimizer --------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._replica.optimizers:
            raise ConfigurationError(
                "follow an optimizer",
                because="this loop was given none",
                do="pass the optimizer to OuterLoop, or call outer.step() yourself",
            )
        if self._closed:
            raise ConfigurationError(
                "enter an outer loop again",
                because="leaving it gave the optimizers back",
                do="build a new OuterLoop; load_state_dict() carries its state over",
            )
        last = self._replica.optimizers[-1]
        self._hook = last.register_step_post_hook(lambda *_: self._follow())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if kind is None:
            self.flush()
        self.close()

    def close(self) -> None:
        """Give the optimizers back as they were: `step()` of this loop must not be called again."""
        self._closed = True
        for track in self._tracks:
            track.outer.close()

    def _follow(self) -> None:
        # The outer step may itself step the optimizer, which must not start another round.
        if self._busy:
            return
        self._busy = True
        try:
            self.step()
        finally:
            self._busy = False

    # -- construction ------------------------------------------------------------------------------

    def _plan(self) -> tuple[Fragment, ...]:
        names = tuple(self._replica.parameters)
        return self.method.fragments.plan(names, sync_every=self.method.sync_every)

    def _track(self, fragment: Fragment) -> _Track:
        workers = self._transport.world_size
        outer = self.method.outer.bind(self._replica, fragment.names, workers=workers)
        return _Track(fragment, outer, self.method.feedback.bind())

    def _card(self) -> dict[str, str]:
        return self._comparable() | {"thinwire version": __version__}

    def _comparable(self) -> dict[str, str]:
        shapes = {name: list(shape) for name, shape in self._replica.shapes().items()}
        return flatten_description(
            {
                "method": self.method.describe(),
                "workers": self._transport.world_size,
                "parameters": {name: str(shape) for name, shape in shapes.items()},
            }
        )


def _name(fragment: Fragment) -> str:
    count = len(fragment.names)
    return f"fragment {fragment.index} ({count} parameters from {fragment.names[0]!r})"
