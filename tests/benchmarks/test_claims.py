"""The claims benchmark: what it runs, how it judges, and that it goes on where it was stopped."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from thinwire.errors import ConfigurationError
from thinwire.experiments import Rates
from thinwire.experiments.grid import folder_name
from thinwire.train.trainer import resume

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_importable() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(params=["small", "gpu"])
def setting(request: pytest.FixtureRequest):
    from claim_settings import SETTINGS

    return SETTINGS[request.param]


def module(name: str) -> ModuleType:
    return __import__(name)


def test_every_arm_can_be_configured_and_has_a_folder_of_its_own(setting):
    found = module("claim_arms").arms(setting)
    assert len({folder_name(arm) for arm in found}) == len(found) > 30
    assert {config.tokens_per_step for config in found.values()} == {
        setting.changes.get("global_batch", 16) * setting.changes.get("data.sequence_length", 128)
    }
    assert {config.workers for config in found.values()} == {*setting.team_sizes}
    assert all(config.method.name == arm for arm, config in found.items())


def test_claims_are_about_arms_that_run_and_no_arm_is_idle(setting):
    ran = set(module("claim_arms").arms(setting))
    used = {arm for claim in module("claim_list").claims(setting) for arm in claim.weights}
    assert used <= ran
    # Arms that no claim judges are rows of the table on the way from one to the next.
    assert ran - used == {f"muloco H={h}" for h in setting.intervals if h != setting.sync_every} | {
        f"muloco 1 bit, H={max(setting.intervals)}"
    }


def test_weights_of_a_claim_add_up_to_nothing(setting):
    for claim in module("claim_list").claims(setting):
        assert sum(claim.weights.values()) == 0, claim.text


def test_every_family_is_searched_alike(setting):
    assert {len(tried) for tried in setting.candidates.values()} == {4}
    assert set(setting.candidates) == set(module("claim_settings").FAMILIES)
    assert module("claim_settings").search(setting).tuning.repeated == 2


def claim(**fields):
    made = {"group": "g", "text": "t", "source": "s", "weights": {"a": 1.0, "b": -1.0}}
    return module("claim_list").Claim(**made, **fields)


BASE = {0: 2.0, 1: 2.1, 2: 2.2}


@pytest.mark.parametrize(
    ("differences", "order", "as_good"),
    [
        ((-0.10, -0.11, -0.12), "shown", "shown"),
        ((0.012, 0.012, 0.0125), "contradicted", "shown"),
        ((0.10, 0.11, 0.12), "contradicted", "contradicted"),
        ((-0.001, -0.001, -0.002), "shown", "shown"),
        ((0.001, -0.001, 0.0), "not shown at this scale", "shown"),
        ((-0.1, 0.1, 0.01), "not shown at this scale", "not shown at this scale"),
    ],
)
def test_verdicts(differences, order, as_good):
    losses = {"a": {s: BASE[s] + differences[s] for s in BASE}, "b": BASE}
    assert claim().verdict(losses) == order
    assert claim(reference="b").verdict(losses) == as_good


def test_one_seed_or_none_shows_nothing():
    assert claim().verdict({"a": {0: 1.0}, "b": {0: 2.0}}) == "not shown at this scale"
    assert claim().verdict({"a": {0: 1.0}}) == "not shown at this scale"
    assert claim().effect({"a": {0: 1.0}, "b": {1: 1.0}}) is None


def test_the_bound_is_that_of_students_t_with_two_degrees_of_freedom():
    # mean -1, standard error s: shown just if 2.92 s < 1.
    for spread, verdict in ((0.59, "shown"), (0.60, "not shown at this scale")):
        losses = {"a": {0: -1 - spread, 1: -1.0, 2: -1 + spread}, "b": {0: 0.0, 1: 0.0, 2: 0.0}}
        assert claim().verdict(losses) == verdict


def rows(losses, *, spread=0.1):
    return {
        "rows": {
            arm: {
                "val_loss_by_seed": {str(s): loss + s * spread for s in range(3)},
                "val_loss": {"standard_error": spread / 3**0.5, "seeds": [0, 1, 2]},
            }
            for arm, loss in losses.items()
        }
    }


def test_losses_reproduce_within_three_deviations_between_seeds(capsys):
    reproduced = module("claims").reproduced
    committed = rows({"a": 1.0, "b": 2.0})
    assert reproduced(rows({"a": 1.29, "b": 2.0}), committed) is None
    assert "6 of 6" in capsys.readouterr().out
    assert "a, seed 0 by 0.31" in reproduced(rows({"a": 1.31, "b": 2.0}), committed)
    assert reproduced(rows({"c": 1.0}), committed) == "not reproduced: no rows"


def test_an_unsteady_arm_lends_the_others_no_room():
    reproduced = module("claims").reproduced
    steady, unsteady = rows({"a": 1.0, "b": 1.0}, spread=0.01), rows({"c": 1.0}, spread=0.5)
    committed = {"rows": steady["rows"] | unsteady["rows"]}
    assert reproduced(rows({"a": 1.029}, spread=0.01), committed) is None
    assert "a, seed 0" in reproduced(rows({"a": 1.04}, spread=0.01), committed)
    assert reproduced(rows({"c": 2.4}, spread=0.5), committed) is None


class Ran:
    """An arm of a comparison that has run: as much of it as a table needs."""

    def __init__(self, text: str, loss: float) -> None:
        self.spec, self.variant, self.losses = self, self, dict.fromkeys(range(3), loss)
        self.text, self.runs, self.summary, self.sent_bytes_per_worker = text, [self], self, 7
        self.rows = [self]

    def curve(self, _):
        return SimpleNamespace(steps=[80, 480], means=[3.0, self.losses[0]])


def test_arms_that_run_alone_leave_the_rows_of_the_others():
    setting = module("claim_settings").tuned(module("claim_settings").SMALL)
    kept = json.loads((ROOT / "benchmarks/results/claims-small.json").read_text())
    found = module("claims").result(setting, Ran("sparseloco", 1.5), kept)
    assert list(found["rows"]) == list(kept["rows"])
    changed = {arm for arm, row in kept["rows"].items() if found["rows"][arm] != row}
    assert changed == {"sparseloco"}
    assert found["rows"]["sparseloco"]["val_loss"]["mean"] == 1.5
    (verdict,) = (
        c["verdict"] for c in found["claims"] if c["claim"] == "SparseLoCo is below DP AdamW"
    )
    assert verdict == "shown"
    for link, seconds in found["clock"]["links"].items():
        before = kept["clock"]["links"][link]
        assert {arm for arm in before if seconds[arm] != before[arm]} == {"sparseloco"}
        assert seconds["sparseloco"]["to_target_s"] is not None


def test_what_all_rows_are_compared_with_does_not_run_alone(tmp_path):
    claims = module("claims")
    for arms, message in ((("diloco",), "run diloco apart"), (("dilocco",), "no such arm")):
        command = claims.Command(setting="small", out=tmp_path, arms=arms)
        with pytest.raises(ConfigurationError, match=message):
            claims.main(command)


def test_the_clock_reads_between_evaluations():
    first_below = module("claim_clock").first_below
    assert first_below([(10, 3.0), (20, 2.0)], 2.5) == 15
    assert first_below([(10, 3.0)], 2.5) is None
    assert first_below([(10, 2.0), (20, 1.0)], 2.5) == 10
    assert first_below([], 2.5) is None


def test_the_committed_table_is_of_the_arms_and_claims_there_are():
    setting = module("claim_settings").tuned(module("claim_settings").SMALL)
    assert isinstance(setting.rates["muloco"], Rates)
    found = json.loads((ROOT / "benchmarks/results/claims-small.json").read_text())
    assert list(found["rows"]) == list(module("claim_arms").arms(setting))
    claims = list(module("claim_list").claims(setting))
    losses = {
        arm: {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for arm, row in found["rows"].items()
    }
    assert [(c.text, c.verdict(losses)) for c in claims] == [
        (c["claim"], c["verdict"]) for c in found["claims"]
    ]
    document = (ROOT / "docs/claims-small.md").read_text()
    assert document == module("claim_page").page(setting, found)


@pytest.mark.slow
def test_a_small_run_of_the_gpu_setting_trains_here(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("\n".join(str(n * n) for n in range(20_000)))
    setting = module("claim_settings").GPU
    config = module("claim_arms").arms(setting)["muloco 2 bit"]
    from thinwire.experiments.grid import with_changes

    tiny = with_changes(
        config,
        {
            "model.size": "250k",
            "data.corpus": str(text),
            "data.sequence_length": 16,
            "global_batch": 8,
            "steps": 31,
            "machine.device": "cpu",
            "machine.precision": "fp32",
            "periods.evaluate_steps": 0,
            "periods.checkpoint_steps": 0,
        },
    )
    assert resume(tiny, tmp_path / "run")["steps"] == 31
