"""A worker's outer parameters by name, and the mean of all workers' if these differ."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thinwire.blocks import DenseVector
from thinwire.errors import NonFiniteError
from thinwire.exchange import RoundResult
from thinwire.fragment_builder import FragmentBuilder
from thinwire.fragment_state import FragmentState
from thinwire.fragments.sharding import sharded_like
from thinwire.live_weights import LiveWeights
from thinwire.transport import RoundTag, Transport
from thinwire.transport.base import Round
from thinwire.transport.metered import Metered

_TRAFFIC = "consensus_traffic"


class OuterParameters:
    """Outer parameters of this worker, and the consensus of all workers, for evaluations.

    The consensus is (1/K) sum_k phi_k, fragment by fragment, cached until the next outer step. If
    all workers share an anchor, it is the anchor, and nothing is sent.

    Args:
        builder: makes the exchanges.
        live: the worker's weights.
        fragments: of this worker.
        transport: to the other workers; bytes sent for the consensus are counted here alone.
    """

    def __init__(
        self,
        builder: FragmentBuilder,
        live: LiveWeights,
        fragments: Sequence[FragmentState],
        transport: Transport,
    ) -> None:
        self._builder, self._live, self._fragments = builder, live, fragments
        self._transport = Metered(transport)
        self.counters = self._transport.counters
        self._under_way: list[Round[RoundResult]] = []
        self._means: list[Tensor] = []
        # Outer steps that the means are after: a round need not come by here.
        self._version = 0

    # -- this worker's -----------------------------------------------------------------------------

    def flat(self) -> list[Tensor]:
        """This worker's: fp32 [numel] for each fragment; do not write to them."""
        return [fragment.outer.flat_anchor() for fragment in self._fragments]

    def own(self) -> dict[str, Tensor]:
        """This worker's, by name of the parameter."""
        return self._by_name(self.flat())

    def _by_name(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: value
            for fragment, vector in zip(self._fragments, vectors, strict=True)
            for name, value in self._live.unflatten(fragment.fragment.names, vector).items()
        }

    def as_state_dict(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the model with `values` as its parameters; buffers are this worker's."""
        live: dict[str, Tensor] = self._live.model.state_dict(keep_vars=True)
        by_identity = {
            id(p := self._live.parameters[name]): sharded_like(p, value)
            for name, value in values.items()
        }
        return {name: by_identity.get(id(value), value.detach()) for name, value in live.items()}

    # -- all workers' ------------------------------------------------------------------------------

    def begin_consensus(self, *, version: int) -> None:
        """Begin to gather the consensus, unless that was done since the last outer step.

        Args:
            version: outer steps so far, the same on all workers.
        """
        if version != self._version:
            self._under_way, self._means, self._version = [], [], version
        if self._builder.has_own_anchors and not (self._under_way or self._means):
            self._under_way = [self._start(fragment, version) for fragment in self._fragments]

    def _start(self, fragment: FragmentState, version: int) -> Round[RoundResult]:
        workers, rank = self._transport.world_size, self._transport.rank
        exchange = self._builder.mean_exchange(fragment.fragment, workers, rank)
        tag = RoundTag(what=f"the outer parameters of {fragment.fragment.name}", round=version)
        anchor = fragment.outer.flat_anchor().to(self._builder.storage.device)
        return self._transport.run(
            exchange.run(exchange.encode(DenseVector(anchor), tag), tag), tag
        )

    @torch.no_grad()
    def consensus(self, *, version: int) -> dict[str, Tensor]:
        """The consensus, by name of the parameter; all workers must call this.

        Raises:
            ExchangeError: a peer died or stayed silent.
            NonFiniteError: the outer parameters of a worker are not finite.
        """
        if not self._builder.has_own_anchors:
            return self.own()
        self.begin_consensus(version=version)
        if self._under_way:
            results = [exchange.wait() for exchange in self._under_way]
            for result in results:
                _check_complete(result)
            self._means, self._under_way = [result.mean.whole() for result in results], []
        return self._by_name(self._means)

    def state_dict(self) -> dict[str, Any]:
        """The counters; empty if all workers share an anchor."""
        # States of methods with a shared anchor have the keys that they always had.
        return {_TRAFFIC: asdict(self.counters)} if self._builder.has_own_anchors else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters of a state that has those of `state_dict()`."""
        self._under_way, self._means = [], []
        self.counters.restore(state.get(_TRAFFIC, {}))


def _check_complete(result: RoundResult) -> None:
    if result.left_out:
        rank, why = min(result.left_out.items())
        raise NonFiniteError(
            "average the outer parameters of all workers",
            because=f"those of worker {rank} cannot be used: {why}",
            do="resume from the last checkpoint with a lower inner learning rate",
        )
