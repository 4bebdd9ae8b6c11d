"""A GPU computes the bits that the CPU computes: every preset and codec, and a saved state."""

import io
from functools import partial

import pytest
import torch

import thinwire as tw
from speed.models import llama
from speed.round_costs import with_short_rounds
from speed.workers import train_on_noise
from thinwire import codecs
from thinwire.transport import in_process

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


class Pair:
    """Two workers in this process whose models lie on `device`."""

    def __init__(
        self, method: tw.Method, size: str, dtype: torch.dtype, device: str, outer: str | None
    ) -> None:
        build = partial(llama, layers=2, **SIZES[size])
        self.models = [build().to(dtype).to(device) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in self.models]
        self.loops = [
            tw.OuterLoop(model, optimizer, method, transport=transport, outer_device=outer)
            for model, optimizer, transport in zip(
                self.models, self.optimizers, in_process(2), strict=True
            )
        ]

    def train(self, steps: int, *, first: int = 0) -> list[str]:
        for step in range(first, first + steps):
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                train_on_noise(model, optimizer, seed=2 * step + rank)
            for half in ("begin", "finish"):
                for loop in self.loops:
                    getattr(loop, half)()
        return [loop.digest() for loop in self.loops]


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
        digests = pair.train(steps)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (*pair.loops, *pair.models)], file)
        file.seek(0)
        other = Pair(method, size, dtype, "cuda" if device == "cpu" else "cpu", outer)
        for part, state in zip(
            (*other.loops, *other.models), torch.load(file, weights_only=True), strict=True
        ):
            part.load_state_dict(state)
        assert [loop.digest() for loop in other.loops] == digests, "another device, another state"
        later = pair.train(method.sync_every, first=steps)
        assert other.train(method.sync_every, first=steps) == later
        found.append((digests, later))
    assert found[0] == found[1]
