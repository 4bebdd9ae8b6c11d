"""The one loop: what is due is sent, what has arrived is applied. It never asks for the method."""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
from thinwire.exchange import InFlight, Place, Wiring
from thinwire.fragments import Fragment
from thinwire.layers import parts_of
from thinwire.layout import Layout, wire_order
from thinwire.message import anchor_digest
from thinwire.method import Method
from thinwire.optim import parameter_roles
from thinwire.replica import Replica, local_shard
from thinwire.stats import Stats
from thinwire.track import Track
from thinwire.transport import Distributed, Label, Metered, Traffic, Transport
from thinwire.version import __version__

__all__ = ["OuterLoop"]

_LOG = logging.getLogger(__name__)


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
        self._sent_before_bytes = 0
        self._left_out: dict[int, int] = {}
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
        self._send_all([t for t in self._tracks if self._is_due(t.fragment)])

    def begin_last(self) -> None:
        """Send every fragment that was trained since it was last sent, due or not."""
        self._send_all([t for t in self._tracks if t.sent_at_step < self._step])

    def finish(self) -> None:
        """Apply what was sent: wait for all workers' payloads and take the outer step.

        Raises:
            ExchangeError: a peer died or stayed silent, or sent what cannot be used.
            MismatchError: a peer's outer parameters are not this worker's.
        """
        for track in self._tracks:
            if track.in_flight is not None:
                in_flight, track.in_flight = track.in_flight, None
                self._apply(track, in_flight)
        self._note_peak()

    def flush(self) -> None:
        """`begin_last()` and `finish()`: call it after the last inner step."""
        self.begin_last()
        self.finish()

    @torch.no_grad()
    def _send_all(self, tracks: list[Track]) -> None:
        self._sent_before_bytes = self._transport.traffic.sent_bytes
        for track in tracks:
            self._send(track)
        self._note_peak()

    def _note_peak(self) -> None:
        sent_bytes = self._transport.traffic.sent_bytes - self._sent_before_bytes
        self._peak_sent_bytes = max(self._peak_sent_bytes, sent_bytes)

    def _send(self, track: Track) -> None:
        if track.in_flight is not None:
            raise ConfigurationError(
                f"send {track.name} again at inner step {self._step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        self._replica.check_unchanged()
        delta = track.outer.collect()
        self._replica.check_finite(
            track.fragment.names, delta, what="pseudo-gradient", when=f"inner step {self._step}"
        )
        track.in_flight = track.exchange.start(delta, self._place(track))
        track.sent_at_step = self._step

    def _place(self, track: Track) -> Place:
        # A lone worker has nobody to drift from.
        alone = self._transport.world_size == 1
        return Place(
            label=Label(what=track.name, round=self._rounds + 1),
            anchor=b"" if alone else anchor_digest(track.outer.flat_anchor()),
        )

    def _apply(self, track: Track, in_flight: InFlight) -> None:
        with torch.no_grad():
            mean, left_out = in_flight.finish()
        for worker in left_out:
            self._left_out[worker] = self._left_out.get(worker, 0) + 1
            _LOG.warning(
                "worker %d was left out of %s in round %d: what it sent is not finite",
                worker,
                track.name,
                self._rounds + 1,
            )
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
            left_out=dict(self._left_out),
        )

    def memory(self) -> dict[str, int]:
        """Bytes of every state this worker holds between rounds.

        Returns:
            `live weights`, `inner state` (the optimizers'), `anchor`, `outer state` (momentum) and
            `feedback`.
        """
        tracks = [track.memory() for track in self._tracks]
        return {
            "live weights": sum(local_shard(p).nbytes for p in self._replica.parameters.values()),
            "inner state": sum(tensor.nbytes for tensor in self._replica.inner_state()),
            **{state: sum(held[state] for held in tracks) for state in tracks[0]},
        }

    def exchange_nbytes(self) -> int:
        """Bytes this worker hands to the transport for one exchange of every fragment."""
        return sum(track.exchange.nbytes for track in self._tracks)

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
        if any(track.in_flight is not None for track in self._tracks):
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
            "left_out": dict(self._left_out),
            "fragments": [track.state_dict() for track in self._tracks],
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
        self._sent_before_bytes = self._transport.traffic.sent_bytes
        self._left_out = {int(worker): int(count) for worker, count in state["left_out"].items()}
        for track, saved in zip(self._tracks, state["fragments"], strict=True):
            track.load_state_dict(saved)

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
        names = wire_order(self._replica.shapes())
        parts = parts_of(self._replica.model)
        return self.method.fragments.plan(
            [parts[name] for name in names], sync_every=self.method.sync_every
        )

    def _track(self, fragment: Fragment) -> Track:
        workers, shapes = self._transport.world_size, self._replica.shapes()
        roles = {name: role.value for name, role in parameter_roles(self._replica.model).items()}
        layout = Layout.of({name: shapes[name] for name in fragment.names}, roles)
        wiring = Wiring(
            codec=self.method.codec,
            feedback=self.method.feedback,
            aggregate=self.method.aggregate,
            layout=layout,
            fragment=fragment.index,
            transport=self._transport,
            device=self._replica.device,
        )
        outer = self.method.outer.bind(self._replica, fragment.names, workers=workers)
        return Track(fragment, layout, outer, self.method.exchange.bind(wiring))

    def _card(self) -> dict[str, str]:
        return self._comparable() | {"thinwire version": __version__}

    def _comparable(self) -> dict[str, str]:
        shapes = {name: list(shape) for name, shape in self._replica.shapes().items()}
        return flatten_description(
            {
                "method": self.method.describe(),
                "workers": self._transport.world_size,
                "parameters": {name: str(shape) for name, shape in shapes.items()},
                # Equal shapes in another order would be averaged crosswise.
                "wire order": [
                    f"{s.name} ({s.role})" for track in self._tracks for s in track.layout.segments
                ],
            }
        )
