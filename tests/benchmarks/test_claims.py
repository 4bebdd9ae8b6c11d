"""The claims benchmark: what it runs, how it judges, and the table that is committed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import claims
from claim_arms import arms
from claim_clock import first_below
from claim_list import Claim
from claim_list import claims as claims_of
from claim_page import page
from claim_settings import FAMILIES, SETTINGS, SMALL, search, tuned
from thinwire.errors import ConfigurationError
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
    # Arms that no claim judges are rows of the table on the way from one to the next.
    assert found.keys() - {arm for claim in judged for arm in claim.weights} == {
        *(f"muloco H={h}" for h in setting.intervals if h != setting.sync_every),
        f"muloco 1 bit, H={max(setting.intervals)}",
    }
    assert {arm for claim in judged for arm in claim.weights} <= found.keys()
    assert {len(tried) for tried in setting.candidates.values()} == {4}
    assert set(setting.candidates) == set(FAMILIES)
    assert search(setting).tuning.repeated == 2


def verdict(differences: dict[int, float], **fields: str) -> str:
    """Of a claim that a is below b, whose losses are 2.0, 2.1 and 2.2."""
    claim = Claim(group="g", text="t", source="s", weights={"a": 1.0, "b": -1.0}, **fields)
    b = {0: 2.0, 1: 2.1, 2: 2.2}
    return claim.verdict({"a": {s: b[s] + d for s, d in differences.items()}, "b": b})


@pytest.mark.parametrize(
    ("differences", "order", "as_good"),
    [
        ((-0.10, -0.11, -0.12), "shown", "shown"),
        ((0.012, 0.012, 0.0125), "contradicted", "shown"),
        ((0.10, 0.11, 0.12), "contradicted", "contradicted"),
        ((-0.001, -0.001, -0.002), "shown", "shown"),
        ((0.001, -0.001, 0.0), NOT_SHOWN, "shown"),
        ((-0.1, 0.1, 0.01), NOT_SHOWN, NOT_SHOWN),
        # Student's t with two degrees of freedom: mean -1, error s, shown just if 2.92 s < 1.
        ((-1.59, -1.0, -0.41), "shown", "shown"),
        ((-1.60, -1.0, -0.40), NOT_SHOWN, "shown"),
        ((-1.0,), NOT_SHOWN, NOT_SHOWN),
        ((), NOT_SHOWN, NOT_SHOWN),
    ],
)
def test_verdicts(differences, order: str, as_good: str) -> None:
    by_seed = dict(enumerate(differences))
    assert (verdict(by_seed), verdict(by_seed, reference="b")) == (order, as_good)


def rows(losses: dict[str, float], spread: float) -> dict:
    found = {
        arm: {
            "val_loss_by_seed": {str(s): loss + s * spread for s in range(3)},
            "val_loss": {"standard_error": spread / 3**0.5, "seeds": [0, 1, 2]},
        }
        for arm, loss in losses.items()
    }
    return {"rows": found}


def test_losses_reproduce_within_three_deviations_between_the_seeds_of_steady_arms(capsys) -> None:
    steady, unsteady = rows({"a": 1.0, "b": 1.0}, 0.01), rows({"c": 1.0}, 0.5)
    committed = {"rows": steady["rows"] | unsteady["rows"]}
    assert claims.reproduced(rows({"a": 1.029, "b": 1.0}, 0.01), committed) is None
    assert "6 of 6" in capsys.readouterr().out
    assert "a, seed 0 by 0.04" in claims.reproduced(rows({"a": 1.04}, 0.01), committed)
    assert claims.reproduced(rows({"c": 2.4}, 0.5), committed) is None
    assert claims.reproduced(rows({"d": 1.0}, 0.1), committed) == "not reproduced: no rows"


def test_the_committed_table_is_of_the_arms_and_claims_there_are() -> None:
    setting = tuned(SMALL)
    assert list(COMMITTED["rows"]) == list(arms(setting))
    losses = {
        arm: {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for arm, row in COMMITTED["rows"].items()
    }
    verdicts = [(claim.text, claim.verdict(losses)) for claim in claims_of(setting)]
    assert verdicts == [(c["claim"], c["verdict"]) for c in COMMITTED["claims"]]
    assert (ROOT / "docs/claims-small.md").read_text() == page(setting, COMMITTED)


def test_arms_that_run_alone_leave_the_rows_of_the_others(tmp_path) -> None:
    ran = SimpleNamespace(text="sparseloco", losses=dict.fromkeys(range(3), 1.5))
    ran.curve = lambda _: SimpleNamespace(steps=[80, 480], means=[3.0, 1.5])
    ran.spec = ran.variant = ran.summary = ran
    ran.runs, ran.rows, ran.sent_bytes_per_worker = [ran], [ran], 7
    found = claims.result(tuned(SMALL), ran, COMMITTED)
    kept = COMMITTED["rows"]
    assert {arm for arm in kept if found["rows"][arm] != kept[arm]} == {"sparseloco"}
    for link, seconds_of in found["clock"]["links"].items():
        before = COMMITTED["clock"]["links"][link]
        assert {arm for arm in before if seconds_of[arm] != before[arm]} == {"sparseloco"}
    for names, message in ((("diloco",), "run diloco apart"), (("dilocco",), "no such arm")):
        with pytest.raises(ConfigurationError, match=message):
            claims.main(claims.Command(setting="small", out=tmp_path, arms=names))


def test_the_clock_reads_between_evaluations() -> None:
    assert first_below([(10, 3.0), (20, 2.0)], 2.5) == 15
    assert first_below([(10, 2.0), (20, 1.0)], 2.5) == 10
    assert first_below([(10, 3.0)], 2.5) is first_below([], 2.5) is None
