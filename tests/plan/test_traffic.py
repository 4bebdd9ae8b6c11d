"""The bytes of a plan are the bytes of a run: equal, on every worker, with no tolerance."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import plan_scenarios
import thinwire as tw
from thinwire import codecs
from thinwire.exchange.state import peers_of
from thinwire.outer_loop import Stats
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import Traffic, traffic
from toy import Team, sgd


class Odd(nn.Module):
    """Layers between an embedding and a tied head; parameters of 0, 1 and a prime number."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 131, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.zeros(0))
        self.flat = nn.Parameter(torch.zeros(3, 0, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.prime = nn.Parameter(torch.zeros(4099, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(17), requires_grad=False)


def wide() -> nn.Module:
    """Whole blocks of 64x64, and what is left of them at the edges."""
    layers = [nn.Linear(130, 130, bias=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(300, 130), nn.Sequential(*layers))


def ragged() -> nn.Module:
    """Shards are cut from the order of the wire, in which its layers differ in width."""
    return nn.Sequential(nn.Linear(7, 64), nn.Linear(64, 64), nn.Linear(64, 128))


Make = Callable[[], nn.Module]
MODELS: dict[str, Make] = {"odd": Odd, "wide": wide, "ragged": ragged}


def run(method: tw.Method, make: Make, workers: int, steps: int, sealed: bool) -> list[Stats]:
    """Of K workers whose optimizers step and whose parameters need not move."""
    model, transports = make(), tw.transport.in_process(workers)
    if sealed:
        transports = [tw.transport.Sealed(t, "a secret of many characters") for t in transports]
    team = Team(method, sgd, workers, model=lambda: copy.deepcopy(model), transports=transports)
    for _ in range(steps):
        for optimizer in team.optimizers:
            optimizer.step()
        team.exchange()
    team.flush()
    for loop in team.loops:
        loop.close()
    return [loop.stats for loop in team.loops]


def check(
    method: tw.Method, make: Make, workers: int, steps: int, *, sealed: bool = False
) -> list[Traffic]:
    """Plan and run, and compare what every worker counts."""
    shape = Shape.of_model(make())
    more = {"workers": workers, "added_nbytes": 28 if sealed else 0}
    plans = [traffic(method, shape, rank=rank, **more) for rank in range(workers)]
    found = run(method, make, workers, steps, sealed)
    for rank, (plan, stats) in enumerate(zip(plans, found, strict=True)):
        alone = 0  # What the plan counts in rounds in which an odd worker sends nothing.
        if isinstance(method.exchange, tw.Pairs) and workers > 1:
            seed, rounds = method.exchange.seed, range(1, stats.rounds + 1)
            peers = [peers_of(workers, round=n, seed=seed)[rank] for n in rounds]
            alone = peers.count(rank) * plan.sent_nbytes()
        assert plan.sent_nbytes(steps) == stats.sent_bytes + alone
        assert plan.received_nbytes(steps) == stats.received_bytes + alone
        assert plan_scenarios.peak_sent_after(plan, steps) == stats.peak_sent_bytes_per_step
    return plans


def preset(name: str, **fields) -> tw.Method:
    if name in ("ddp", "demo"):
        return tw.presets.ddp(**fields)
    given = {"sync_every": 5} | ({"layers": 1} if "streaming" in name else {})
    return tw.presets.by_name(name)(**given | fields)


@pytest.mark.slow_cases("odd-8", "wide-8")
@pytest.mark.parametrize("name", tw.presets.names())
@pytest.mark.parametrize(
    ("model", "workers"),
    [("odd", 1), ("wide", 2), ("odd", 3), ("wide", 5), ("odd", 8), ("wide", 8)],
)
def test_presets(name: str, workers: int, model: str) -> None:
    for steps in (0, 5, 13):
        check(preset(name), MODELS[model], workers, steps, sealed=workers in (3, 5))


CODECS = {
    "identity": codecs.Identity(),
    "bf16": codecs.CastBF16(),
    "e3m0": codecs.E3M0(),
    "1 bit": codecs.Quantise(bits=1),
    "4 bit of rows": codecs.Quantise(bits=4, groups=codecs.Rows()),
    "2 bit of tensors": codecs.Quantise(bits=2, groups=codecs.Tensors()),
    "blocks": codecs.TopK(k=64, groups=codecs.Blocks()),
    "levels of tensors": codecs.TopK(k=64, values=codecs.TensorLevels(), groups=codecs.Blocks()),
    "per role": codecs.PerRole(
        default=codecs.TopK(k=32), embedding=codecs.CastBF16(), vector=codecs.Identity()
    ),
}
EXCHANGES = {
    "gather": tw.Gather(),
    "reduce-scatter": tw.ReduceScatter(owner_feedback=tw.ErrorFeedback(decay=0.9)),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_over_both_exchanges(codec: str, exchange: str) -> None:
    method = preset("diloco", codec=CODECS[codec], exchange=EXCHANGES[exchange])
    for make in MODELS.values():
        plans = check(method, make, 3, 7)
        assert {m.exchange for p in plans for m in p.messages} == {exchange.replace("-", "_")}


MODULES = (("layers.1",), ("embed", "layers.0", "layers.2"), ("nothing", "flat", "scale", "prime"))
FRAGMENTS = {
    "sequential": tw.Sequential(layers=2),
    "balanced": tw.Balanced(count=3),
    "together": tw.Balanced(count=2, offsets=tw.At(steps=(3, 3))),
    "early": tw.Balanced(count=3, offsets=tw.At(steps=(4, 0, 2))),
    "by module": tw.ByModule(modules=MODULES),
}
OVERLAPS = {"none": tw.Delay(), "tau": tw.Delay(tau=4, mixing=0.5), "eager": tw.Eager()}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_fragments_and_overlaps(fragments: str, overlap: str) -> None:
    method = preset("diloco", fragments=FRAGMENTS[fragments], overlap=OVERLAPS[overlap])
    for steps in (1, 3, 14):
        plans = check(method, Odd, 2, steps)
        assert plans[0].tau == {"none": 0, "tau": 4, "eager": 5}[overlap]


@given(layers=st.integers(1, 9), more=st.integers(0, 99_999))
def test_a_size_has_exactly_its_parameters(layers: int, more: int) -> None:
    shape = Shape.of_size(layers + more, layers)
    assert (shape.parameters, shape.layers) == (layers + more, layers)
    each = [sum(p.numel for p in shape.parts if p.layer == layer) for layer in range(layers)]
    assert max(each) - min(each) <= 1
    assert all(p.numel for p in shape.parts)


STREAMS, DENSE = tw.presets.streaming_diloco(), preset("diloco")


def planned(method: tw.Method, parameters: int, layers: int, **fields: int) -> Traffic:
    return traffic(method, Shape.of_size(parameters, layers), **{"workers": 2} | fields)


UNFIT = [
    (lambda: planned(STREAMS, 1000, 100), "spread 34 fragments over 30"),
    (lambda: planned(DENSE, 0, 0), "parameters >= layers >= 1"),
    (lambda: planned(DENSE, 4, 5), "parameters >= layers >= 1"),
    (lambda: traffic(STREAMS, Shape.of_model(nn.Linear(2, 2)), workers=2), "by its layers"),
    (lambda: Shape.of_model(nn.Linear(2, 2).requires_grad_(False)), "parameters is trained"),
]


@pytest.mark.parametrize(("make", "message"), UNFIT)
def test_what_does_not_fit_says_so_itself(make, message: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=message):
        make()
