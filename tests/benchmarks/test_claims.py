"""The claims benchmark: its arms, its verdicts, and the committed table."""

import json
import math
import os
import random
import re
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import claim_settings
import claim_tuning
import claims
import wire_claims
from claim_arms import DECOUPLED, OWN_RATES, arms, borrowed, kind
from claim_corpora import SEPARATOR, split
from claim_list import (
    NOT_RUN,
    OPPOSITE,
    OURS,
    REPRODUCED,
    UNDECIDED,
    Claim,
    fingerprint,
    judge,
    verdicts,
)
from claim_list import claims as claims_of
from claim_page import page
from claim_settings import SETTINGS, SMALL, tuned
from claim_statistics import holm, quantile, two_sided
from claims import reproduced, with_other_seeds
from processes import start
from thinwire.experiments.grid import folder_name
from thinwire.runs.statistics import Estimate, paired_difference
from thinwire.train.data.corpora import resolve
from thinwire.train.recipes import laptop

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/claims-small.json").read_text())
# An arm has owners that encode one bit again: what that loses is what it measures.
pytestmark = pytest.mark.filterwarnings("ignore::thinwire.LossyReduceScatterWarning")
TUNED, SEARCHED = tuned(SMALL), claim_settings.searched(SMALL)


@pytest.mark.parametrize("name", ["small", "medium"])
def test_arms_are_configured_alike_and_claims_are_about_arms_that_run(name: str) -> None:
    setting = SETTINGS[name]
    found, judged = arms(setting), list(claims_of(setting))
    assert len({folder_name(arm) for arm in found}) == len(found) > 10
    assert len({config.tokens_per_step for config in found.values()}) == 1
    sizes = {config.workers for config in found.values()}
    assert sizes == ({2, 4} if setting.only else {*setting.team_sizes})
    assert all(config.method.name == arm for arm, config in found.items())
    assert all(sum(claim.weights.values()) == 0 for claim in judged)
    about = [claim for claim in judged if claim.weights.keys() <= found.keys()]
    assert len(about) == (len(judged) if name == "small" else 17)


def test_student_s_t_is_that_of_published_tables() -> None:
    # Two-sided 5 % and 0.1 %, by degrees of freedom.
    for degrees, five, tenth in ((1, 12.706, 636.619), (5, 2.571, 6.869), (40, 2.021, 3.551)):
        assert quantile(degrees) == pytest.approx(five, abs=5e-4)
        assert quantile(degrees, 0.001) == pytest.approx(tenth, abs=5e-4)
        assert two_sided(-five, degrees) == pytest.approx(0.05, abs=5e-5)


def judged(*differences: tuple[float, ...], **fields: bool) -> list[str]:
    """Verdicts of claims that a_i is below ddp, of one source; arms are apart from ddp by these."""
    rows = {"ddp": (2.0, 2.1, 2.2), "ddp-muon": (1.5, 1.51, 1.52)}
    own = {
        f"a{i}": [loss + d for loss, d in zip(rows["ddp"], each, strict=True)]
        for i, each in enumerate(differences)
    }
    claims = [
        Claim(group="g", text=arm, source="s", weights={arm: 1.0, "ddp": -1.0}, **fields)
        for arm in own
    ]
    table = {
        arm: {"val_loss_by_seed": dict(enumerate(losses))} for arm, losses in (rows | own).items()
    }
    kinds = dict.fromkeys(table, "dense") | {"ddp-muon": "other"}
    margin, found = judge(iter(claims), table, {"a9": "no row"}, kinds)
    # The root of the mean of 0.1^2 and 0.01^2.
    assert margin == pytest.approx(0.0711, abs=1e-4)
    return [claim["verdict"] for claim in found]


@pytest.mark.parametrize("seeds", [3, 6])
def test_a_second_look_counts_and_so_does_what_is_not_run(seeds: int) -> None:
    noise = random.Random(0)
    table = {
        arm: {"val_loss_by_seed": {str(s): level + noise.gauss(0, 0.01) for s in range(seeds)}}
        for arm, level in {"ddp": 2.0, "a": 1.97, "b": 1.98}.items()
    }
    claims = [
        Claim(group="g", text=arm, source="s", weights={arm: 1.0, "ddp": -1.0}) for arm in "abc"
    ]
    _, found = judge(iter(claims), table, {"c": "no row"}, dict.fromkeys(table, "dense"))
    assert found[2]["verdict"] == NOT_RUN
    effects = [each["effect"] for each in found[:2]]
    for effect in effects:
        error = effect["deviation"] * math.sqrt(2 / seeds)
        alone = two_sided(effect["mean"] / error, effect["degrees_of_freedom"])
        assert effect["p"] == pytest.approx((2 if seeds > 3 else 1) * alone)
    least, more = sorted(effects, key=lambda effect: effect["p"])
    assert least["p_holm"] == pytest.approx(3 * least["p"])
    assert more["p_holm"] == pytest.approx(max(2 * more["p"], least["p_holm"]))


NOISE = (0.005, -0.005, 0.0)


