import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import thinwire as tw
from thinwire.integrations.schedule import FollowedSchedule

KINDS = {
    "closed form": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + step)),
    "from the rate before": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 20),
    "momentum, too": lambda sgd: lr_scheduler.OneCycleLR(sgd, max_lr=1.0, total_steps=30),
    "one after the other": lambda sgd: lr_scheduler.SequentialLR(
        sgd,
        [lr_scheduler.LinearLR(sgd, 0.1, total_iters=4), lr_scheduler.ExponentialLR(sgd, 0.9)],
        milestones=[4],
    ),
}


def build(kind: str):
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5, momentum=0.8)
    return sgd, KINDS[kind](sgd)


def settings(sgd) -> dict:
    return {name: value for name, value in sgd.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize("kind", KINDS)
def test_moving_is_stepping_also_back(kind: str) -> None:
    moved, scheduler = build(kind)
    schedule = FollowedSchedule(scheduler)
    for moves in ([7], [-5, 2], [13, -4]):
        for move in moves:
            schedule.move(move)
        straight, other = build(kind)
        for _ in range(scheduler.last_epoch):
            straight.step()
            other.step()
        assert settings(moved) == settings(straight)
    assert scheduler.last_epoch == 13


def test_it_is_not_set_back_to_before_it_began() -> None:
    sgd, scheduler = build("closed form")
    sgd.step()
    scheduler.step()
    schedule = FollowedSchedule(scheduler)
    with pytest.raises(tw.ConfigurationError, match=r"back to step -1.*began at step 1"):
        schedule.move(-2)
