"""Experiments: their rows, their runs, what a search chooses, and what is told apart."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from doomed import Failing, Killed
from run_folders import STATES
from thinwire import inner
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.experiments import (
    Experiment,
    InTurn,
    Runner,
    Settings,
    SideBySide,
    State,
    Tuning,
    compare,
    estimate,
    find,
    paired_difference,
    product,
    standard_error,
)
from thinwire.experiments.arms import arms_of, configure
from thinwire.experiments.comparison import Comparison
from thinwire.experiments.runs import Failure, Run, Tell, nobody
from thinwire.experiments.standing import look, note_failure
from thinwire.train.config import Periods, TrainConfig
from thinwire.train.data import Data
from thinwire.train.folder_lock import locked
from thinwire.train.recipes import laptop
from thinwire.train.run_folder import RunFolder, write_json
from thinwire.train.schedule import WarmupCosine

# -- statistics, by hand ---------------------------------------------------------------------------


def test_standard_error_by_hand() -> None:
    # mean 4, deviations -2 0 2 -> s^2 = 8 / 2 = 4, s = 2, 2 / sqrt 3
    assert standard_error([2.0, 4.0, 6.0]) == pytest.approx(2 / math.sqrt(3), rel=1e-15)
    assert standard_error([5.0, 5.0]) == 0.0
    assert standard_error([5.0]) is None
    assert standard_error([]) is None


def test_a_paired_difference_is_over_common_seeds_in_their_order() -> None:
    one, base = {2: 3.5, 0: 1.0, 7: 100.0}, {0: 0.5, 2: 1.0, 1: -100.0}
    found = paired_difference(one, base)
    # differences 0.5 and 2.5: mean 1.5, s = sqrt 2, s / sqrt 2 = 1
    assert found is not None
    assert found.seeds == (0, 2)
    assert found.mean == 1.5
    assert found.standard_error == pytest.approx(1.0, rel=1e-15)


def test_seeds_that_vary_together_have_a_small_paired_error() -> None:
    one, base = {0: 1.0, 1: 3.0, 2: 8.0}, {0: 2.0, 1: 4.0, 2: 9.0}
    found = paired_difference(one, base)
    assert found is not None
    assert (found.mean, found.standard_error) == (-1.0, 0.0)
    assert estimate(one).standard_error > 2


def test_one_seed_has_no_error_and_none_has_no_mean() -> None:
    assert estimate({4: 2.0}).standard_error is None
    assert estimate({4: 2.0}).describe() == {"mean": 2.0, "standard_error": None, "seeds": [4]}
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    with pytest.raises(ConfigurationError, match="no run"):
        estimate({})


# -- rows ------------------------------------------------------------------------------------------


def labels(**fields: Any) -> list[str]:
    return [arm.label for arm in arms_of(Experiment(**fields))]


def test_single_values_leave_names_as_they_were() -> None:
    experiment = Experiment(
        methods=("ddp", "diloco"), workers=(2,), sync_every=(5,), inner_lr=(0.1,), outer_lr=(0.7,)
    )
    ddp, diloco = arms_of(experiment)
    assert [arm.folder(3) for arm in (ddp, diloco)] == ["ddp-seed3", "diloco-seed3"]
    config = configure(experiment, diloco, 3)
    assert (config.workers, config.method.sync_every, config.seed) == (2, 5, 3)
    assert (config.method.inner.lr, config.method.outer.lr) == (0.1, 0.7)
    assert configure(experiment, ddp, 3).method.sync_every == 1


def test_what_has_no_meaning_for_a_method_is_one_row() -> None:
    grid = {"sync_every": (5, 15), "outer_lr": (0.7, 1.0), "bits": (2, 4), "density": (1 / 32,)}
    assert labels(methods=("ddp",), sync_every=(5, 15), outer_lr=(0.7, 1.0)) == ["ddp"]
    found = labels(methods=("ddp", "diloco", "muloco", "sparseloco"), **grid)
    assert len(found) == 1 + 4 + 8 + 4
    assert "muloco:bits=4 H=15 outer_lr=0.7" in found
    assert "sparseloco:density=1/32 H=5 outer_lr=1" in found
    assert len(set(found)) == len(found)


def test_rows_and_folders_of_a_grid() -> None:
    experiment = Experiment(methods=("diloco",), workers=(1, 8), sync_every=(5, 15))
    arms = arms_of(experiment)
    assert arms[-1].folder(0) == "diloco-K-8-H-15-seed0"
    assert len({arm.folder(0) for arm in arms}) == 4
    configs = [configure(experiment, arm, 0) for arm in arms]
    assert {config.tokens_per_step for config in configs} == {16 * 128}
    assert [(c.workers, c.method.sync_every) for c in configs] == [(1, 5), (1, 15), (8, 5), (8, 15)]


def test_what_a_methods_text_says_is_kept_on_an_axis() -> None:
    both = ("muloco", "muloco:bits=1")
    assert labels(methods=both, bits=(2, 4)) == ["muloco:bits=2", "muloco:bits=4", "muloco:bits=1"]
    assert labels(methods=("diloco:sync_every=60",), sync_every=(5, 15)) == ["diloco:sync_every=60"]
    assert labels(methods=("diloco", "diloco"), seeds=(0, 0)) == ["diloco"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"methods": ()}, "methods is empty"),
        ({"seeds": ()}, "seeds is empty"),
        ({"methods": ("diloco",), "bits": (2,)}, "none of diloco has a bits"),
        ({"methods": ("diloco",), "density": (0.1,)}, "has a density"),
        ({"workers": (3,)}, "global batch of 16"),
        ({"workers": (4, 0)}, "workers=0"),
        ({"sync_every": (0,)}, "sync_every=0"),
        ({"changes": {"stepps": 3}}, "stepps"),
        ({"changes": {"data.length": 3}}, "length"),
        ({"baseline": "sparseloco"}, "the rows are ddp, diloco, muloco"),
        ({"methods": ("diloco",), "recipe": lambda text: None}, "NoneType and not a TrainConfig"),
    ],
)
def test_experiments_that_cannot_work(tmp_path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compare(Experiment(**fields), tmp_path / "out", nobody, Written(lambda config: 1.0))
    assert not (tmp_path / "out").exists()


def test_rows_of_other_tokens_are_refused(tmp_path) -> None:
    def unfair(text: str) -> TrainConfig:
        return dataclasses.replace(laptop(text), steps=800 if text == "muloco" else 400)

    with pytest.raises(ConfigurationError, match=r"steps is 800, not 400"):
        compare(Experiment(recipe=unfair), tmp_path, nobody, Written(lambda config: 1.0))
    assert not list(tmp_path.iterdir())


# -- runs, written and not trained -----------------------------------------------------------------


def record(folder: Path, config: TrainConfig, loss: float, corpus: str | None = "abc") -> None:
    """What a finished run leaves."""
    RunFolder(folder).open(config.describe())
    tokens = config.steps * config.tokens_per_step
    record = {"step": config.steps, "tokens": tokens, "loss": loss, "val_loss": loss}
    record |= {"sent_bytes": 100, "wait_s": 0.0, "overlapped_s": 0.0, "wall_s": 1.0}
    RunFolder(folder).append(record | {f"{state}_bytes": 8 for state in STATES})
    if corpus is not None:
        RunFolder(folder).note_data(corpus)
    summary = {
        "method": config.method.name,
        "workers": config.workers,
        "parameters": 2,
        "steps": config.steps,
        "tokens": tokens,
        "val_loss": loss,
        "wall_s": 1.0,
        "wait_s": 0.0,
    }
    sizes = ("sent_bytes_per_worker", "received_bytes_per_worker", "peak_sent_bytes_per_step")
    RunFolder(folder).finish(summary | dict.fromkeys(sizes, 100))


@final
class Written(Runner):
    """Writes what a run would; NaN is one that diverges, infinity one whose process died."""

    def __init__(self, loss: Callable[[TrainConfig], float]) -> None:
        self.loss, self.seen = loss, list[str]()

    def carry_out(self, runs: Sequence[Run], tell: Tell) -> list[Failure | None]:
        return [self._one(run) for run in runs]

    def _one(self, run: Run) -> Failure | None:
        self.seen.append(run.folder.name)
        loss = self.loss(run.config)
        if math.isfinite(loss):
            record(run.folder, run.config, loss)
            return None
        RunFolder(run.folder).open(run.config.describe())
        if math.isinf(loss):
            return Failure(kind="killed", why="its process ended with status -9")
        note_failure(run.folder, NonFiniteError.__name__, "the loss is nan")
        return Failure(kind=NonFiniteError.__name__, why="the loss is nan")


def test_finished_runs_are_kept_and_differences_are_paired(tmp_path) -> None:
    table = {"ddp": 1.0, "diloco": 2.0, "muloco": 1.5}
    runner = Written(lambda c: table[c.method.name] + 10 * c.seed * (1 + (c.method.name == "ddp")))
    experiment = Experiment(seeds=(0, 1))
    first = compare(experiment, tmp_path, nobody, runner)
    assert len(runner.seen) == 6
    assert first.troubles() == {}
    again = compare(dataclasses.replace(experiment, seeds=(0, 1, 2)), tmp_path, nobody, runner)
    assert sorted(runner.seen[6:]) == ["ddp-seed2", "diloco-seed2", "muloco-seed2"]
    muloco = again.statistics()["muloco"]
    assert muloco["val_loss"]["mean"] == pytest.approx(11.5)
    assert muloco["val_loss_minus_baseline"] == {
        "mean": -0.5,
        "standard_error": 0.0,
        "seeds": [0, 1, 2],
    }
    ddp = again.statistics()["ddp"]["val_loss_minus_baseline"]
    assert ddp["mean"] == pytest.approx(9.0)  # -1, 9, 19
    assert ddp["standard_error"] == pytest.approx(10 / math.sqrt(3))
    assert again.statistics()["diloco"]["val_loss_minus_baseline"] is None
    written = json.loads((tmp_path / "compare.json").read_text())
    assert [run["seed"] for run in written["ddp"]] == [0, 1, 2]
    assert json.loads((tmp_path / "statistics.json").read_text())["rows"] == again.statistics()


def test_a_baseline_lies_at_the_same_place_of_the_grid(tmp_path) -> None:
    grid = Experiment(methods=("ddp", "diloco", "muloco"), workers=(2, 4), bits=(2, 4))
    runner = Written(lambda c: 1.0)
    found = compare(grid, tmp_path, nobody, runner).baselines
    assert found["muloco:bits=4 K=2"] == "diloco K=2"
    assert found["ddp K=4"] == "diloco K=4"
    pinned = dataclasses.replace(grid, baseline="diloco K=4")
    assert set(compare(pinned, tmp_path, nobody, runner).baselines.values()) == {"diloco K=4"}


def spoil(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    write_json(folder / name, data)


def retell(folder: Path, old: str, new: str) -> None:
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace(old, new))


SPOILT: dict[str, tuple[Callable[[Path], object], State, str]] = {
    "half a summary": (
        lambda f: (f / "summary.json").write_text('{"val_loss": 1.'),
        State.CORRUPT,
        "summary.json cannot be read",
    ),
    "a list": (lambda f: (f / "summary.json").write_text("[]"), State.CORRUPT, "holds no object"),
    "not text": (lambda f: (f / "config.json").write_bytes(b"\xff\0"), State.CORRUPT, "config"),
    "no config": (lambda f: (f / "config.json").unlink(), State.CORRUPT, "config.json is missing"),
    "no loss": (
        lambda f: spoil(f, "summary.json", lambda s: s.pop("val_loss")),
        State.CORRUPT,
        "val_loss missing",
    ),
    "other tokens": (
        lambda f: spoil(f, "summary.json", lambda s: s.update(tokens=7)),
        State.CORRUPT,
        "tokens 7, which config.json makes 819200",
    ),
    "other workers": (
        lambda f: spoil(f, "config.json", lambda c: c.update(workers=8)),
        State.MISMATCH,
        "workers is 8 there and 4 here",
    ),
    "other model": (
        lambda f: spoil(f, "config.json", lambda c: c["model"].update(size="1m")),
        State.MISMATCH,
        "model.size is 1m there",
    ),
    "an elastic worker": (
        lambda f: spoil(f, "summary.json", lambda s: s.update(events={})),
        State.MISMATCH,
        "elastic",
    ),
    "no sizes": (
        lambda f: retell(f, "live_weights_bytes", "bytes"),
        State.CORRUPT,
        "live_weights_bytes",
    ),
    "no metrics": (lambda f: (f / "metrics.jsonl").write_text(""), State.CORRUPT, "metrics.jsonl"),
    "other corpus": (lambda f: RunFolder(f).note_data("xyz"), State.STRANGER, "fingerprint is xyz"),
    "unknown corpus": (lambda f: (f / "data.json").unlink(), State.STRANGER, "is not recorded"),
    "other size": (
        lambda f: spoil(f, "summary.json", lambda s: s.update(parameters=3)),
        State.STRANGER,
        "parameters is 3, not 2",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_folders_are_shown_and_left_alone(tmp_path, case: str) -> None:
    change, state, why = SPOILT[case]
    experiment, runner = Experiment(methods=("ddp", "diloco", "muloco")), Written(lambda c: 1.0)
    compare(experiment, tmp_path, nobody, runner)
    folder = tmp_path / "diloco-seed0"
    change(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = compare(experiment, tmp_path, nobody, runner)
    (trouble,) = found.troubles().items()
    assert trouble[0] == "diloco-seed0"
    assert trouble[1].state is state
    assert why in trouble[1].why
    assert found.statistics()["diloco"]["val_loss"] is None
    assert found.statistics()["ddp"]["val_loss_minus_baseline"] is None
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert len(runner.seen) == 3
    left_out = json.loads((tmp_path / "statistics.json").read_text())["left_out"]
    assert left_out["diloco-seed0"]["state"] == state.value


def test_runs_of_something_else_in_the_folder_are_shown(tmp_path) -> None:
    config = laptop("diloco")
    record(tmp_path / "mine-longer", dataclasses.replace(config, steps=9), 1.0)
    record(tmp_path / "mine-same", config, 1.0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").touch()
    found = compare(Experiment(methods=("ddp",)), tmp_path, nobody, Written(lambda c: 1.0))
    why = {name: standing.why for name, standing in found.strangers.items()}
    assert why.keys() == {"mine-longer", "mine-same", "broken"}
    assert why["mine-longer"] == "steps is 9, not 400"
    assert "no run that was asked for" in why["mine-same"]
    assert "cannot be read" in why["broken"]
    assert found.troubles() == {}


def test_a_run_of_another_k_is_no_run_of_this_one(tmp_path) -> None:
    runner = Written(lambda c: 1.0 * c.workers)
    compare(Experiment(methods=("ddp",), workers=(4,)), tmp_path, nobody, runner)
    found = compare(Experiment(methods=("ddp",), workers=(8,)), tmp_path, nobody, runner)
    assert found.troubles()["ddp-seed0"].state is State.MISMATCH
    assert json.loads((tmp_path / "compare.json").read_text()) == {"ddp": []}


# -- the search ------------------------------------------------------------------------------------

RATES = product(inner_lr=(1e-3, 2e-3, 4e-3))
# With seed 0 the highest rate is best; with the others it breaks.
EDGE = {1e-3: (3.0, 3.0, 3.0), 2e-3: (2.0, 2.1, 2.2), 4e-3: (1.9, 2.6, 2.7)}


def edge(config: TrainConfig) -> float:
    return EDGE[config.method.inner.lr][config.seed]


def searched(tmp_path: Path, loss: Callable[[TrainConfig], float] = edge) -> Comparison:
    experiment = Experiment(
        methods=("ddp", "diloco"), seeds=(0, 1, 2), tuning=Tuning(candidates={"": RATES})
    )
    return compare(experiment, tmp_path, nobody, Written(loss))


def test_a_search_repeats_the_best_two_and_does_not_fall_for_one_seed(tmp_path) -> None:
    found = searched(tmp_path)
    assert [c.chosen.settings for c in found.choices if c.chosen] == [Settings(inner_lr=2e-3)] * 2
    assert found.rows[0].values("val_loss") == {0: 2.0, 1: 2.1, 2: 2.2}
    assert len(list(tmp_path.glob("*/summary.json"))) == 2 * (3 + 2 * 2)
    assert (tmp_path / "ddp-inner_lr-0.002-seed1").is_dir()
    written = json.loads((tmp_path / "tuning.json").read_text())
    ddp = written["rows"]["ddp"]
    assert ddp["chosen"] == {"inner_lr": 0.002}
    assert ddp["at_the_edge_of"] == []
    assert "best 2 of 3" in ddp["why"]
    runs = {c["settings"]["inner_lr"]: c["runs"] for c in ddp["candidates"]}
    assert runs[0.001] == {"0": {"folder": "ddp-inner_lr-0.001-seed0", "val_loss": 3.0}}
    assert runs[0.004]["2"]["val_loss"] == 2.7
    assert found.troubles() == {}
    assert found.strangers == {}


def test_a_choice_at_the_edge_is_named(tmp_path) -> None:
    found = searched(tmp_path, lambda c: c.method.inner.lr + c.seed)
    assert found.choices[0].edges() == ["inner_lr"]
    highest = searched(tmp_path / "highest", lambda c: 1 - c.method.inner.lr)
    assert highest.choices[0].edges() == ["inner_lr"]
    one = Experiment(
        seeds=(0, 1), methods=("ddp",), tuning=Tuning(candidates={"": product(inner_lr=(0.1,))})
    )
    single = compare(one, tmp_path / "one", nobody, Written(lambda c: 1.0))
    assert single.choices[0].edges() == []


def test_a_search_that_is_done_runs_nothing(tmp_path) -> None:
    searched(tmp_path)

    def never(config: TrainConfig) -> float:
        raise AssertionError("ran again")

    assert searched(tmp_path, never).rows[0].values("val_loss") == {0: 2.0, 1: 2.1, 2: 2.2}


def test_a_rate_that_diverges_is_a_result(tmp_path) -> None:
    found = searched(tmp_path, lambda c: math.nan if c.method.inner.lr == 4e-3 else edge(c))
    assert found.choices[0].chosen is not None
    assert found.choices[0].chosen.settings == Settings(inner_lr=2e-3)
    assert found.troubles() == {}
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert "diverged" in json.dumps(written)
    everything = searched(tmp_path / "all", lambda c: math.nan)
    assert everything.choices[0].chosen is None
    assert everything.troubles()["ddp"].why == "all diverged"


def test_nothing_is_chosen_while_a_run_is_missing(tmp_path) -> None:
    def dies(config: TrainConfig) -> float:
        missing = config.method.name == "ddp" and config.method.inner.lr == 1e-3
        return math.inf if missing else edge(config)

    found = searched(tmp_path, dies)
    assert [choice.chosen is None for choice in found.choices] == [True, False]
    trouble = found.troubles()
    assert trouble["ddp-inner_lr-0.001-seed0"].state is State.FAILED
    assert "status -9" in trouble["ddp-inner_lr-0.001-seed0"].why
    mended = searched(tmp_path)
    assert mended.troubles() == {}
    assert mended.rows[0].values("val_loss") == {0: 2.0, 1: 2.1, 2: 2.2}


def test_every_method_gets_the_same_budget(tmp_path) -> None:
    rates = product(inner_lr=(1e-3, 2e-3), outer_lr=(0.7, 1.0))
    unequal = Experiment(seeds=(0, 1), tuning=Tuning(candidates={"": rates}))
    runner = Written(lambda c: c.method.inner.lr)
    with pytest.raises(ConfigurationError, match="ddp has 2 different candidates and diloco 4"):
        compare(unequal, tmp_path, nobody, runner)
    assert not runner.seen
    own = product(inner_lr=(1e-3, 2e-3, 4e-3, 8e-3))
    equal = dataclasses.replace(unequal, tuning=Tuning(candidates={"": rates, "ddp": own}))
    found = compare(equal, tmp_path, nobody, runner)
    assert {len(choice.tried) for choice in found.choices} == {4}
    assert json.loads((tmp_path / "tuning.json").read_text())["candidates_per_row"] == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": (0,)}, "one seed picks"),
        ({"inner_lr": (0.1,)}, "axis of the comparison"),
        ({"tuning": Tuning(candidates={"ddp": RATES}), "methods": ("diloco",)}, "for ddp only"),
    ],
)
def test_searches_that_cannot_work(tmp_path, fields: dict[str, Any], message: str) -> None:
    given = {"seeds": (0, 1), "tuning": Tuning(candidates={"": RATES})} | fields
    with pytest.raises(ConfigurationError, match=message):
        compare(Experiment(**given), tmp_path, nobody, Written(lambda c: 1.0))


def test_a_tuning_needs_candidates() -> None:
    for candidates in ({}, {"": ()}):
        with pytest.raises(ConfigurationError, match="no candidates"):
            Tuning(candidates=candidates)
    with pytest.raises(ConfigurationError, match="0 of them"):
        Tuning(candidates={"": RATES}, repeated=0)


# -- runs that are trained -------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path) -> Callable[[str], TrainConfig]:
    """A recipe of a few steps over a few lines; `killed` and `failing` are methods, too."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        lines = "".join(f"line {number * i % 97} of {number}\n" for i in range(60))
        (text / f"{number}.txt").write_text(lines)
    doomed = {
        "killed": Killed(file=str(tmp_path / "was-killed"), at=5),
        "failing": Failing(),
        "diverging": inner.SGD(lr=1e30),
    }

    def recipe(name: str) -> TrainConfig:
        config = laptop("diloco" if name in doomed else name)
        method = dataclasses.replace(config.method, sync_every=2)
        if name in doomed:
            method = dataclasses.replace(method, inner=doomed[name])
        return dataclasses.replace(
            config,
            method=method,
            data=Data(corpus=str(text), sequence_length=8, validation_sequences=8),
            workers=1,
            steps=6,
            global_batch=2,
            schedule=WarmupCosine(warmup_steps=2),
            periods=Periods(checkpoint_steps=2),
        )

    return recipe


