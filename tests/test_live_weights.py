import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import thinwire as tw
from asynchronous_team import AsyncTeam, method
from thinwire.handshake import weights_digest
from thinwire.live_weights import LiveWeights, with_hooks
from toy import build_model, loss, sgd


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
            r"'0\.weight' was .*replaced.*assign=True",
        ),
        (lambda m: m[0].weight.requires_grad_(False), r"'0\.weight' was frozen, unfrozen"),
        (lambda m: m[3].bias.requires_grad_(True), r"'3\.bias' was frozen, unfrozen"),
    ],
)
@pytest.mark.parametrize("preset", tw.presets.names())
def test_a_parameter_that_was_replaced_or_frozen_is_not_exchanged(
    preset: str, change, told: str
) -> None:
    model = build_model()
    model[3].bias.requires_grad_(False)
    optimizer = sgd(model)
    every_step = {"sync_every": 1, "fragments": tw.Whole(), "overlap": tw.Delay()}
    outer = tw.OuterLoop(model, optimizer, tw.presets.by_name(preset)(**every_step))
    change(model)
    loss(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(tw.ConfigurationError, match=told):
        outer.step()


def repeating(*shape: int) -> nn.Module:
    return nn.ParameterDict({"gain": nn.Parameter(torch.ones(1).expand(shape))})


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            nn.ParameterDict({"real": torch.ones(2), "phase": torch.ones(2, dtype=torch.cfloat)}),
            r"'phase'.*complex.*view_as_real",
        ),
        *((repeating(*shape), r"'gain'.*share memory.*contiguous") for shape in [(3,), (2, 3)]),
    ],
)
def test_parameters_that_cannot_be_sent_are_refused_by_name(model, told: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=told):
        LiveWeights(model, [])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Linear(2, 2, device="meta"), "weight"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta").requires_grad_(False)), "1"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "1"),
    ],
)
def test_a_model_without_values_is_refused_by_name(model: nn.Module, name: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=rf"'{name}.*has no values.*meta.*initial"):
        tw.OuterLoop(model, [], tw.presets.diloco())


def test_frozen_weights_that_wrap_tensors_are_compared_by_what_is_in_them() -> None:
    def digest(*values: float) -> str:
        model = build_model()
        model[1].weight = nn.Parameter(TwoTensor(*map(torch.tensor, values)), requires_grad=False)
        return weights_digest(LiveWeights(model, []).frozen())

    assert digest(1.0, 2.0) == digest(1.0, 2.0) != digest(1.0, 3.0) != digest(2.0, 3.0)


def test_odd_strides_that_repeat_nothing_are_taken_and_complex_ones_that_are_frozen() -> None:
    model = nn.ParameterDict(
        {
            "one": torch.ones(1).expand(1, 1),
            "empty": torch.ones(1, 1).expand(0, 1),
            "turned": torch.ones(3, 2).T,
            "table": nn.Parameter(torch.ones(2, dtype=torch.cfloat), requires_grad=False),
        }
    )
    live = LiveWeights(model, [])
    assert live.parameters.keys() == {"one", "empty", "turned"}
    assert live.read(list(live.parameters)).numel() == 7


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside, and is one itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([p for g in optimizer.param_groups for p in g["params"]], {})
        self.optimizer = optimizer


def test_an_optimizer_around_another_one_is_followed_itself_and_a_wrapper_is_looked_into() -> None:
    inside = torch.optim.SGD(nn.Linear(2, 1).parameters())
    around, wrapper = Lookahead(inside), object.__new__(Lookahead)
    assert with_hooks(around) is around
    wrapper.optimizer = inside
    assert with_hooks(wrapper) is inside


class Engine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class ZeroOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups


class Accelerated(torch.optim.SGD):
    """As Accelerate's wrapper: of torch's kind, with the real one inside."""

    optimizer: object


Engine.__module__ = "deepspeed.runtime.engine"
ZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"
MATCH = "with DeepSpeed; because it trains copies"


def test_what_deepspeed_has_wrapped_is_refused_by_name() -> None:
    model = build_model()
    optimizer = Accelerated(model.parameters(), lr=0.1)
    optimizer.optimizer = ZeroOptimizer(optimizer)
    for wrapped, stepped in ((Engine(model), []), (model, optimizer), (model, [optimizer])):
        with pytest.raises(tw.ConfigurationError, match=MATCH):
            tw.OuterLoop(wrapped, stepped, tw.presets.diloco())
    with pytest.raises(tw.ConfigurationError, match=MATCH):
        tw.OuterLoop(model, optimizer.optimizer, tw.presets.diloco())


def test_parameters_that_zero_has_cut_are_refused_whenever_it_was() -> None:
    outer = tw.OuterLoop(model := build_model(), [], tw.presets.diloco(sync_every=1))
    model[1].bias.ds_id = 0
    with pytest.raises(tw.ConfigurationError, match=MATCH):
        outer.step()
    with pytest.raises(tw.ConfigurationError, match=MATCH):
        tw.OuterLoop(model, [], tw.presets.diloco())