@pytest.mark.parametrize(
    ("shift", "order", "as_good"),
    [
        (-0.05, REPRODUCED, REPRODUCED),
        (0.0, UNDECIDED, REPRODUCED),
        (0.05, OPPOSITE, REPRODUCED),
        (0.07, OPPOSITE, UNDECIDED),
        (0.12, OPPOSITE, OPPOSITE),
    ],
)
def test_verdicts(shift: float, order: str, as_good: str) -> None:
    differences = tuple(shift + each for each in NOISE)
    assert judged(differences) == [order]
    assert judged(differences, as_good=True) == [as_good]


def test_a_deviation_is_pooled_but_not_with_an_unsteady_arm() -> None:
    first = (-0.028, -0.016, -0.040)
    others = [(0.0, 0.005, -0.005), (0.005, -0.005, 0.0), (-0.005, 0.0, 0.005)]
    assert judged(first) == [UNDECIDED]
    found = judged(first, *others, (-0.5, 0.3, -0.4))
    assert found == [REPRODUCED, *[UNDECIDED] * 4]
    # Nor with one that another hides, whose seeds it shares.
    found = judged(first, *others, (0.0, 3.0, 0.0), (0.0, 0.2, 0.0))
    assert found == [REPRODUCED, *[UNDECIDED] * 5]


def test_a_contrast_of_two_kinds_has_its_own_deviation() -> None:
    """What a seed does to all arms of a kind would count as one more witness for each arm."""
    moved = (0.0, -0.02, -0.06)
    rows = {
        arm: tuple(level + (each if kind == "AdamW" else 0.0) for each in moved)
        for kind, arm, level in (
            *(("AdamW", arm, 1.1 + n / 1e4) for n, arm in enumerate(("ddp", "a1", "a2", "a3"))),
            *(("Muon", arm, 1.0 + n / 1e4) for n, arm in enumerate(("ddp-muon", "m1", "m2", "m3"))),
        )
    }
    table = {
        arm: {"val_loss_by_seed": {str(s): loss + n % 2 * s * 1e-4 for s, loss in enumerate(its)}}
        for n, (arm, its) in enumerate(rows.items())
    }
    kinds = {arm: "Muon" if "m" in arm else "AdamW" for arm in rows}
    claims = [
        Claim(group="g", text=arm, source=arm, weights={arm: 1.0, "ddp": -1.0})
        for arm in ("m1", "a1")
    ]
    between, within = (each["effect"] for each in judge(iter(claims), table, {}, kinds)[1])
    assert between["degrees_of_freedom"] == 2
    half = 4.303 * statistics.stdev(moved) / 3**0.5
    assert between["high"] - between["mean"] == pytest.approx(half, rel=0.02)
    assert within["degrees_of_freedom"] == 6
    assert within["high"] - within["mean"] < half / 100


def test_rows_that_are_missing_stale_of_another_corpus_or_borrowed_decide_nothing() -> None:
    def why(arm: str, rows, setting=TUNED) -> str | None:
        found = [c for c in verdicts(setting, rows)[1] if arm in c["weights"]]
        assert {claim["verdict"] for claim in found if "why" in claim} <= {NOT_RUN}
        return next((c["why"] for c in found if f"({arm})" in c.get("why", "")), None)

    rows = COMMITTED["rows"]
    assert why("noloco", rows) is None
    assert why("noloco", {a: row for a, row in rows.items() if a != "noloco"}) == "no row (noloco)"
    for changed, reason in (
        ({"corpus": "0"}, "another corpus"),
        ({"method": "0"}, "stale"),
        ({"val_loss_by_seed": {"0": 1.0}}, "fewer than 3 seeds"),
    ):
        assert reason in why("noloco", rows | {"noloco": rows["noloco"] | changed})
    eight = "muloco 1 bit K=8"
    chosen = {arm: own for arm, own in TUNED.chosen.items() if arm != eight}
    few = SMALL.__class__(**vars(TUNED) | {"chosen": chosen})
    of_four = rows[eight] | {"method": fingerprint(arms(few)[eight].method)}
    assert "another K or H" in why(eight, rows | {eight: of_four}, few)
    searched = (*DECOUPLED, *OWN_RATES.values())
    chosen = {arm: own for arm, own in TUNED.chosen.items() if arm not in searched}
    unsearched = SMALL.__class__(**vars(TUNED) | {"chosen": chosen})
    for setting in (unsearched, replace(unsearched, chosen=chosen | {DECOUPLED[0]: {}})):
        found = [borrowed(setting, arm, config) for arm, config in arms(setting).items()]
        assert found.count("rates of another method") == 5 - (DECOUPLED[0] in setting.chosen)
    own = SMALL.__class__(
        **vars(TUNED) | {"chosen": TUNED.chosen | {"muloco K=1": {"inner_lr": 1.5e-2}}}
    )
    assert arms(own)["muloco K=1"].method.inner.lr == 1.5e-2
    assert "stale" in why("muloco K=1", rows, own)


