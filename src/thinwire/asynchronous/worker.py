"""A worker of an asynchronous run, as a state without a network."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.asynchronous.assignment import Assignment
from thinwire.asynchronous.model_vector import ModelVector
from thinwire.blocks import DenseVector
from thinwire.checksums import anchor_digest
from thinwire.errors import ExchangeError, NonFiniteError, check
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.rejection import Rejection, RejectReason
from thinwire.storage import choose_storage
from thinwire.transport import RoundTag


class AsyncWorker:
    """Loads theta into the model, and makes a message of how far training moved it.

    The inner optimizer and its state are the caller's and stay with the worker. Between `start`
    and `finish` the caller trains `assignment.steps` inner steps.

    Args:
        model: the model that this worker trains.
        optimizer: the model's optimizer, or a list of optimizers.
        method: the server's method.
        rank: this worker's number, from 0.
        facts: the server's facts.
        outer_device: where the theta it started from, and error feedback, rest meanwhile: "cpu" is
            the host's memory, None the model's device.

    Attributes:
        assignment: the assignment under way, if any.
        anchor_nbytes: size of theta.

    Raises:
        ConfigurationError: the optimizer does not fit the model, or the method cannot run
            asynchronously.

    Source: Asynchronous Local-SGD (arXiv 2401.09135), the worker's part.

    >>> import thinwire as tw
    >>> from thinwire.asynchronous import AsyncServer
    >>> method = tw.presets.diloco(sync_every=1, outer=tw.outer.SGD(lr=1.0))
    >>> server, model = AsyncServer(nn.Linear(2, 1), method, workers=1), nn.Linear(2, 1)
    >>> worker = AsyncWorker(model, method.inner.build(model), method, rank=0)
    >>> worker.start(server.assign(0, now_s=0.0), server.theta_message)
    >>> worker.settle(server.receive(worker.finish(), now_s=1.0))
    >>> server.stats.arrivals
    1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        *,
        rank: int,
        facts: Mapping[str, str] | None = None,
        outer_device: torch.device | str | None = None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._live, self.rank = LiveWeights(model, optimizers), rank
        self._storage = storage = choose_storage(outer_device, self._live.device)
        self._vector = ModelVector(method, self._live, storage, facts or {})
        self.anchor_nbytes = self._vector.anchor_nbytes
        self._exchange = self._vector.exchange_state(rank)
        self._start = storage.keep(self._live.read(self._vector.names))
        self.assignment: Assignment | None = None
        self._feedback_before: Mapping[str, Tensor] = {}

    def _follow_model(self) -> None:
        # Trainers move the model to the device when they are built, or when training begins.
        if self._live.device != self._storage.device:
            self._storage.move(self._live.device)
            feedback = self._exchange.state_dict()
            # Sizes of batches, and kernels, depend on the device.
            self._exchange = self._vector.exchange_state(self.rank)
            self._exchange.load_state_dict(feedback)

    def describe(self) -> dict[str, str]:
        """All that server and workers must have in common, as one text per field."""
        return self._vector.describe()

    @torch.no_grad()
    def start(self, assignment: Assignment, theta: Tensor) -> None:
        """Load theta into the model.

        Args:
            assignment: the server's assignment.
            theta: the server's `theta_message` at that time, uint8.

        Raises:
            ExchangeError: `theta` is damaged, or not the assigned one.
        """
        check(
            theta.numel() == self.anchor_nbytes and anchor_digest(theta) == assignment.anchor,
            f"start exchange {assignment.round} as worker {self.rank}",
            because="theta does not have the size and digest that the server named",
            do="pass theta_message as it was when the server made this assignment",
            kind=ExchangeError,
        )
        self._follow_model()
        names = self._vector.names
        self._live.write(names, theta.view(torch.float32).to(self._live.device))
        # Rounding to the local weights' dtype must not count as movement.
        self._start.fetch()
        self._start.store(self._live.read(names))
        self.assignment = assignment

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The message for the server: g = theta_start - theta_w, encoded with feedback; uint8.

        Raises:
            NonFiniteError: g is not finite; nothing is encoded.
            ConfigurationError: the trained parameters have changed, or an optimizer keeps a copy
                of the weights.
        """
        given = self.assignment
        assert given is not None, "start(assignment) comes first, and finish() once for each"
        self._follow_model()
        names = self._vector.names
        self._live.check_unchanged()
        self._live.check_no_copies()
        delta = DenseVector(self._start.fetch() - self._live.read(names))
        self._start.release()
        tag = RoundTag(what="the whole model", round=given.round, anchor=given.anchor)
        self._feedback_before = self._exchange.feedback()
        try:
            (message,) = self._exchange.encode(delta, tag).values()
        except NonFiniteError:
            self._live.check_finite(names, delta, when=f"exchange {given.round}")
            raise
        self.assignment = None
        return message

    def settle(self, rejection: Rejection | None) -> None:
        """Act on what `AsyncServer.receive` returned for the last message.

        Encoding took the message out of the feedback. If the server refused the message, its work
        is dropped, and the feedback goes back to what it was.

        Raises:
            NonFiniteError: the server refused it because it is not finite.
        """
        before, self._feedback_before = self._feedback_before, {}
        if rejection is None:
            return
        if before:
            self._exchange.load_state_dict(before)
        check(
            rejection.reason is not RejectReason.NOT_FINITE,
            f"go on as worker {self.rank}",
            because=f"the server refused its pseudo-gradient: {rejection}",
            do="start this worker again with a lower inner learning rate",
            kind=NonFiniteError,
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue bit for bit, besides model and optimizer: tensors and numbers.

        The tensors share memory with the worker: save them before the next step.
        """
        return {
            "start": self._start.stored(),
            "assignment": self.assignment and asdict(self.assignment),
            "feedback": self._exchange.state_dict(),
            "feedback_before": dict(self._feedback_before),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with the model and the optimizer as they were."""
        self._follow_model()
        self._start.load(state["start"])
        self.assignment = state["assignment"] and Assignment(**state["assignment"])
        self._exchange.load_state_dict(state["feedback"])
        self._feedback_before = {k: v.clone() for k, v in state["feedback_before"].items()}
