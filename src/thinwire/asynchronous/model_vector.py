"""The whole model as one vector, which a server and its workers lay out alike."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.aggregate import MeanOverSenders, MeanOverWorkers, Payloads, aggregate_valid
from thinwire.blocks import StreamedVector
from thinwire.codecs import BoundCodec
from thinwire.errors import NonFiniteError, check
from thinwire.exchange import Automatic, ExchangeState, Gather
from thinwire.exchange.message import HEADER_NBYTES, Header, Kind, body_of, examine
from thinwire.fragment_state import FragmentBuilder
from thinwire.fragments import Whole
from thinwire.fragments.sharding import sharding_of
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.outer import Delay, GradientAveraging, OuterState
from thinwire.rejection import Rejection, RejectReason
from thinwire.storage import StatePlacement
from thinwire.transport import in_process
from thinwire.version import __version__


class ModelVector:
    """Layout of the model's parameters in the vector that is sent, and reader of its messages.

    Args:
        method: the method of server and workers.
        live: the weights of one of them.
        storage: where its states rest.
        facts: what else server and workers must have in common, as texts.

    Attributes:
        names: names of the parameters, in the order of the vector.
        anchor_nbytes: size of theta.
        delta_nbytes: size of a message with a pseudo-gradient.

    Raises:
        ConfigurationError: the method cannot run asynchronously; the error names the slot.
    """

    def __init__(
        self, method: Method, live: LiveWeights, storage: StatePlacement, facts: Mapping[str, str]
    ) -> None:
        _check_method(method)
        check(
            not any(map(sharding_of, live.parameters.values())),
            "train a model asynchronously",
            because="its parameters are sharded over ranks, and a worker is one process here",
            do="train workers of one rank each",
        )
        self._method, self._device, self._facts = method, storage.device, facts
        gathered = replace(method, exchange=Gather())
        self._builder = FragmentBuilder(gathered, live, in_process(1)[0], storage, is_fixed=False)
        (self._fragment,) = self._builder.plan()
        self.names, self._layout = self._fragment.names, self._builder.layout(self._fragment)
        self._codec: BoundCodec = method.codec.bind(self._layout)
        self.anchor_nbytes = 4 * self._layout.numel
        self.delta_nbytes = HEADER_NBYTES + self._codec.nbytes

    def describe(self) -> dict[str, str]:
        """All that server and workers must have in common, as one text per field."""
        described = self._builder.describe([self._fragment])
        return {**self._facts, **described, "thinwire version": __version__}

    def outer_state(self, workers: int) -> OuterState:
        """A fresh outer state for a server of this many workers."""
        return self._builder.outer_state(self._fragment, workers)

    def exchange_state(self, rank: int) -> ExchangeState:
        """Codec and feedback of worker `rank`, which makes messages of its pseudo-gradients."""
        # The server takes part, too: even a lone worker's message leaves its process.
        return self._builder.exchange_state(self._fragment, workers=rank + 2, rank=rank)

    @torch.no_grad()
    def open_delta(self, message: Tensor, origin: Header) -> StreamedVector | Rejection:
        """The aggregate of one message alone, [numel], or why the message cannot be used."""
        sender, numel, codec = origin.sender, self._layout.numel, self._codec.id
        expected = Header(0, Kind.WHOLE, 0, origin.round, sender, numel, origin.anchor, codec)
        rejection = examine(message, expected, body_nbytes=self._codec.nbytes)
        if rejection is not None:
            return rejection
        body = body_of(message, self._codec.nbytes)
        payloads = Payloads(coder=self._codec, payloads=[body], round=origin.round)
        try:
            return aggregate_valid(self._method.aggregate, payloads, self._device)[0]
        except NonFiniteError:
            return Rejection(reason=RejectReason.NOT_FINITE)


_MEANS = MeanOverWorkers | MeanOverSenders


def _check_method(method: Method) -> None:
    outer = method.outer
    one_theta = not (isinstance(outer, GradientAveraging) or outer.has_own_anchors)
    for slot, fits, because in (
        ("fragments", isinstance(method.fragments, Whole), "the whole model travels at once"),
        ("overlap", method.overlap == Delay(), "a worker waits for its answer, then starts again"),
        ("outer", one_theta, "a server has one theta for all, and no inner optimizer"),
        ("exchange", isinstance(method.exchange, Automatic | Gather), "workers exchange nothing"),
        ("aggregate", isinstance(method.aggregate, _MEANS), "each message is taken alone"),
    ):
        check(
            fits,
            f"train method {method.name!r} asynchronously with {getattr(method, slot)}",
            because=because,
            do=f"leave {slot} out; tw.presets.async_diloco() has what fits",
        )