def test_a_size_that_has_begun_has_a_page_and_decides_what_its_rows_can() -> None:
    medium = tuned(SETTINGS["medium"])
    configs = arms(medium)
    rows = {
        arm: COMMITTED["rows"][arm] | {"method": fingerprint(configs[arm].method)}
        for arm in ("ddp-muon", "muloco")
    }
    rows["muloco 1 bit"] = rows["muloco"] | {"val_loss_by_seed": {"0": 1.0}}
    rows["muloco 1 bit"]["method"] = fingerprint(configs["muloco 1 bit"].method)
    bare = {
        arm: {key: value for key, value in row.items() if not key.startswith("minus_")}
        for arm, row in rows.items()
    }
    found = claims.result(medium, {}, COMMITTED | {"rows": bare})
    assert found["clock"] is None
    # The margin is of both inner optimizers of data parallelism.
    assert {claim["verdict"] for claim in found["claims"]} == {NOT_RUN}
    why = {claim["claim"]: claim.get("why") for claim in found["claims"]}
    assert why["MuLoCo is below DP AdamW"] == why["MuLoCo is as good as DP Muon"] == "no row (ddp)"
    one_bit = "1-bit MuLoCo with feedback is as good as full precision"
    assert why[one_bit] == "fewer than 3 seeds (muloco 1 bit)"
    text = page(medium, found)
    assert "| ddp-muon | 1.4601 ± 0.0010 |  | +0.0000" in text


def test_a_search_ends_where_every_step_is_worse_and_says_if_it_did_not(monkeypatch) -> None:
    best = {"inner_lr": 0.01, "outer_lr": 1.25, "outer_momentum": 0.3, "feedback_decay": 0.0}
    ran = list[tuple[dict[str, float], int]]()

    def loss(config, settings, seed, out) -> float:
        del config, out
        ran.append((settings, seed))
        return sum(abs(math.log((value + 0.1) / (best[n] + 0.1))) for n, value in settings.items())

    monkeypatch.setattr(claim_tuning, "_loss", loss)
    config = arms(TUNED)["muloco 1 bit"]
    assert claim_tuning.settings_of(config) != best
    found = claim_tuning.search(config, Path())
    assert (found["chosen"], found["at_the_edge_of"]) == (best, [])
    tried = [settings for settings, seed in ran if seed == 10]
    assert all(each in tried for _, each in claim_tuning.steps(best))
    assert len(tried) == len(found["candidates"]) == len(ran) - 8 <= claim_tuning.MOST
    # From a file, whose keys are sorted, it goes on; and all around being worse is the end, also if
    # nothing more could have been tried.
    read = json.loads(json.dumps(found, sort_keys=True))
    ran.clear()
    with monkeypatch.context() as just_enough:
        just_enough.setattr(claim_tuning, "MOST", len(tried))
        assert claim_tuning.search(config, Path(), read) == found
        assert ran == []
        again = claim_tuning.search(config, Path())
    assert (again["chosen"], again["at_the_edge_of"]) == (best, [])
    best["inner_lr"] = 1e12  # too far away
    assert claim_tuning.search(config, Path())["at_the_edge_of"] == list(best)


def test_settings_that_a_search_begins_at_are_those_of_the_arm() -> None:
    for arm, config in arms(TUNED).items():
        settings = claim_tuning.settings_of(config)
        assert claim_tuning.with_settings(config.method, settings) == config.method, arm
        for name, other in claim_tuning.steps(settings):
            changed = replace(config, method=claim_tuning.with_settings(config.method, other))
            assert claim_tuning.settings_of(changed) == other, (arm, name)


def test_a_search_goes_on_from_its_row_and_takes_what_is_steady(monkeypatch) -> None:
    ran = list[tuple[float, int]]()

    def loss(config, settings, seed, out) -> float:
        del config, out
        ran.append((settings["inner_lr"], seed))
        return (
            9.0 if seed == 12 and settings["inner_lr"] == 0.004 else 2 + 10 * settings["inner_lr"]
        )

    monkeypatch.setattr(claim_tuning, "_loss", loss)
    config = arms(TUNED)["ddp"]
    before = {0.008: (2.1, 2.1), 0.004: (2.0, 2.0), 0.002: (2.3,)}
    candidates = [
        {
            "settings": {"inner_lr": lr},
            "runs": {s: {"val_loss": v} for s, v in zip(("10", "11"), its, strict=False)},
        }
        for lr, its in before.items()
    ]
    known = {"chosen": {"inner_lr": 0.004}, "candidates": candidates, "at_the_edge_of": []}
    earlier = {"settings": {"inner_lr": 0.001}, "runs": {"0": {"val_loss": 0.0}}}
    known["candidates"] = [earlier, *candidates]
    assert not claim_tuning.is_done(None)
    assert not claim_tuning.is_done(known)
    found = claim_tuning.search(config, Path(), known)
    # All seeds of the best four, and what lies around the one that they choose.
    assert ran[:4] == [(0.004, 12), (0.008, 12), (0.002, 11), (0.002, 12)]
    assert ran[4:] == [(0.016, seed) for seed in claim_tuning.SEEDS]
    assert found["chosen"] == {"inner_lr": 0.008}
    assert claim_tuning.is_done(found)
    assert not claim_tuning.is_done(found | {"chosen": {"inner_lr": 0.004}})
    assert claim_tuning.search(config, Path(), found) == found
    assert len(ran) == 7


