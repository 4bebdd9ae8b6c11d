import pytest
import torch

import thinwire as tw
from thinwire.blocks import DenseVector
from thinwire.testing import OuterContract
from toy import bound

CONTRACTS = {
    "PlainSGD": tw.outer.SGD(lr=0.5),
    "Nesterov": tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True),
    "HeavyBall": tw.outer.SGD(lr=0.7, momentum=0.9),
    "AdamW": tw.outer.AdamW(lr=0.01),
    "ByWorkerCount": tw.outer.ByWorkerCount(table=((1, tw.outer.SGD()), (2, tw.outer.SGD(lr=0.5)))),
    "DecoupledNesterov": tw.outer.DecoupledNesterov(lr=0.5),
    "Direct": tw.outer.GradientAveraging(),
    "Gossip": tw.outer.Gossip(lr=0.9, momentum=0.3),
    "GossipWithoutMomentum": tw.outer.Gossip(lr=1.0, momentum=0.0),
    "DelayedNesterov": tw.outer.DelayedNesterov(lr=0.7, momentum=0.9, every=2),
    # What is resumed after two arrivals has its place among three.
    "DelayedNesterovInAdvance": tw.outer.DelayedNesterov(lr=0.3, momentum=0.5, every=3, c=0.2),
}
DO_NOT_APPLY = {
    "DecoupledNesterov": "test_equal_means_give_equal_bits",  # every worker has its own anchor
    "Direct": "test_leaves_live_weights_on_the_anchor",  # there is none besides the live weights
}


def contract(name: str) -> type[OuterContract]:
    members = {"make": lambda self: CONTRACTS[name]}
    if name in DO_NOT_APPLY:
        assert hasattr(OuterContract, DO_NOT_APPLY[name])
        members[DO_NOT_APPLY[name]] = None
    return type(f"Test{name}", (OuterContract,), members)


globals().update({f"Test{name}": contract(name) for name in CONTRACTS})


def run_scalar(outer: tw.outer.OuterOptimizer, workers: int, deltas: list[float]) -> list[float]:
    """The anchor of one weight that starts at 0 after rounds with the given mean deltas."""
    weight, state = bound(outer, torch.zeros(1), workers)
    anchors: list[float] = []
    for delta in deltas:
        with torch.no_grad():
            weight -= delta
        pseudo_gradient = state.pseudo_gradient()
        assert float(pseudo_gradient) == pytest.approx(delta)
        state.apply(DenseVector(pseudo_gradient))
        anchors.append(float(weight.detach()))
    return anchors


@pytest.mark.parametrize(
    ("outer", "deltas", "anchors"),
    [
        # m1 = 1, step 0.5 (1 + 0.5); m2 = 0.5 + 2, step 0.5 (2 + 1.25).
        ({"lr": 0.5, "momentum": 0.5, "nesterov": True}, [1.0, 2.0], [-0.75, -0.75 - 1.625]),
        ({"lr": 0.5, "momentum": 0.5}, [1.0, 2.0], [-0.5, -0.5 - 1.25]),
        ({"lr": 0.25}, [1.0], [-0.25]),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_sgd_by_hand(workers: int, outer, deltas, anchors) -> None:
    assert run_scalar(tw.outer.SGD(**outer), workers, deltas) == anchors


DELAYED = [
    *({"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"every": 0}),
    *({"c": -0.01}, {"every": 4, "c": 0.26}, {"c": float("nan")}),
]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tw.outer.SGD(lr=-1.0),
        lambda: tw.outer.DecoupledNesterov(lr=-1.0),
        lambda: tw.outer.SGD(lr=float("nan")),
        lambda: tw.outer.SGD(momentum=1.0),
        lambda: tw.outer.SGD(nesterov=True),
        lambda: tw.outer.AdamW(betas=(0.9, 1.0)),
        lambda: tw.outer.ByWorkerCount(table=()),
        lambda: tw.outer.ByWorkerCount(table=((2, tw.outer.SGD()),)),
        lambda: tw.outer.ByWorkerCount(table=((1, tw.outer.SGD()), (1, tw.outer.SGD()))),
        lambda: tw.outer.ByWorkerCount(table=((1, tw.outer.SGD()), (2, tw.outer.Gossip()))),
        *(lambda s=s: tw.outer.DelayedNesterov(**s) for s in DELAYED),
    ],
)
def test_settings_that_cannot_work_are_refused(make) -> None:
    with pytest.raises(tw.ConfigurationError, match=r"cannot .*; because .*; do: "):
        make()
