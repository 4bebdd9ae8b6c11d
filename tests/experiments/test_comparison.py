"""Experiments: their rows, their runs, what a search chooses, and what is told apart."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from run_folders import STATES
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.experiments import (
    Experiment,
    Rates,
    Runner,
    RunState,
    Tuning,
    compare,
    product,
)
from thinwire.experiments.comparison import Comparison
from thinwire.experiments.runners import MakeObserver, PlannedRun, RunFailure, no_observer
from thinwire.runs.folder import RunFolder, write_json
from thinwire.runs.status import note_failure
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop


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
        compare(Experiment(**fields), tmp_path / "out", no_observer, Written(lambda config: 1.0))
    assert not (tmp_path / "out").exists()


def test_rows_of_other_tokens_are_refused(tmp_path) -> None:
    def unfair(text: str) -> TrainConfig:
        return dataclasses.replace(laptop(text), steps=800 if text == "muloco" else 400)

    with pytest.raises(ConfigurationError, match=r"steps is 800, not 400"):
        compare(Experiment(recipe=unfair), tmp_path, no_observer, Written(lambda config: 1.0))
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

    def carry_out(
        self, runs: Sequence[PlannedRun], make_observer: MakeObserver
    ) -> list[RunFailure | None]:
        return [self._one(run) for run in runs]

    def _one(self, run: PlannedRun) -> RunFailure | None:
        self.seen.append(run.folder.name)
        loss = self.loss(run.config)
        if math.isfinite(loss):
            record(run.folder, run.config, loss)
            return None
        RunFolder(run.folder).open(run.config.describe())
        if math.isinf(loss):
            return RunFailure(kind="killed", why="its process ended with status -9")
        note_failure(run.folder, NonFiniteError.__name__, "the loss is nan")
        return RunFailure(kind=NonFiniteError.__name__, why="the loss is nan")


def test_finished_runs_are_kept_and_differences_are_paired(tmp_path) -> None:
    table = {"ddp": 1.0, "diloco": 2.0, "muloco": 1.5}
    runner = Written(lambda c: table[c.method.name] + 10 * c.seed * (1 + (c.method.name == "ddp")))
    experiment = Experiment(seeds=(0, 1))
    first = compare(experiment, tmp_path, no_observer, runner)
    assert len(runner.seen) == 6
    assert first.problems() == {}
    again = compare(dataclasses.replace(experiment, seeds=(0, 1, 2)), tmp_path, no_observer, runner)
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
    found = compare(grid, tmp_path, no_observer, runner).baselines
    assert found["muloco:bits=4 K=2"] == "diloco K=2"
    assert found["ddp K=4"] == "diloco K=4"
    pinned = dataclasses.replace(grid, baseline="diloco K=4")
    assert set(compare(pinned, tmp_path, no_observer, runner).baselines.values()) == {"diloco K=4"}


def spoil(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    write_json(folder / name, data)


def of(name: str, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: spoil(folder, name, lambda data: data.update(fields))


# What is wrong with one folder by itself is in tests/runs/test_find.py.
SPOILT: dict[str, tuple[Callable[[Path], object], RunState, str]] = {
    "half a summary": (
        lambda f: (f / "summary.json").write_text('{"val_loss": 1.'),
        RunState.CORRUPT,
        "summary.json cannot be read",
    ),
    "other workers": (
        of("config.json", workers=8),
        RunState.MISMATCH,
        "workers is 8 there and 4 here",
    ),
    "other model": (
        of("config.json", model={"kind": "Model", "size": "1m"}),
        RunState.MISMATCH,
        "model.size is 1m there",
    ),
    "an elastic worker": (of("summary.json", events={}), RunState.MISMATCH, "elastic"),
    "other corpus": (
        lambda f: RunFolder(f).note_data("xyz"),
        RunState.UNRELATED,
        "fingerprint is xyz",
    ),
    "unknown corpus": (lambda f: (f / "data.json").unlink(), RunState.UNRELATED, "is not recorded"),
    "other size": (
        of("summary.json", parameters=3),
        RunState.UNRELATED,
        "parameters is 3, not 2",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_folders_are_shown_and_left_alone(tmp_path, case: str) -> None:
    change, state, why = SPOILT[case]
    experiment, runner = Experiment(methods=("ddp", "diloco", "muloco")), Written(lambda c: 1.0)
    compare(experiment, tmp_path, no_observer, runner)
    folder = tmp_path / "diloco-seed0"
    change(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = compare(experiment, tmp_path, no_observer, runner)
    (trouble,) = found.problems().items()
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
    found = compare(Experiment(methods=("ddp",)), tmp_path, no_observer, Written(lambda c: 1.0))
    why = {name: standing.why for name, standing in found.unrelated.items()}
    assert why.keys() == {"mine-longer", "mine-same", "broken"}
    assert why["mine-longer"] == "steps is 9, not 400"
    assert "no run that was asked for" in why["mine-same"]
    assert "cannot be read" in why["broken"]
    assert found.problems() == {}


def test_a_run_of_another_k_is_no_run_of_this_one(tmp_path) -> None:
    runner = Written(lambda c: 1.0 * c.workers)
    compare(Experiment(methods=("ddp",), workers=(4,)), tmp_path, no_observer, runner)
    found = compare(Experiment(methods=("ddp",), workers=(8,)), tmp_path, no_observer, runner)
    assert found.problems()["ddp-seed0"].state is RunState.MISMATCH
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
    return compare(experiment, tmp_path, no_observer, Written(loss))


def test_a_search_repeats_the_best_two_and_does_not_fall_for_one_seed(tmp_path) -> None:
    found = searched(tmp_path)
    assert [c.chosen.rates for c in found.tuning if c.chosen] == [Rates(inner_lr=2e-3)] * 2
    assert found.rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}
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
    assert found.problems() == {}
    assert found.unrelated == {}


def test_a_choice_at_the_edge_is_named(tmp_path) -> None:
    found = searched(tmp_path, lambda c: c.method.inner.lr + c.seed)
    assert found.tuning[0].edges() == ["inner_lr"]
    highest = searched(tmp_path / "highest", lambda c: 1 - c.method.inner.lr)
    assert highest.tuning[0].edges() == ["inner_lr"]
    one = Experiment(
        seeds=(0, 1), methods=("ddp",), tuning=Tuning(candidates={"": product(inner_lr=(0.1,))})
    )
    single = compare(one, tmp_path / "one", no_observer, Written(lambda c: 1.0))
    assert single.tuning[0].edges() == []


def test_a_search_that_is_done_runs_nothing(tmp_path) -> None:
    searched(tmp_path)

    def never(config: TrainConfig) -> float:
        raise AssertionError("ran again")

    assert searched(tmp_path, never).rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}


def test_a_rate_that_diverges_is_a_result(tmp_path) -> None:
    found = searched(tmp_path, lambda c: math.nan if c.method.inner.lr == 4e-3 else edge(c))
    assert found.tuning[0].chosen is not None
    assert found.tuning[0].chosen.rates == Rates(inner_lr=2e-3)
    assert found.problems() == {}
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert "diverged" in json.dumps(written)
    everything = searched(tmp_path / "all", lambda c: math.nan)
    assert everything.tuning[0].chosen is None
    assert everything.problems()["ddp"].why == "all diverged"


def test_nothing_is_chosen_while_a_run_is_missing(tmp_path) -> None:
    def dies(config: TrainConfig) -> float:
        missing = config.method.name == "ddp" and config.method.inner.lr == 1e-3
        return math.inf if missing else edge(config)

    found = searched(tmp_path, dies)
    assert [choice.chosen is None for choice in found.tuning] == [True, False]
    trouble = found.problems()
    assert trouble["ddp-inner_lr-0.001-seed0"].state is RunState.FAILED
    assert "status -9" in trouble["ddp-inner_lr-0.001-seed0"].why
    mended = searched(tmp_path)
    assert mended.problems() == {}
    assert mended.rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}


def test_every_method_gets_the_same_budget(tmp_path) -> None:
    rates = product(inner_lr=(1e-3, 2e-3), outer_lr=(0.7, 1.0))
    unequal = Experiment(seeds=(0, 1), tuning=Tuning(candidates={"": rates}))
    runner = Written(lambda c: c.method.inner.lr)
    with pytest.raises(ConfigurationError, match="ddp has 2 different candidates and diloco 4"):
        compare(unequal, tmp_path, no_observer, runner)
    assert not runner.seen
    own = product(inner_lr=(1e-3, 2e-3, 4e-3, 8e-3))
    equal = dataclasses.replace(unequal, tuning=Tuning(candidates={"": rates, "ddp": own}))
    found = compare(equal, tmp_path, no_observer, runner)
    assert {len(choice.tried) for choice in found.tuning} == {4}
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
        compare(Experiment(**given), tmp_path, no_observer, Written(lambda c: 1.0))


def test_a_tuning_needs_candidates() -> None:
    for candidates in ({}, {"": ()}):
        with pytest.raises(ConfigurationError, match="no candidates"):
            Tuning(candidates=candidates)
    with pytest.raises(ConfigurationError, match="0 of them"):
        Tuning(candidates={"": RATES}, repeated=0)