def test_a_search_keeps_what_another_overtook_with_the_first_seed_alone(monkeypatch) -> None:
    first = {0.004: 1.0, 0.008: 1.1, 0.016: 1.05, 0.002: 1.2, 0.032: 1.3}
    others = {0.004: 3.0, 0.008: 1.1, 0.016: 2.0}

    def loss(config, settings, seed, out) -> float:
        del config, out
        return (first if seed == claim_tuning.SEEDS[0] else others)[settings["inner_lr"]]

    monkeypatch.setattr(claim_tuning, "_loss", loss)
    monkeypatch.setattr(claim_tuning, "FINALISTS", 2)
    found = claim_tuning.search(arms(TUNED)["ddp"], Path())
    assert found["chosen"] == {"inner_lr": 0.008}
    assert claim_tuning.is_done(found)


def test_the_larger_size_searches_inner_rates_from_where_the_small_one_ended(monkeypatch) -> None:
    monkeypatch.setattr(claim_settings, "searched", lambda s: SEARCHED if s is SMALL else {})
    medium = tuned(SETTINGS["medium"])
    small = arms(TUNED)
    for arm, config in arms(medium).items():
        if arm in small:
            assert claim_tuning.settings_of(config) == claim_tuning.settings_of(small[arm]), arm
    ran = list[dict[str, float]]()

    def loss(config, settings, seed, out) -> float:
        del config, seed, out
        ran.append(settings)
        return settings["inner_lr"]

    monkeypatch.setattr(claim_tuning, "_loss", loss)
    monkeypatch.setattr(claim_tuning, "MOST", 3)
    found = claim_tuning.search(arms(medium)["muloco"], Path(), budget=medium.budget)
    rates = [settings.pop("inner_lr") for settings in ran]
    # By one seed; and it is at an edge, for nothing more may be tried.
    assert (rates, found["at_the_edge_of"]) == ([0.005, 0.0025, 0.00125], ["inner_lr"])
    assert claim_tuning.is_done(found, medium.budget)
    assert not claim_tuning.is_done(found)
    assert all(settings == {"outer_lr": 0.8, "outer_momentum": 0.6} for settings in ran)


def test_what_repeats_the_committed_runs_searches_nothing(monkeypatch, tmp_path) -> None:
    searched = list[Path]()
    monkeypatch.setattr(claims, "_search_missing", lambda setting, out, only: searched.append(out))
    monkeypatch.setattr(claims, "_run", lambda *_: None)
    for write in (False, True):
        with pytest.raises(TypeError):  # what `_run` returns here is no pair
            claims._test(SMALL, claims.Command(setting="small", out=tmp_path, write=write))
    assert searched == [tmp_path / "tuning"]


def test_a_search_validates_on_documents_that_no_result_is_of(tmp_path) -> None:
    reported = resolve("python-stdlib")
    folder = claim_tuning.held_out("python-stdlib", tmp_path)
    found = resolve(str(folder))
    (train,), (held_out,) = found.train, found.validation
    assert train.size + held_out.size == reported.train[0].size
    assert 0.02 < held_out.size / train.size < 0.1
    own, others = (
        {*arrays[0].astype("u1").tobytes().split(b"\0")} - {b""}
        for arrays in ((held_out,), reported.validation)
    )
    assert own.isdisjoint(others)
    assert own.isdisjoint(train.astype("u1").tobytes().split(b"\0"))


def test_losses_are_equal_on_one_kind_of_machine_and_near_on_another(capsys) -> None:
    rows = COMMITTED["rows"]
    first = rows["demo"]["val_loss_by_seed"]["0"]

    def again(loss: float, **changed: str) -> str | None:
        row = rows["demo"] | {"val_loss_by_seed": {"0": loss}} | changed
        return reproduced({"rows": {"demo": row}}, COMMITTED)

    assert again(first) is None
    assert again(first + 5e-4).startswith("stale, or not reproduced: demo, seed 0 by 0.00050")
    assert again(first + 5e-4, machine="another") is None
    assert again(first + 0.2, machine="another") is not None
    assert again(first, corpus="f" * 64).startswith("not run: demo is of corpus ffff")


def test_arms_that_did_not_run_reproduce_nothing(monkeypatch, tmp_path) -> None:
    row = COMMITTED["rows"]["demo"] | {"val_loss_by_seed": {"9": 1.0}}
    monkeypatch.setattr(claims, "_run", lambda *_: ({"demo": None}, 1.0))
    monkeypatch.setattr(claims, "_row", lambda *_: row)
    with pytest.raises(SystemExit, match="no loss of these arms and seeds is committed"):
        claims.main(claims.Command(setting="small", out=tmp_path, arms=("demo",)))


def test_a_run_that_has_a_corpus_open_keeps_it_while_another_writes_it_again(tmp_path) -> None:
    split([b"a", b"b", b"c"], tmp_path, side=b"")
    with (tmp_path / "train.bin").open("rb") as file:
        split([b"d"], tmp_path, side=b"")
        text = SEPARATOR.join([b"a", b"b", b"c", b""])
        assert file.read() == np.frombuffer(text, np.uint8).astype("<u2").tobytes()


