"""The contract of outer optimizers; what they compute is in test_identities.py and beside."""

import pytest

import thinwire as tw
from thinwire.testing import OuterContract

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
        lambda: tw.outer.ByWorkerCount(table=((1, tw.outer.SGD()), (2, tw.outer.AdamW()))),
        *(lambda s=s: tw.outer.DelayedNesterov(**s) for s in DELAYED),
    ],
)
def test_settings_that_cannot_work_are_refused(make) -> None:
    with pytest.raises(tw.ConfigurationError, match=r"cannot .*; because .*; do: "):
        make()
