"""The claims benchmark: its arms, its verdicts, and the committed table."""

import json
from pathlib import Path

import pytest

from claim_arms import arms
from claim_list import Claim
from claim_list import claims as claims_of
from claim_page import page
from claim_settings import SETTINGS, SMALL, tuned
from thinwire.experiments.grid import folder_name

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/claims-small.json").read_text())
NOT_SHOWN = "not shown at this scale"


@pytest.mark.parametrize("name", ["small", "gpu"])
def test_arms_are_configured_alike_and_claims_are_about_arms_that_run(name: str) -> None:
    setting = SETTINGS[name]
    found, judged = arms(setting), list(claims_of(setting))
    assert len({folder_name(arm) for arm in found}) == len(found) > 30
    assert len({config.tokens_per_step for config in found.values()}) == 1
    assert {config.workers for config in found.values()} == {*setting.team_sizes}
    assert all(config.method.name == arm for arm, config in found.items())
    assert all(sum(claim.weights.values()) == 0 for claim in judged)
    assert {arm for claim in judged for arm in claim.weights} <= found.keys()


def verdict(differences: dict[int, float], **fields: str) -> str:
    """Of a claim that a is below b, whose losses are 2.0, 2.1 and 2.2."""
    claim = Claim(group="g", text="t", source="s", weights={"a": 1.0, "b": -1.0}, **fields)
    b = {0: 2.0, 1: 2.1, 2: 2.2}
    return claim.verdict({"a": {s: b[s] + d for s, d in differences.items()}, "b": b})


@pytest.mark.parametrize(
    ("differences", "order", "as_good"),
    [
        ((0.012, 0.012, 0.0125), "contradicted", "shown"),
        ((0.10, 0.11, 0.12), "contradicted", "contradicted"),
        ((0.001, -0.001, 0.0), NOT_SHOWN, "shown"),
        ((-0.1, 0.1, 0.01), NOT_SHOWN, NOT_SHOWN),
        # Student's t with two degrees of freedom: mean -1, error s, shown just if 2.92 s < 1.
        ((-1.59, -1.0, -0.41), "shown", "shown"),
        ((-1.60, -1.0, -0.40), NOT_SHOWN, "shown"),
        ((-1.0,), NOT_SHOWN, NOT_SHOWN),
    ],
)
def test_verdicts(differences, order: str, as_good: str) -> None:
    by_seed = dict(enumerate(differences))
    assert (verdict(by_seed), verdict(by_seed, reference="b")) == (order, as_good)


def test_the_committed_table_has_today_s_arms_claims_and_verdicts() -> None:
    setting = tuned(SMALL)
    assert list(COMMITTED["rows"]) == list(arms(setting))
    losses = {
        arm: {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for arm, row in COMMITTED["rows"].items()
    }
    verdicts = [(claim.text, claim.verdict(losses)) for claim in claims_of(setting)]
    assert verdicts == [(c["claim"], c["verdict"]) for c in COMMITTED["claims"]]
    assert (ROOT / "docs/claims-small.md").read_text() == page(setting, COMMITTED)