def test_two_runs_that_begin_together_write_the_corpus_apart(tmp_path) -> None:
    other = tmp_path / "train.bin.partial"
    other.write_text("what a process of another number has so far")
    split([b"d"], tmp_path, side=b"")
    assert other.exists()


def test_more_seeds_are_added_to_a_row_of_the_same_method_and_corpus() -> None:
    known = COMMITTED["rows"]["demo"]
    more = known | {"val_loss_by_seed": {"3": 2.0}, "machine": "another"}
    found = with_other_seeds(more, known)
    assert found["val_loss_by_seed"] == known["val_loss_by_seed"] | {"3": 2.0}
    assert found["machine"] == "; ".join(sorted(["another", known["machine"]]))
    again = with_other_seeds(known, found)
    assert again["val_loss_by_seed"] == found["val_loss_by_seed"]
    assert with_other_seeds(known, known) == known
    for name in ("method", "corpus"):
        assert with_other_seeds(more | {name: "f"}, known) == more | {name: "f"}
    assert with_other_seeds(more, None) == more


@pytest.mark.parametrize("name", ["small", "medium"])
def test_the_committed_table_has_today_s_arms_claims_and_verdicts(name: str) -> None:
    setting = tuned(SETTINGS[name])
    table = json.loads((ROOT / f"benchmarks/results/claims-{name}.json").read_text())
    known = list(arms(setting))
    assert sorted(table["rows"], key=known.index) == list(table["rows"])
    if name == "small":
        assert list(table["rows"]) == known
        kinds = {kind(config.method) for config in arms(setting).values()}
        assert kinds == {
            "AdamW",
            "Muon",
            *(f"sparse, {inner}" for inner in ("AdamW", "Muon", "SignSGD")),
        }
    # The last digits of a deviation depend on the version of Python.
    one, other = (
        json.loads(json.dumps(each), parse_float=lambda text: round(float(text), 12))
        for each in (verdicts(setting, table["rows"]), (table["margin_nats"], table["claims"]))
    )
    assert one == other
    assert (ROOT / f"docs/claims-{name}.md").read_text() == page(setting, table)


def test_the_evidence_has_the_second_size_s_losses() -> None:
    medium = json.loads((ROOT / "benchmarks/results/claims-medium.json").read_text())
    rows = medium["rows"]
    long = wire_claims.committed()
    arms_of_1600 = {"muloco": "muloco", "ddp-muon": "ddp, Muon", "ddp": "ddp, AdamW"}
    seeds = {
        "0.25M parameters, 480 steps, six seeds": {
            arm: COMMITTED["rows"][arm]["val_loss_by_seed"] for arm in arms_of_1600
        },
        "0.25M parameters, 1,600 steps, three seeds": {
            arm: dict(enumerate(run["val_loss"] for run in long[name][:3]))
            for arm, name in arms_of_1600.items()
        },
        "2.0M parameters, 3,200 steps, five seeds, four of Muon": {
            arm: rows[arm]["val_loss_by_seed"] for arm in arms_of_1600
        },
    }
    text = (ROOT / "docs/evidence.md").read_text()
    for when, losses in seeds.items():
        minus = [paired_difference(losses["muloco"], losses[of]) for of in ("ddp-muon", "ddp")]
        means = [f"{statistics.fmean(by.values()):.3f}" for by in losses.values()]
        assert f"| {when} | {' | '.join([*means, *(m.text('+.3f') for m in minus)])} |" in text
    curves = [dict(rows[arm]["curve"]) for arm in arms_of_1600]
    for step, when in ((400, "400"), (1600, "1,600")):
        local, muon, adamw = (curve[step] for curve in curves)
        cells = (
            f"{local:.3f} | {muon:.3f} | {adamw:.3f} | {local - muon:+.3f} | {local - adamw:+.3f}"
        )
        assert f"| 2.0M parameters, after {when} of 3,200 steps, three seeds | {cells} |" in text
    small = {each["claim"]: each for each in COMMITTED["claims"]}
    decided = [
        each for each in medium["claims"] if each["effect"] and "no paper" not in each["source"]
    ]
    for each in decided:
        before, now = small[each["claim"]], each["effect"]
        assert {before["verdict"], each["verdict"]} != {REPRODUCED, OPPOSITE}
        effects = f"{before['effect']['mean']:+.3f} | {now['mean']:+.3f}"
        between = f"({now['low']:+.3f} to {now['high']:+.3f})"
        assert f"| {each['claim']} | {effects} {between} | {each['verdict']} |" in text


