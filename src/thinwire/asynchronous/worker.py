"""A worker of an asynchronous run, as a state without a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.asynchronous.assignment import Assignment, Receipt
from thinwire.asynchronous.model_vector import ModelVector, tag_of
from thinwire.blocks import DenseVector
from thinwire.errors import CheckpointError, NonFiniteError, check
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.rejection import RejectReason
from thinwire.storage import choose_storage


class AsyncWorker:
    """Takes theta into the model, and makes a message of what training moved it by.

    The inner optimizer and its state are the caller's and stay with the worker. Between `start`
    and `finish` the caller trains `assignment.steps` inner steps.

    Args:
        model: trained by this worker.
        optimizer: what steps it, or a list of optimizers.
        method: as the server has it.
        rank: this worker's number, from 0.
        facts: as the server has them.
        outer_device: where the theta it started from, and error feedback, rest meanwhile: "cpu" is
            the host's memory, None the model's device.

    Attributes:
        assignment: the one under way, if any.
        anchor_nbytes: of a message with theta.
        sent_bytes: of messages so far.
        received_bytes: of messages with theta so far.

    Raises:
        ConfigurationError: the optimizer does not fit the model, or the method cannot be run
            asynchronously.

    Source: Asynchronous Local-SGD (arXiv 2401.09135), the worker's part.

    >>> import thinwire as tw
    >>> from thinwire.asynchronous import AsyncServer
    >>> method = tw.presets.diloco(sync_every=1, outer=tw.outer.SGD(lr=1.0))
    >>> server, model = AsyncServer(nn.Linear(2, 1), method, workers=1), nn.Linear(2, 1)
    >>> worker = AsyncWorker(model, method.inner.build(model), method, rank=0)
    >>> worker.start(server.assign(0, now_s=0.0))
    >>> server.receive(worker.finish(), now_s=1.0)
    Receipt(staleness=0, rejection=None, is_repeated=False)
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
        self._facts = dict(facts or {})
        storage = choose_storage(outer_device, self._live.device)
        self._vector = ModelVector(method, self._live, storage)
        self.anchor_nbytes = self._vector.anchor_nbytes
        self._exchange = self._vector.exchange_state(rank)
        self._start = storage.keep(self._live.read(self._vector.names))
        self.assignment: Assignment | None = None
        self._feedback_before: Mapping[str, Tensor] = {}
        self.sent_bytes = self.received_bytes = 0

    def describe(self) -> dict[str, str]:
        """All that server and workers must have in common, as one text per field."""
        return self._facts | self._vector.describe()

    @torch.no_grad()
    def start(self, assignment: Assignment) -> None:
        """Put the theta of `assignment` into the model.

        Raises:
            ExchangeError: its message is damaged or another one.
        """
        flat = self._vector.open_anchor(
            assignment.message, round=assignment.round, anchor=assignment.anchor
        )
        self.received_bytes += assignment.message.numel()
        names = self._vector.names
        self._live.write(names, flat)
        # Rounding to the local weights' dtype is not movement.
        self._start.fetch()
        self._start.store(self._live.as_written(names, flat).clone())
        self.assignment = assignment

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The message for the server: g = theta_start - theta_w, encoded with feedback; uint8.

        Raises:
            NonFiniteError: g is not finite; nothing is encoded.
        """
        given = self.assignment
        assert given is not None, "start(assignment) comes first, and finish() once for each"
        names = self._vector.names
        self._live.check_unchanged()
        delta = DenseVector(self._start.fetch() - self._live.read(names))
        self._start.release()
        what = f"exchange {given.round}"
        self._feedback_before = self._exchange.feedback()
        with self._live.naming_what_is_not_finite(names, delta, when=what):
            messages = self._exchange.encode(delta, tag_of(given.round, given.anchor))
        (message,) = messages.values()
        self.assignment = None
        self.sent_bytes += message.numel()
        return message

    def settle(self, receipt: Receipt) -> None:
        """Act on what became of the last message.

        Encoding took the message out of feedback. If the server does not know where it started
        from, its work is given up, and feedback is what it was before.

        Raises:
            NonFiniteError: the server found it not finite.
        """
        rejection, before = receipt.rejection, self._feedback_before
        self._feedback_before = {}
        if rejection is None:
            return
        if before:
            self._exchange.load_state_dict(before)
        if rejection.reason is RejectReason.NOT_FINITE:
            raise NonFiniteError(
                f"go on as worker {self.rank}",
                because=f"the server refused its pseudo-gradient: {rejection}",
                do="start this worker again with a lower inner learning rate",
            )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on bit for bit besides model and optimizer: tensors and numbers.

        The tensors share memory with the worker: save them before the next step.
        """
        given = self.assignment
        return {
            "start": self._start.stored(),
            "assignment": None
            if given is None
            else (given.round, given.anchor.hex(), given.steps, given.steps_done),
            "feedback": self._exchange.state_dict(),
            "feedback_before": dict(self._feedback_before),
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with the model and the optimizer as they were.

        Raises:
            CheckpointError: it is of another model, or no state of a worker.
        """
        shape = self._start.stored().shape
        check(
            "start" in state and state["start"].shape == shape,
            "load the state of an asynchronous worker",
            because=f"it has {sorted(state)}, not the start of {shape.numel()} elements",
            do="pass what AsyncWorker.state_dict() of the same model and method returned",
            kind=CheckpointError,
        )
        self._start.fetch()
        self._start.store(state["start"].to(self._live.device, copy=True))
        given = state["assignment"]
        self.assignment = None
        if given is not None:
            round, anchor, steps, steps_done = given
            self.assignment = Assignment(
                message=torch.empty(0, dtype=torch.uint8),
                round=round,
                anchor=bytes.fromhex(anchor),
                steps=steps,
                steps_done=steps_done,
            )
        self._exchange.load_state_dict(state["feedback"])
        self._feedback_before = dict(state["feedback_before"])
        self.sent_bytes = int(state["sent_bytes"])
        self.received_bytes = int(state["received_bytes"])
