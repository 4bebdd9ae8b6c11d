"""The contract every outer optimizer keeps; subclass it and say how to make yours."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from thinwire.live_weights import LiveWeights
from thinwire.outer import Delay, FragmentContext, OuterOptimizer, OuterState
from thinwire.storage import Ledger, OnDevice

__all__ = ["OuterContract"]

_NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def _replica() -> LiveWeights:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    return LiveWeights(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def _move(replica: LiveWeights, seed: int) -> None:
    """One inner step with a made-up gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in replica.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in replica.optimizers:
        optimizer.step()
        optimizer.zero_grad()


class OuterContract(ABC):
    """Tests for pytest: `class TestMine(OuterContract)` with `make`."""

    @abstractmethod
    def make(self) -> OuterOptimizer:
        """The outer optimizer under test."""

    def _bound(self) -> tuple[LiveWeights, OuterState]:
        replica = _replica()
        storage = OnDevice(replica.device, Ledger())
        seat = FragmentContext(replica=replica, names=_NAMES, workers=2, storage=storage)
        return replica, self.make().bind(seat, Delay())

    def test_collects_one_new_fp32_vector(self) -> None:
        """Of the fragment's size, on the replica's device, without a view into the model."""
        replica, state = self._bound()
        _move(replica, 0)
        collected = state.collect()
        kept = collected.clone()
        replica.write(_NAMES, torch.zeros_like(collected))
        assert collected.dtype == torch.float32
        assert collected.shape == (replica.numel(_NAMES),)
        assert torch.equal(collected, kept)

    def test_points_downhill(self) -> None:
        """One sign: applying what was collected brings the anchor towards the moved weights."""
        replica, state = self._bound()
        before = replica.flatten(state.anchor().values())
        _move(replica, 0)
        delta = state.collect()
        state.apply(delta)
        moved = replica.flatten(state.anchor().values()) - before
        assert float(moved @ delta) < 0

    def test_leaves_live_weights_on_the_anchor(self) -> None:
        """After a round every worker trains on from the outer parameters."""
        replica, state = self._bound()
        _move(replica, 0)
        state.apply(state.collect())
        assert torch.equal(replica.read(_NAMES), replica.flatten(state.anchor().values()))

    def test_equal_means_give_equal_bits(self) -> None:
        """Two workers that moved differently agree after the round."""
        (replica_a, state_a), (replica_b, state_b) = self._bound(), self._bound()
        for seed in range(3):
            _move(replica_a, seed)
            _move(replica_b, seed + 10)
            mean = 0.5 * (state_a.collect() + state_b.collect())
            state_a.apply(mean.clone())
            state_b.apply(mean.clone())
            assert torch.equal(replica_a.read(_NAMES), replica_b.read(_NAMES))

    def test_resumes_bit_for_bit(self) -> None:
        """A fresh state that loads a saved one goes on as the saved one does."""
        replica, state = self._bound()
        for seed in range(2):
            _move(replica, seed)
            state.apply(state.collect())
        copy, resumed = self._bound()
        copy.write(_NAMES, replica.read(_NAMES))
        resumed.load_state_dict({key: value.clone() for key, value in state.state_dict().items()})
        for r, s in ((replica, state), (copy, resumed)):
            _move(r, 9)
            s.apply(s.collect())
        assert torch.equal(replica.read(_NAMES), copy.read(_NAMES))
