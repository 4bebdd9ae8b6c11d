"""The one loop: what is due is sent, what has arrived is applied. It never asks for the method."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from thinwire.course import Course
from thinwire.elastic.shared_state import Snapshot
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.fragments.sharding import sharded_like
from thinwire.handshake import check_cards, check_same, digest, make_card
from thinwire.live_weights import LiveWeights, local_shard
from thinwire.method import Method
from thinwire.stats import Stats
from thinwire.storage import Ledger, choose_storage
from thinwire.transport import Distributed, Metered, Transport
from thinwire.version import __version__

__all__ = ["OuterLoop"]


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
        self._replica = LiveWeights(model, optimizers)
        self._transport = Metered(Distributed() if transport is None else transport)
        storage = choose_storage(outer_device, self._replica.device, Ledger())
        self._storage = storage
        self._course = Course(method, self._replica, self._transport, storage)
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._busy = self._closed = False
        try:
            card = self._course.description | {"thinwire version": __version__}
            check_cards(self._transport.introduce(make_card(card, self._starting_weights())))
        except BaseException:
            self.close()
            raise

    def _starting_weights(self) -> Mapping[str, Tensor] | None:
        # Where workers come and go, others have long moved on, and a newcomer takes theirs.
        return None if self._transport.forgiving else self._anchors()

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
        self._course.begin()

    def begin_last(self) -> None:
        """Send every fragment that was trained since it was last sent, and call everything in."""
        self._course.begin_last()

    def finish(self) -> None:
        """Apply what is due: wait for all workers' payloads and take the outer step.

        Raises:
            ExchangeError: a peer died or stayed silent, or sent what cannot be used.
            MismatchError: a peer's outer parameters are not this worker's.
        """
        self._course.finish()

    def flush(self) -> None:
        """`begin_last()` and `finish()`: call it after the last inner step.

        Where a round may count on nobody, it is repeated until it counts.
        """
        self.begin_last()
        self.finish()
        while not self._course.is_settled():
            self.begin_last()
            self.finish()

    def watch(self, watcher: Callable[[int, Tensor], None]) -> None:
        """Show `watcher` every pseudo-gradient before it is encoded.

        Args:
            watcher: called with the fragment's index and fp32 [numel], which it must not change,
                and which is another's as soon as it returns.
        """
        for index, track in enumerate(self._course.tracks):
            track.watcher = partial(watcher, index)

    # -- results -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Rounds, bytes and seconds so far."""
        traffic, course = self._transport.traffic, self._course
        return Stats(
            rounds=course.version,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            peak_sent_bytes_per_step=course.peak_sent_bytes,
            wait_s=traffic.wait_s,
            overlapped_s=traffic.overlapped_s,
            left_out=dict(course.left_out),
            peak_outer_device_bytes=course.ledger.peak_device_bytes,
            peak_outer_host_bytes=course.ledger.peak_host_bytes,
        )

    @property
    def inner_step(self) -> int:
        """Inner steps by the schedule: of a worker that was healed, those of the others."""
        return self._course.step

    @property
    def workers(self) -> int:
        """K: the workers of the current round."""
        return self._transport.world_size

    @property
    def share(self) -> int:
        """Number of the data share of this round, which no other worker has or had.

        With K fixed it is round K + rank. It changes when a round begins, every H inner steps.
        Where workers come and go, the first question makes this one take its place among them:
        ask before the first inner step, which then starts from what the others have.
        """
        self._course.enter()
        return self._course.share

    def memory(self) -> dict[str, int]:
        """Bytes of every state this worker holds between rounds.

        Returns:
            `live weights`, `inner state` (the optimizers'), `anchor`, `outer state` (momentum) and
            `feedback`.
        """
        tracks = [track.memory() for track in self._course.tracks]
        return {
            "live weights": sum(local_shard(p).nbytes for p in self._replica.parameters.values()),
            "inner state": sum(tensor.nbytes for tensor in self._replica.inner_state()),
            **{state: sum(held[state] for held in tracks) for state in tracks[0]},
        }

    def exchange_nbytes(self) -> int:
        """Bytes this worker hands to the transport for one exchange of every fragment."""
        return sum(track.exchange.nbytes for track in self._course.tracks)

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
        tracks = self._course.tracks
        return {name: value for t in tracks for name, value in t.outer.anchor().items()}

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume bit for bit besides model and optimizer: plain tensors and numbers.

        What is in flight is saved as it was sent; resuming sends it again. The tensors share memory
        with the loop: copy or save them before the next step.

        Raises:
            CheckpointError: between `begin()` and `finish()`.
        """
        course = self._course
        if any(flight.due_step <= course.step for t in course.tracks for flight in t.flights):
            raise CheckpointError(
                "save the outer loop between begin() and finish()",
                because="an exchange is due that was not applied",
                do="save after finish()",
            )
        return {
            "run": course.description,
            "step": course.step,
            "rounds": course.version,
            "dealt": course.dealt,
            "peak_sent_bytes": course.peak_sent_bytes,
            "traffic": asdict(self._transport.traffic),
            # All workers: torch.distributed.checkpoint fills the keys that are there, and no other.
            "left_out": {w: course.left_out.get(w, 0) for w in range(self._transport.world_size)},
            "fragments": [track.state_dict() for track in course.tracks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a loop over the same model, method and world.

        Raises:
            MismatchError: it is from another one; names the field and both values.
        """
        _check_keys(state)
        check_same(
            state["run"],
            self._course.description,
            cannot="load this checkpoint",
            whose="the checkpoint",
            do="resume with the model, method and workers that wrote it",
        )
        flying = (f for saved in state["fragments"] for f in saved["in_flight"])
        if self._transport.forgiving and any(int(flight["round"]) > 0 for flight in flying):
            raise CheckpointError(
                "send again what was in flight",
                because="where workers come and go, the others have gone on without it",
                do="pass load_shared_state() what shared_state() returned",
            )
        self._course.load_state_dict(state)
        # Afterwards: what is sent again was counted when it was sent first.
        self._transport.traffic.restore(state["traffic"])

    def shared_state(self) -> dict[str, Any]:
        """What all workers share, whatever their number: plain tensors and numbers.

        Outer parameters, outer optimizers and where the schedule is, after the last round.
        """
        snapshot = self._course.capture()
        return {"facts": dict(snapshot.facts), "tensors": dict(snapshot.tensors)}

    def unsent_feedback(self) -> list[Mapping[str, Tensor]]:
        """Every fragment's error feedback, as it is if what is in flight counts on nobody."""
        return [track.unsent_feedback() for track in self._course.tracks]

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Start from `shared_state()` of a worker of any world; the live weights become the anchor.

        Raises:
            MismatchError: it is of another model or method; names the field and both values.
        """
        if set(state) != {"facts", "tensors"}:
            raise CheckpointError(
                "load this state",
                because=f"it has {sorted(state)}, not facts and tensors",
                do="pass what shared_state() of an OuterLoop returned",
            )
        self._course.adopt(Snapshot(facts=state["facts"], tensors=state["tensors"]))
        self._course.drop_work()

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
        # Before the first inner step, which then starts from what the others have.
        self._course.enter()
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
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Give the optimizers back as they were: `step()` of this loop must not be called again."""
        self._closed = True
        self._storage.put_away()
        for track in self._course.tracks:
            track.outer.close()
        self._transport.leave()

    def _follow(self) -> None:
        # The outer step may itself step the optimizer, which must not start another round.
        if self._busy:
            return
        self._busy = True
        try:
            self.step()
        finally:
            self._busy = False


def _check_keys(state: Mapping[str, Any]) -> None:
    if "run" not in state:
        raise CheckpointError(
            "load this state",
            because=f"it has {sorted(state)}, not the keys of an outer loop",
            do="pass what state_dict() of an OuterLoop returned",
        )
