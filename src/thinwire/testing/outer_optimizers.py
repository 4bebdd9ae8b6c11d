"""Tests that every outer optimizer must pass: subclass `OuterContract` and define `make`."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from thinwire.blocks import DenseVector
from thinwire.live_weights import LiveWeights
from thinwire.outer import Delay, FragmentContext, OuterOptimizer, OuterState
from thinwire.storage import StatePlacement

_NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def _move(live: LiveWeights, seed: int) -> None:
    """One inner step with a made-up gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in live.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in live.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _contribution(state: OuterState) -> Tensor:
    with state.measure() as delta:
        return state.contribution(delta).whole()


class OuterContract(ABC):
    """Tests for pytest: `class TestMine(OuterContract)` with `make`."""

    @abstractmethod
    def make(self) -> OuterOptimizer:
        """The outer optimizer under test."""

    def _bound(self) -> tuple[LiveWeights, OuterState]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        live = LiveWeights(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        storage = StatePlacement(live.device)
        context = FragmentContext(live=live, names=_NAMES, workers=2, storage=storage)
        return live, self.make().bind(context, Delay())

    def test_collects_one_new_fp32_vector(self) -> None:
        """It has the fragment's size and the weights' device, and is no view into the model."""
        live, state = self._bound()
        _move(live, 0)
        collected = state.pseudo_gradient()
        kept = collected.clone()
        live.write(_NAMES, torch.zeros_like(collected))
        assert collected.dtype == torch.float32
        assert collected.shape == live.read(_NAMES).shape
        assert torch.equal(collected, kept)

    def test_points_downhill(self) -> None:
        """Applying what was collected moves the anchor towards the local weights."""
        live, state = self._bound()
        before = state.flat_anchor().clone()
        _move(live, 0)
        with state.measure() as measured:
            delta, sent = measured.whole(), state.contribution(measured).whole()
        state.apply(DenseVector(sent))
        moved = state.flat_anchor().clone() - before
        assert float(moved @ delta) < 0

    def test_leaves_live_weights_on_the_anchor(self) -> None:
        """After a round every worker trains on from the outer parameters."""
        live, state = self._bound()
        _move(live, 0)
        state.apply(DenseVector(_contribution(state)))
        assert torch.equal(live.read(_NAMES), state.flat_anchor().clone())

    def test_equal_means_give_equal_bits(self) -> None:
        """Two workers that moved differently agree after the round."""
        (live_a, state_a), (live_b, state_b) = self._bound(), self._bound()
        for seed in range(3):
            _move(live_a, seed)
            _move(live_b, seed + 10)
            mean = 0.5 * (_contribution(state_a) + _contribution(state_b))
            state_a.apply(DenseVector(mean))
            state_b.apply(DenseVector(mean))
            assert torch.equal(live_a.read(_NAMES), live_b.read(_NAMES))

    def test_resumes_bit_for_bit(self) -> None:
        """A fresh state that loads a saved one continues exactly as the saved one does."""
        live, state = self._bound()
        for seed in range(2):
            _move(live, seed)
            state.apply(DenseVector(_contribution(state)))
        copy, resumed = self._bound()
        copy.write(_NAMES, live.read(_NAMES))
        resumed.load_state_dict({key: value.clone() for key, value in state.state_dict().items()})
        for r, s in ((live, state), (copy, resumed)):
            _move(r, 9)
            s.apply(DenseVector(_contribution(s)))
        assert torch.equal(live.read(_NAMES), copy.read(_NAMES))
