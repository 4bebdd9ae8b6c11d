import copy

import pytest
import torch
from torch import nn

import thinwire as tw
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