def test_the_pages_have_by_how_much_one_bit_is_below_data_parallel_adamw() -> None:
    rows = wire_claims.rows_of(wire_claims.committed())
    rows = {arm: row for arm, row in rows.items() if not arm.startswith(wire_claims.TWO)}
    minus = {arm: row["minus_ddp, AdamW"] for arm, row in rows.items() if arm != "ddp, AdamW"}
    minus = {arm: by for arm, by in minus.items() if len(by["seeds"]) > 1}

    def p(arm: str) -> float:
        mean, error, seeds = (minus[arm][key] for key in ("mean", "standard_error", "seeds"))
        return two_sided(mean / error, len(seeds) - 1) * (2 if len(seeds) == 6 else 1)

    evidence, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/evidence.md", "README.md")
    )
    short, long = (f"muloco, 1 bit, H={every}, own settings" for every in (64, 128))
    for arm, in_readme in {
        short: "H=64 ends {} below AdamW (95 % interval ",
        long: "H=128 {} (",
    }.items():
        assert len(minus[arm]["seeds"]) == 6
        mean, half = -minus[arm]["mean"], quantile(5) * minus[arm]["standard_error"]
        found = [f"{value:.3f}" for value in (mean, mean - half, mean + half)]
        assert f"{found[0]} below data-parallel AdamW" in evidence
        assert "({} to {}, six seeds".format(*found[1:]) in evidence
        assert (in_readme + "{} to {}").format(*(text.lstrip("0") for text in found)) in readme
    of_all = dict(zip(minus, holm([p(arm) for arm in minus]), strict=True))
    of_front = dict(
        zip(wire_claims.FRONT, holm([p(arm) for arm in wire_claims.FRONT]), strict=True)
    )
    assert (
        f"p = {of_all[short]:.3f} by Holm over all {len(minus)} rows".replace("0.", ".") in evidence
    )
    assert f"p = {p(long):.2f}, doubled".replace("0.", ".") in evidence
    assert f"p is {of_front[long]:.2f}, and this is not decided".replace("0.", ".") in evidence
    assert of_all[short] < 0.05 < of_front[long]


def test_the_pages_have_what_two_workers_reach() -> None:
    rows = {
        arm.removeprefix(wire_claims.TWO): row
        for arm, row in wire_claims.rows_of(wire_claims.committed()).items()
        if arm.startswith(wire_claims.TWO)
    }
    text = (ROOT / "docs/evidence.md").read_text().partition("### Two workers\n")[2]
    table = [line for line in text.partition("\n### ")[0].splitlines() if line.startswith("| ")]
    cells = [wire_claims.cells(arm, row, baselines=True) for arm, row in rows.items()]
    assert [line.split(" | ", 1)[1].removesuffix(" |") for line in table[1:]] == cells
    row = rows["muloco, 1 bit, H=200"]
    few, minus = row["times_fewer_by_store"], row["minus_ddp, AdamW"]
    assert few == row["times_fewer_point_to_point"]
    half = quantile(5) * minus["standard_error"]
    below, least, most = (f"{-minus['mean'] + by:.3f}" for by in (0, -half, half))
    of_all = [r["minus_ddp, AdamW"] for arm, r in rows.items() if arm != "ddp, AdamW"]
    found = [two_sided(m["mean"] / m["standard_error"], len(m["seeds"]) - 1) for m in of_all]
    assert f"p = {holm(found)[-1]:.3f} by Holm".replace("0.", ".") in text
    told = (
        f"{below} below data-parallel AdamW with {few:,.0f} times fewer bytes** ({least} to {most}"
    )
    assert told in " ".join(text.split())
    told = f"{few:,.0f} times fewer bytes, and {below} below data-parallel AdamW ({least} to {most}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert told.replace(" 0.", " .").replace("(0.", "(.") in readme


def test_the_pages_have_by_how_much_muloco_is_below_data_parallelism_at_the_second_size() -> None:
    medium = json.loads((ROOT / "benchmarks/results/claims-medium.json").read_text())
    (claim,) = (c for c in medium["claims"] if c["claim"] == "MuLoCo is below DP AdamW")
    effect, few = claim["effect"], medium["rows"]["muloco 1 bit, H=267"]
    assert claim["verdict"] == REPRODUCED
    assert len(effect["seeds"]) == 5
    evidence, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/evidence.md", "README.md")
    )

    def told(digits: int) -> list[str]:
        ends = (-effect[end] for end in ("mean", "high", "low"))
        return [f"{each:.{digits}f}".lstrip("0") for each in ends]

    below = "{} below data-parallel AdamW{} ({} to {}, five seeds"
    mean, low, high = told(3)
    assert below.format(mean, "**", low, high) in evidence
    assert f"; p = {effect['p_holm']:.2f}, doubled".replace("0.", ".") in evidence
    mean, low, high = told(2)
    assert below.format(mean, "", low, high) in readme
    minus = few["minus_ddp"]
    half = quantile(2) * minus["standard_error"]
    ends = f"({minus['mean'] - half:+.3f} to {minus['mean'] + half:+.3f};".replace("0.", ".")
    assert f"{minus['mean']:+.3f} from AdamW {ends}".replace("0.", ".") in evidence
    assert f"with {few['times_fewer_by_store']:,.0f} times fewer bytes" in evidence


def test_the_pages_have_how_close_two_workers_are_to_data_parallel_muon() -> None:
    rows = json.loads((ROOT / "benchmarks/results/claims-medium.json").read_text())["rows"]
    row, whole = rows["muloco 1 bit K=2 H=20"], rows["ddp-muon"]["val_loss"]["mean"]
    few, minus = row["times_fewer_by_store"], row["minus_ddp-muon"]
    assert few == row["times_fewer_point_to_point"]
    assert minus["seeds"] == [0, 1, 2, 3]
    half = quantile(3) * minus["standard_error"]
    by, low, high = (minus["mean"] + each for each in (0, -half, half))
    percent = f"{100 * by / whole:.1f} %"
    ends = f"{low:+.3f} to {high:+.3f}".replace("0.", ".")
    evidence, readme, comparing = (
        " ".join((ROOT / name).read_text().split())
        for name in ("docs/evidence.md", "README.md", "docs/comparing.md")
    )
    assert f"{percent} above data-parallel Muon with {few:.0f} times fewer bytes**" in evidence
    told = f"{by:+.3f} in the mean of four seeds ({ends}, so that {100 * high / whole:.1f} % is"
    assert told.replace("+0.", "+.") in evidence
    told = f"{few:.0f} times fewer bytes, and end {by:.3f} ({percent}) above data-parallel Muon"
    assert f"{told} ({ends}".replace("end 0.", "end .") in readme
    ends = f"{100 * low / whole:.1f} to {100 * high / whole:.1f} %".replace("-0.", "-.")
    assert f"[{percent} with 2.0M parameters](evidence.md#a-second-size) ({ends})" in comparing


def test_the_readme_counts_today_s_verdicts_of_papers() -> None:
    found = Counter(c["verdict"] for c in COMMITTED["claims"] if c["source"] != OURS)
    good, undecided, opposite = (found[each] for each in (REPRODUCED, UNDECIDED, OPPOSITE))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"Of {found.total()} claims of papers, {good} are [reproduced](docs/claims-small.md) at "
        f"this size, {undecided} are not, and for {opposite} the opposite holds." in text
    )
    assert NOT_RUN not in found


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/evidence.md"])
def test_tables_of_bytes_are_those_of_the_committed_runs(name: str) -> None:
    rows = json.loads(json.dumps(wire_claims.rows_of(wire_claims.committed())))
    assert json.loads((ROOT / "benchmarks/results/wire-claims.json").read_text())["rows"] == rows
    assert list(rows) == list(wire_claims.arms())
    baselines = "evidence" in name
    cells = {wire_claims.cells(arm, row, baselines=baselines) for arm, row in rows.items()}
    table = (ROOT / name).read_text().partition("up, store | down | times fewer, store")[2]
    lines = table.partition("\n\n")[0].splitlines()[2:]
    assert len(lines) >= 5
    assert {line.split(" | ", 1)[1].removesuffix(" |") for line in lines} <= cells


