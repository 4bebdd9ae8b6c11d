"""A GPU computes the bits that the CPU computes: every preset and codec, and a saved state."""

import pytest
import torch

import thinwire as tw
from speed.models import llama
from speed.round_costs import with_short_rounds
from speed.workers import train_on_noise
from thinwire import codecs
from toy import Team

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FEEDBACK = tw.ErrorFeedback(decay=0.9)
METHODS = {
    **{name: with_short_rounds(name) for name in tw.presets.names()},
    **{f"{n} bits": tw.presets.muloco(bits=n, sync_every=1) for n in (1, 2, 4, 8, 16)},
    "e3m0": tw.presets.diloco(sync_every=1, codec=codecs.E3M0(), feedback=FEEDBACK),
    "random k": tw.presets.diloco(sync_every=1, codec=codecs.RandomK(k=512), feedback=FEEDBACK),
    "bf16": tw.presets.sparseloco(sync_every=1, codec=codecs.TopK(k=64, values=codecs.BF16())),
    "gather": tw.presets.muloco(bits=4, sync_every=1, exchange=tw.Gather()),
    "reduce-scatter": tw.presets.muloco(
        bits=2, sync_every=1, exchange=tw.ReduceScatter(owner_feedback=FEEDBACK)
    ),
}
SIZES = {"odd": {"vocabulary": 1013, "width": 67}, "even": {"vocabulary": 512, "width": 128}}


class Pair(Team):
    """Two workers whose models lie on `device`."""

    def __init__(
        self, method: tw.Method, size: str, dtype: torch.dtype, device: str, outer: str | None
    ) -> None:
        def model() -> torch.nn.Module:
            return llama(layers=2, **SIZES[size]).to(dtype).to(device)

        def build(model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=1.0)

        super().__init__(method, build, 2, model=model, outer_device=outer)

    def descend(self, worker: int, step: int) -> None:
        train_on_noise(self.models[worker], self.optimizers[worker], seed=2 * step + worker)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("size", "dtype", "outer"),
    [
        ("odd", torch.float32, None),
        ("odd", torch.bfloat16, None),
        ("even", torch.float32, "cpu"),
        ("even", torch.bfloat16, None),
    ],
)
def test_rounds_on_a_gpu_have_the_bits_of_the_cpu(
    name: str, size: str, dtype: torch.dtype, outer: str | None
) -> None:
    method = METHODS[name]
    steps = 2 * method.sync_every + 2
    found = []
    for device in ("cpu", "cuda"):
        pair = Pair(method, size, dtype, device, outer)
        digests = pair.train(steps).digests()
        other = Pair(method, size, dtype, "cuda" if device == "cpu" else "cpu", outer)
        assert other.load(pair.states()).digests() == digests, "another device, another state"
        pair, other = (each.train(method.sync_every, first=steps) for each in (pair, other))
        assert other.digests() == pair.digests()
        found.append((digests, pair.digests()))
    assert found[0] == found[1]
