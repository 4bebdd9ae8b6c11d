"""Descriptions of inner optimizers: the values they check, and the optimizers that they build."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from thinwire import inner, optim
from thinwire.errors import ConfigurationError

SIGNS = inner.SignSGD(weight_decay=0.1)
DESCRIPTIONS = inner.AdamW(), inner.Muon(lr=0.02), inner.SGD(lr=0.1), SIGNS


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.arange(9)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda d: type(d).__name__)
class TestEveryDescription:
    def test_steps_every_parameter_and_two_builds_share_nothing(self, description):
        one, two, start = model(), model(), model()
        step(one, description.build(one))
        step(two, description.build(two))
        for p, q, before in zip(*(m.parameters() for m in (one, two, start)), strict=True):
            assert not torch.equal(p, before)
            assert torch.equal(p, q)

    def test_every_number_is_checked(self, description):
        for field in dataclasses.fields(description):
            value = getattr(description, field.name)
            wrong = (0.9, 1.5) if field.name == "betas" else "x" if isinstance(value, str) else -1.0
            if not isinstance(value, bool | inner.NewtonSchulz):
                with pytest.raises(ConfigurationError):
                    dataclasses.replace(description, **{field.name: wrong})
        for lr in (-1e-9, math.nan, math.inf):
            with pytest.raises(ConfigurationError, match="set lr to"):
                dataclasses.replace(description, lr=lr)


@pytest.mark.parametrize(
    ("description", "named", "settings"),
    [
        (inner.SGD, torch.optim.SGD, {"momentum": 0.5}),
        (inner.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
        (inner.SignSGD, optim.SignSGD, {"weight_decay": 0.5}),
    ],
)
def test_it_is_the_optimizer_that_it_names_with_vectors_not_decayed(description, named, settings):
    net, twin = model(), model()
    step(net, description(lr=0.01, **settings).build(net))
    vectors = [p for p in twin.parameters() if p.ndim == 1]
    others = [p for p in twin.parameters() if p.ndim == 2]
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    step(twin, named(groups, lr=0.01, **settings))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_muon_passes_every_field_on():
    same = {"momentum": 0.7, "nesterov": True, "scale": "rms", "betas": (0.8, 0.95), "eps": 1e-6}
    optimizer = inner.Muon(lr=0.5, adamw_lr=0.25, weight_decay=0.3, **same).build(model())
    assert isinstance(optimizer, optim.Muon)
    assert [(g["rule"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("muon", 0.5, 0.3),
        ("adamw", 0.25, 0.3),
        ("adamw", 0.25, 0.0),
    ]
    assert all(group.items() >= same.items() for group in optimizer.param_groups)