EVIDENCE = (ROOT / "docs/evidence.md").read_text()


def section(title: str) -> str:
    found = EVIDENCE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found
    return found


def test_the_evidence_repeats_today_s_verdicts() -> None:
    text = " ".join(section("The published claims").split())
    found = Counter(claim["verdict"] for claim in COMMITTED["claims"])
    assert f"Now {found[REPRODUCED]} are *reproduced*" in text
    assert f"for {found[OPPOSITE]} the *opposite* holds" in text
    open_ = [c["effect"]["seeds"] for c in COMMITTED["claims"] if c["verdict"] == UNDECIDED]
    assert {len(seeds) for seeds in open_} == {6}  # "Every claim that is undecided has six seeds."
    effects = [claim["effect"] for claim in COMMITTED["claims"] if claim["effect"]]
    intervals = {frozenset(f"{abs(e[end]):.3f}"[1:] for end in ("low", "high")) for e in effects}
    told = re.findall(r"\([-+]?(\.\d+) to [-+]?(\.\d+)\)", text)
    assert len(told) > 8
    assert [pair for pair in told if frozenset(pair) not in intervals] == []
    known = {f"{effect['p_holm']:.{digits}f}"[1:] for effect in effects for digits in (2, 3)}
    senders = section("SparseLoCo, by senders")
    assert {*re.findall(r"p = (\.\d+)", text + senders)} <= known