def test_one_that_fails_is_shown_and_the_others_go_on(tmp_path, tiny) -> None:
    experiment = Experiment(recipe=tiny, methods=("failing", "diverging", "diloco"))
    out = tmp_path / "out"
    found = compare(experiment, out, nobody, InTurn())
    trouble = found.troubles()
    assert trouble.keys() == {"failing-seed0", "diverging-seed0"}
    assert trouble["failing-seed0"].state is State.FAILED
    assert "RuntimeError: the accelerator is on fire" in trouble["failing-seed0"].why
    assert trouble["diverging-seed0"].state is State.DIVERGED
    assert found.rows[2].runs[0]["steps"] == 6
    noted = json.loads((out / "failing-seed0" / "failed.json").read_text())
    assert noted["kind"] == "RuntimeError"
    assert json.loads((out / "diloco-seed0" / "data.json").read_text())["fingerprint"]


def test_a_run_that_somebody_else_writes_is_left_to_them(tmp_path, tiny) -> None:
    experiment, folder = Experiment(recipe=tiny, methods=("diloco",)), tmp_path / "o/diloco-seed0"
    (arm,) = arms_of(experiment)
    config = configure(experiment, arm, 0)
    machine = dataclasses.replace(config.machine, threads=1, device="cpu")
    with locked(folder):
        RunFolder(folder).open(dataclasses.replace(config, machine=machine).describe())
        before = {p.name for p in folder.iterdir()}
        found = compare(experiment, tmp_path / "o", nobody)
        assert "another process" in found.troubles()["diloco-seed0"].why
        assert {p.name for p in folder.iterdir()} == before
    assert compare(experiment, tmp_path / "o", nobody).troubles() == {}