def test_fsdp1_is_refused_by_name() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(
            FullyShardedDataParallel(build_model(), device_id=torch.device("cpu"))
        )
        with pytest.raises(
            tw.ConfigurationError, match=r"FSDP1.*hide.*fully_shard\(\).*Accelerate"
        ):
            tw.OuterLoop(model, [], tw.presets.diloco())
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_was_given_copies_of_the_weights_since_is_refused() -> None:
    model = build_model()
    optimizer = sgd(model)
    outer = tw.OuterLoop(model, optimizer, tw.presets.diloco(sync_every=1))
    outer.step()
    copies = [p.detach().flatten() for p in model.parameters()]
    optimizer.param_groups[0]["params"] = [torch.cat(copies).requires_grad_()]
    with pytest.raises(tw.ConfigurationError, match=r"of shape \[139\]"):
        outer.step()


def test_parameters_of_the_model_may_be_added_to_the_optimizer_later() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    outer = tw.OuterLoop(model, optimizer, tw.presets.diloco(sync_every=1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    outer.step()


class Lookahead2(torch.optim.SGD):
    """Every two steps, the weights and a slow copy of them meet halfway."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        for p in weights:
            self.state[p].setdefault("slow", p.clone())
        super().step(closure)
        self.state[weights[0]]["steps"] = steps = self.state[weights[0]].get("steps", 0) + 1
        for p in weights if steps % 2 == 0 else []:
            p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Masters(torch.optim.AdamW):
    """Steps copies in fp32, and writes their roundings over the weights."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if "master_param" not in self.state[p]:
                self.state[p]["master_param"] = p.float()
            master = self.state[p]["master_param"]
            p.copy_(master.sub_(p.grad.float(), alpha=0.1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, outer: tw.OuterLoop) -> None:
    for step in range(4):
        loss(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()


@pytest.mark.parametrize(
    ("kind", "dtype", "state"),
    [(Lookahead2, torch.float32, "slow"), (Masters, torch.bfloat16, "master_param")],
)
@pytest.mark.parametrize("preset", ["diloco", "muloco", "noloco"])
def test_an_optimizer_that_would_take_the_weights_back_is_refused(
    preset: str, kind: type[torch.optim.Optimizer], dtype: torch.dtype, state: str
) -> None:
    model = build_model().to(dtype)
    outer = tw.OuterLoop(model, steps := kind(model.parameters()), tw.presets.by_name(preset)())
    with pytest.raises(tw.ConfigurationError, match=rf"{kind.__name__} trains; .*'{state}'.*Muon"):
        train(model, steps, outer)
    assert outer.inner_step == 3


def test_an_asynchronous_worker_refuses_it_before_it_sends() -> None:
    team = AsyncTeam(method(), (1.0,), build=lambda model: Lookahead2(model.parameters()))
    with pytest.raises(tw.ConfigurationError, match="Lookahead2 trains; because its state 'slow'"):
        team.run()
    assert team.server.stats.arrivals == 0


def test_an_optimizer_is_searched_when_it_has_state_and_once() -> None:
    model = build_model()
    copying, other = Lookahead2(model[0].parameters()), torch.optim.Adam(model[1:].parameters())
    outer = tw.OuterLoop(model, [copying, other], tw.presets.diloco())
    train(model, other, outer)
    with pytest.raises(tw.ConfigurationError, match="Lookahead2"):
        train(model, copying, outer)


def test_gradients_are_averaged_for_an_optimizer_that_keeps_copies() -> None:
    model = build_model()
    train(
        model, steps := Lookahead2(model.parameters()), tw.OuterLoop(model, steps, tw.presets.ddp())
    )


KINDS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    # One averages weights, others take no dense gradient, need a closure or take no vector, and
    # the last gradient, which Rprop keeps, is the weights themselves here.
    and each.__name__ not in ("Optimizer", "ASGD", "SparseAdam", "LBFGS", "Muon", "Rprop")
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_optimizer_of_torch_is_taken_for_one_that_keeps_copies(
    kind: type[torch.optim.Optimizer],
) -> None:
    # A parabola's gradients are its weights, and 1 is the count of steps at first.
    model = nn.ParameterDict({"one": torch.ones(()), "many": torch.linspace(-1, 2, 70)})
    slots = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    steps = kind(model.parameters(), lr=1e-3, **slots)
    outer = tw.OuterLoop(model, steps, tw.presets.diloco())
    for _ in range(4):
        for p in model.parameters():
            p.grad = p.detach().clone()
        steps.step()
        outer.step()
    assert outer.inner_step == 4


def test_an_optimizer_may_keep_numbers_of_its_own_beside_those_of_parameters() -> None:
    model = build_model()
    steps = torch.optim.Adam(model.parameters())
    steps.state["k"], steps.state["total"] = torch.ones(1), 3
    train(model, steps, outer := tw.OuterLoop(model, steps, tw.presets.diloco()))
    moments = sum(8 * p.numel() + 4 for p in model.parameters())
    assert outer.memory()["inner state"] == moments + 4