@pytest.mark.parametrize(
    "title",
    [
        "With more workers",
        "The same codes with AdamW and with Muon",
        "What the demo shows",
        "SparseLoCo, by senders",
        "What streaming costs",
    ],
)
def test_losses_of_the_evidence_are_those_of_the_committed_table(title: str) -> None:
    rows = COMMITTED["rows"].values()
    estimates = [
        Estimate(**value)
        for row in rows
        for name, value in row.items()
        if name == "val_loss" or name.startswith("minus_")
    ]
    losses = [
        {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for row in (COMMITTED["rows"]["muloco"], *rows)
    ]
    estimates += [paired_difference(own, losses[0]) for own in losses[1:]]
    seeds = {f"{loss:.4f}" for row in rows for loss in row["val_loss_by_seed"].values()}
    text = section(title).partition("**Longer runs.**")[0]  # other runs, of what a wire costs
    known = {estimate.text(form) for estimate in estimates for form in (".3f", "+.3f")}
    told = re.findall(r"[-+]?\d\.\d{3} ± \d\.\d{3}", text)
    assert told
    assert [each for each in told if each not in known] == []
    assert [each for each in re.findall(r"\| (\d\.\d{4}) ", text) if each not in seeds] == []


def test_pages_of_methods_have_the_losses_of_the_committed_table() -> None:
    effects = {claim["claim"]: claim["effect"] for claim in COMMITTED["claims"]}
    mean = {arm: row["val_loss"]["mean"] for arm, row in COMMITTED["rows"].items()}

    def interval(claim: str) -> str:
        return "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**effects[claim])

    def tells(name: str, *sentences: str) -> None:
        text = " ".join((ROOT / f"docs/methods/{name}.md").read_text().split())
        assert [each for each in sentences if each not in text] == []

    for name, arm in {"diloco": "diloco", "muloco": "sparse_muloco"}.items():
        few, eight, many = (f"{mean[arm + team]:.3f}" for team in ("", " K=8", " K=16"))
        tells(name, f"480 steps, the loss is {few}, {eight} and {many}")
    demo = effects["DeMo is as good as DP AdamW"]
    local = [mean["muloco"] - mean["ddp-muon"], mean["diloco"] - mean["ddp"]]
    tells(
        "data-parallel",
        f"The loss is {demo['mean']:.3f} ({demo['low']:.3f} to {demo['high']:.3f}) above",
        f"{local[0]:.2f} to {local[1]:.2f} nats against data parallelism",
    )
    released, alone = mean["decoupled momentum"], mean["no exchange but a mean at the end"]
    lone = effects["MuLoCo K=1 is below DP Muon"]
    teams = [f"{mean['muloco' + team]:.3f}" for team in ("", " K=8", " K=16")]
    one_bit = (f"{mean['muloco 1 bit' + team]:.3f}" for team in (", own rates", " K=8", " K=16"))
    tells(
        "muloco",
        f"by {lone['mean']:.3f} ({lone['low']:+.3f} to {lone['high']:+.3f})",
        f"480 steps, the loss is {teams[0]}, {teams[1]} and {teams[2]}",
        "One bit without feedback ends at {}, {} and {}".format(*one_bit),
    )
    tells(
        "noloco",
        *(
            " ".join(
                f"| {interval(f'NoLoCo is below DiLoCo in as many {of}, K={k}')}" for k in (4, 8)
            )
            for of in ("bytes received", "rounds")
        ),
    )
    sparse = effects["SparseLoCo is as good as full precision with K=16"]
    coupled = effects["its coupled form, which the paper describes, is below the released one"]
    tells(
        "sparseloco",
        f"ends {-sparse['mean']:.2f} nats below DiLoCo "
        f"({-sparse['high']:.2f} to {-sparse['low']:.2f}, six seeds;",
        f"at the end ({released - alone:+.3f}, ",
        f"is {-coupled['mean']:.2f} nats below the released one",
    )


def test_the_laptop_recipe_has_what_few_rounds_of_one_bit_were_found_to_want() -> None:
    for every, longest in ((64, 127), (128, 199), (200, 256)):
        own = wire_claims.arms()[f"muloco, 1 bit, H={every}, own settings"][0].method
        few = laptop(f"muloco:bits=1:sync_every={every}").method
        assert replace(few, name=own.name) == own
        fewer = laptop(f"muloco:bits=1:sync_every={longest}").method
        assert (fewer.outer, fewer.feedback) == (few.outer, few.feedback)
    more = laptop("muloco:bits=1:sync_every=63").method
    assert (more.feedback, more.outer) == (
        laptop("muloco:bits=1").method.feedback,
        laptop("muloco").method.outer,
    )
    assert laptop("muloco:bits=2:sync_every=64").method.feedback == more.feedback


def test_runs_with_other_rates_are_not_taken_for_seeds_of_an_arm() -> None:
    config = wire_claims.arm("muloco")
    run = {"val_loss": 1.0, "fingerprint": fingerprint(config.method)}
    other = run | {"fingerprint": fingerprint(wire_claims.arm("muloco", lr=1e-3).method)}
    assert wire_claims.kept([run, run], config, (0, 1, 2)) == [run, run]
    assert wire_claims.kept([run, run], config, (0, 1)) == []  # named again: runs anew
    for unlike in (other, {"val_loss": 1.0}):
        assert wire_claims.kept([run, unlike], config, (0, 1, 2)) == []


def test_processes_of_a_search_end_with_a_command_that_was_killed() -> None:
    run = (
        "import time; from functools import partial; import claim_tuning\n"
        "pool = claim_tuning._pool(1)\n"
        "pool.submit(partial(print, 'searching', flush=True)); pool.submit(time.sleep, 60)"
    )
    command = start([sys.executable, "-c", run], PYTHONPATH=os.pathsep.join(sys.path))
    assert command.stdout is not None
    assert command.stdout.readline() == "searching\n"
    command.kill()
    # Its output ends with the last process that writes to it.
    command.communicate(timeout=30)
