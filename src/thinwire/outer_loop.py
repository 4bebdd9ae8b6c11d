"""The one loop: what is due is sent, what has arrived is applied. It never asks for the method."""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from thinwire.agreement import check_cards, check_same, digest, make_card
from thinwire.assembly import Assembly
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.message import anchor_digest
from thinwire.method import Method
from thinwire.replica import Replica, local_shard
from thinwire.sharding import sharded_like
from thinwire.stats import Stats
from thinwire.storage import Ledger, choose_storage
from thinwire.track import Flight, Track
from thinwire.transport import Distributed, Metered, Transport
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
        outer_device: where anchors, outer optimizer and feedback rest between rounds: None is the
            model's device, "cpu" the host's memory, from which a fragment is fetched at a time. It
            does not change the mathematics, so workers may differ in it.

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
        outer_device: torch.device | str | None = None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self.method = method
        self._replica = Replica(model, optimizers)
        self._transport = Metered(Distributed() if transport is None else transport)
        self._ledger = Ledger()
        self._storage = choose_storage(outer_device, self._replica.device, self._ledger)
        self._step = self._rounds = self._peak_sent_bytes = 0
        self._left_out: dict[int, int] = {}
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._busy = self._closed = False
        assembly = Assembly(method, self._replica, self._transport, self._storage)
        self._tracks = assembly.tracks()
        self._description = assembly.describe(self._tracks)
        try:
            card = self._description | {"thinwire version": __version__}
            check_cards(self._transport.introduce(make_card(card, self._anchors())))
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
        due = [track for track in self._tracks if self._is_due(track, self._step)]
        self._send_all(due)
        self._note_peak(sum(track.exchange.sent_nbytes for track in due))

    def begin_last(self) -> None:
        """Send every fragment that was trained since it was last sent, and call everything in."""
        # Another fragment than the one that the next step would have needed may come first.
        self._storage.put_away()
        tracks = [t for t in self._tracks if t.sent_at_step < self._step]
        # An anchor that is about to move is none to take a pseudo-gradient from.
        crowded = [t for t in tracks if len(t.flights) >= self.method.overlap.at_once]
        self._apply_all([(track, flight) for track in crowded for flight in track.flights])
        self._send_all(tracks)
        # Nobody trains beside the last exchanges: they need not be carried at once.
        self._note_peak(max((track.exchange.sent_nbytes for track in tracks), default=0))
        for track in self._tracks:
            for flight in track.flights:
                flight.due_step = self._step

    def finish(self) -> None:
        """Apply what is due: wait for all workers' payloads and take the outer step.

        Raises:
            ExchangeError: a peer died or stayed silent, or sent what cannot be used.
            MismatchError: a peer's outer parameters are not this worker's.
        """
        flights = [(t, f) for t in self._tracks for f in t.flights if f.due_step <= self._step]
        self._apply_all(flights)
        self._prefetch()

    def flush(self) -> None:
        """`begin_last()` and `finish()`: call it after the last inner step."""
        self.begin_last()
        self.finish()

    @torch.no_grad()
    def _send_all(self, tracks: list[Track]) -> None:
        if tracks:
            self._replica.check_unchanged()
        for track in tracks:
            self._send(track)

    def _note_peak(self, sent_bytes: int) -> None:
        self._peak_sent_bytes = max(self._peak_sent_bytes, sent_bytes)

    def _send(self, track: Track) -> None:
        if len(track.flights) >= self.method.overlap.at_once:
            raise ConfigurationError(
                f"send {track.fragment.name} again at inner step {self._step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        delta = track.outer.collect()
        self._replica.check_finite(
            track.fragment.names, delta, what="pseudo-gradient", when=f"inner step {self._step}"
        )
        track.outer.sending(delta)
        # A lone worker has nobody to drift from.
        alone = self._transport.world_size == 1
        anchor = b"" if alone else anchor_digest(track.outer.flat_anchor())
        due_step = self._step + self.method.overlap.steps(sync_every=self.method.sync_every)
        track.send(delta, anchor=anchor, step=self._step, due_step=due_step)

    def _apply_all(self, flights: list[tuple[Track, Flight]]) -> None:
        # All workers must wait in one order: a sort is stable, and tracks have the plan's order.
        for track, flight in sorted(flights, key=lambda tf: (tf[1].due_step, tf[1].sent_at_step)):
            self._apply(track, flight)

    def _apply(self, track: Track, flight: Flight) -> None:
        with torch.no_grad():
            mean, left_out = flight.exchange.finish()
        # Only now: a round that failed must neither be passed over nor left out of a checkpoint.
        track.flights.remove(flight)
        for worker in left_out:
            self._left_out[worker] = self._left_out.get(worker, 0) + 1
            _LOG.warning(
                "worker %d was left out of %s in round %d: what it sent is not finite",
                worker,
                track.fragment.name,
                flight.exchange.place.label.round,
            )
        track.outer.apply(mean)
        self._rounds += 1

    def _is_due(self, track: Track, step: int) -> bool:
        return track.fragment.is_due(step=step, sync_every=self.method.sync_every)

    def _prefetch(self) -> None:
        """Begin to bring what the next step needs first: one fragment's, for room is scarce."""
        step = self._step + 1
        for track in self._tracks:
            if self._is_due(track, step):
                return track.prefetch_send()
        for track in self._tracks:
            if any(flight.due_step <= step for flight in track.flights):
                return track.outer.prefetch_apply()
        return None

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
            peak_outer_device_bytes=self._ledger.peak_device_bytes,
            peak_outer_host_bytes=self._ledger.peak_host_bytes,
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

        Where a parameter is a DTensor, so is its value.

        The tensors share memory with the loop's state until the next round: copy them to keep them.
        """
        live: dict[str, Tensor] = self._replica.model.state_dict(keep_vars=True)
        by_identity = {
            id(p := self._replica.parameters[name]): sharded_like(p, value)
            for name, value in self._anchors().items()
        }
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

        What is in flight is saved as it was sent; resuming sends it again. The tensors share memory
        with the loop: copy or save them before the next step.

        Raises:
            CheckpointError: between `begin()` and `finish()`.
        """
        if any(flight.due_step <= self._step for t in self._tracks for flight in t.flights):
            raise CheckpointError(
                "save the outer loop between begin() and finish()",
                because="an exchange is due that was not applied",
                do="save after finish()",
            )
        return {
            "run": self._description,
            "step": self._step,
            "rounds": self._rounds,
            "peak_sent_bytes": self._peak_sent_bytes,
            "traffic": asdict(self._transport.traffic),
            # All workers: torch.distributed.checkpoint fills the keys that are there, and no other.
            "left_out": {w: self._left_out.get(w, 0) for w in range(self._transport.world_size)},
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
            self._description,
            cannot="load this checkpoint",
            whose="the checkpoint",
            do="resume with the model, method and workers that wrote it",
        )
        self._step, self._rounds = int(state["step"]), int(state["rounds"])
        self._peak_sent_bytes = int(state["peak_sent_bytes"])
        self._left_out = {int(w): int(count) for w, count in state["left_out"].items() if count}
        flights = [
            (step, track, flight)
            for track, saved in zip(self._tracks, state["fragments"], strict=True)
            for step, flight in track.load_state_dict(saved)
        ]
        for _, track, flight in sorted(flights, key=lambda found: found[0]):
            track.send_again(flight)
        # Afterwards: what is sent again was counted when it was sent first.
        self._transport.traffic.restore(state["traffic"])

    # -- following an optimizer --------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._replica.optimizers:
            raise ConfigurationError(
                "follow an optimizer",
                because="this loop was given none",
                do="pass the optimizer to OuterLoop, or call outer.step() yourself",
            )
        if self._hook is not None:
            raise ConfigurationError(
                "enter an outer loop that was entered",
                because="every inner step would count twice",
                do="leave out one of the two with blocks",
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
        self._storage.put_away()
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