def test_side_by_side_gives_the_same_bits_and_outlives_a_killed_process(tmp_path, tiny) -> None:
    experiment = Experiment(
        recipe=tiny, methods=("failing", "killed", "diloco"), changes={"machine.threads": 1}
    )
    side = compare(experiment, tmp_path / "side", nobody, SideBySide(2))
    assert side.troubles().keys() == {"failing-seed0"}
    assert "on fire" in side.troubles()["failing-seed0"].why
    # Killed in step 5, it went on from the checkpoint of step 4.
    assert (tmp_path / "was-killed").read_text() == ".."
    turn = compare(experiment, tmp_path / "turn", nobody, InTurn())
    for one, other in zip(side.rows[1:], turn.rows[1:], strict=True):
        assert one.runs[0]["outer_digest"] == other.runs[0]["outer_digest"]


def test_a_run_goes_on_with_the_threads_it_was_begun_with(tmp_path, tiny) -> None:
    experiment = Experiment(recipe=tiny, methods=("diloco",))
    (arm,) = arms_of(experiment)
    config = configure(experiment, arm, 0)
    machine = dataclasses.replace(config.machine, threads=3, device="cpu")
    out = tmp_path / "out"
    RunFolder(out / "diloco-seed0").open(dataclasses.replace(config, machine=machine).describe())
    standing = look(out / "diloco-seed0", config)
    assert standing.state is State.UNFINISHED
    assert standing.why == "it has no summary, none of 6 steps recorded"
    found = compare(experiment, out, nobody)
    assert found.troubles() == {}
    assert json.loads((out / "diloco-seed0" / "config.json").read_text())["machine"]["threads"] == 3
    explicit = dataclasses.replace(experiment, changes={"machine.threads": 2})
    trouble = compare(explicit, out, nobody).troubles()
    assert trouble["diloco-seed0"].why == "machine.threads is 3 there and 2 here"


def test_jobs_and_what_cannot_be_sent(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="0 jobs"):
        SideBySide(0)

    @dataclasses.dataclass(frozen=True)
    class Local(inner.InnerOptimizer):
        def build(self, model):
            raise AssertionError

    def recipe(text: str) -> TrainConfig:
        config = laptop(text)
        return dataclasses.replace(config, method=dataclasses.replace(config.method, inner=Local()))

    with pytest.raises(ConfigurationError, match="--jobs 1"):
        compare(Experiment(recipe=recipe, methods=("diloco",)), tmp_path, nobody, SideBySide(1))


def test_an_experiment_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from thinwire.experiments import Experiment\n"
        "def grid():\n    return Experiment(methods=('diloco',), workers=(1, 2))\n"
        "def wrong():\n    return 3\n"
    )
    assert find(f"{file}:grid").workers == (1, 2)
    with pytest.raises(ConfigurationError, match="int and not an Experiment"):
        find(f"{file}:wrong")
    with pytest.raises(ConfigurationError, match="no function"):
        find(f"{file}:none")
    with pytest.raises(ConfigurationError, match=r"FILE\.py:FUNCTION"):
        find("laptop")
