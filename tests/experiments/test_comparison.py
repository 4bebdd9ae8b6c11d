"""Experiments: their rows, their runs, what a search chooses, and what is told apart."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from run_folders import change, write_run
from thinwire import outer
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.experiments import Experiment, Rates, Tuning, compare, load_experiment, product
from thinwire.experiments.comparison import Comparison
from thinwire.experiments.grid import configure, specs_of, with_rates
from thinwire.experiments.runners import MakeObserver, PlannedRun, Runner, no_observer
from thinwire.runs.folder import RunFolder
from thinwire.runs.status import RunState, note_failure
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop


class Written:
    """Writes what a run would; NaN is one that diverges, infinity one that fails."""

    def __init__(self, loss: Callable[[TrainConfig], float] = lambda config: 1.0) -> None:
        self.loss, self.seen = loss, list[str]()

    def __call__(self, runs: Sequence[PlannedRun], make_observer: MakeObserver) -> list[str | None]:
        self.seen += [run.folder.name for run in runs]
        return [self._one(run.folder, run.config, self.loss(run.config)) for run in runs]

    def _one(self, folder: Path, config: TrainConfig, loss: float) -> str | None:
        RunFolder(folder).open(config.describe())
        if math.isfinite(loss):
            return RunFolder(write_run(folder, config, loss=loss)).note_data("abc")
        kind = OSError if math.isinf(loss) else NonFiniteError
        note_failure(folder, kind.__name__, f"the loss is {loss}")
        return f"{kind.__name__}: the loss is {loss}"


def compared(folder: Path, runner: Runner | None = None, **fields: Any) -> Comparison:
    return compare(Experiment(**fields), folder, no_observer, runner or Written())


RATES = product(inner_lr=(1e-3, 2e-3, 4e-3))
SEARCH = {"seeds": (0, 1), "tuning": Tuning(candidates={"": RATES})}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"methods": ()}, "methods is empty"),
        ({"seeds": ()}, "seeds is empty"),
        ({"workers": (3,)}, "global batch of 16"),
        ({"workers": (4, 0)}, "workers to 0"),
        ({"sync_every": (0,)}, "set sync_every to 0"),
        ({"changes": {"stepps": 3}}, "stepps"),
        ({"changes": {"seed": 3}}, "change seed; because seeds sets it for every run"),
        ({"changes": {"machine.precision": "fp8"}}, "precision 'fp8'"),
        ({"changes": {"data.length": 3}}, "length"),
        ({"baseline": "sparseloco"}, "the rows are ddp, diloco, muloco"),
        ({"methods": ("diloco",), "recipe": lambda text: None}, "NoneType and not a TrainConfig"),
        (
            {"recipe": lambda t: dataclasses.replace(laptop(t), steps=(400, 800)[t == "muloco"])},
            "steps is 800, not 400",
        ),
        (SEARCH | {"seeds": (0,)}, "one seed picks"),
        (SEARCH | {"inner_lr": (0.1,)}, "axis of the comparison"),
        (
            SEARCH | {"tuning": Tuning(candidates={"ddp": RATES}), "methods": ("ddp", "diloco")},
            "for ddp only",
        ),
        (
            SEARCH | {"tuning": Tuning(candidates={"": RATES, "ddp": RATES, "x": RATES})},
            "tune x; because it is not compared",
        ),
    ],
)
def test_experiments_that_cannot_work(tmp_path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compared(tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_finished_runs_are_kept_and_differences_are_paired(tmp_path) -> None:
    table = {"ddp": 1.0, "diloco": 2.0, "muloco": 1.5}
    runner = Written(lambda c: table[c.method.name] + 10 * c.seed * (1 + (c.method.name == "ddp")))
    first = compared(tmp_path, runner, seeds=(0, 1))
    assert len(runner.seen) == 6
    assert first.problems() == {}
    again = compared(tmp_path, runner, seeds=(0, 1, 2))
    assert sorted(runner.seen[6:]) == ["ddp-seed2", "diloco-seed2", "muloco-seed2"]
    found = again.statistics()
    assert found["muloco"]["val_loss"]["mean"] == pytest.approx(11.5)
    paired = {"mean": -0.5, "standard_error": 0.0, "seeds": (0, 1, 2)}
    assert found["muloco"]["val_loss_minus_baseline"] == paired
    ddp = found["ddp"]["val_loss_minus_baseline"]
    assert ddp["mean"] == pytest.approx(9.0)  # -1, 9, 19
    assert ddp["standard_error"] == pytest.approx(10 / math.sqrt(3))
    assert found["diloco"]["val_loss_minus_baseline"] is None
    written = json.loads((tmp_path / "compare.json").read_text())
    assert [run["seed"] for run in written["ddp"]] == [0, 1, 2]
    rows = json.loads((tmp_path / "statistics.json").read_text())["rows"]
    assert rows == json.loads(json.dumps(found))


def test_all_rows_have_the_first_seed_before_any_has_another(tmp_path) -> None:
    runner = Written()
    compared(tmp_path, runner, methods=("ddp", "diloco"), seeds=(3, 1))
    assert runner.seen == ["ddp-seed3", "diloco-seed3", "ddp-seed1", "diloco-seed1"]


def test_a_baseline_lies_at_the_same_place_of_the_grid(tmp_path) -> None:
    grid = {"methods": ("ddp", "diloco", "muloco:bits=2", "muloco:bits=4"), "workers": (2, 4)}
    found = compared(tmp_path, **grid).baselines
    assert found["muloco:bits=4 K=2"] == "diloco K=2"
    assert found["ddp K=4"] == "diloco K=4"
    pinned = compared(tmp_path, **grid, baseline="diloco K=4").baselines
    assert set(pinned.values()) == {"diloco K=4"}


# What is wrong with one folder by itself is in tests/runs, as is other data or another size.
def rewrite(file: str, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: change(folder / file, **fields)


@pytest.mark.parametrize(
    ("spoil", "state", "why"),
    [
        (rewrite("config.json", workers=8), RunState.MISMATCH, "workers is 8 there and 4 here"),
        (rewrite("summary.json", events={}), RunState.MISMATCH, "elastic"),
        (lambda f: RunFolder(f).note_data("xyz"), RunState.UNRELATED, "fingerprint is xyz"),
    ],
)
def test_spoilt_folders_are_shown_and_left_alone(tmp_path, spoil, state, why: str) -> None:
    runner, folder = Written(), tmp_path / "diloco-seed0"
    compared(tmp_path, runner)
    spoil(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = compared(tmp_path, runner)
    ((name, status),) = found.problems().items()
    assert (name, status.state) == ("diloco-seed0", state)
    assert why in status.why
    assert found.statistics()["diloco"]["val_loss"] is None
    assert found.statistics()["ddp"]["val_loss_minus_baseline"] is None
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert len(runner.seen) == 3
    assert json.loads((tmp_path / "compare.json").read_text())["diloco"] == []
    left_out = json.loads((tmp_path / "statistics.json").read_text())["left_out"]
    assert left_out["diloco-seed0"]["state"] == state.value


# With seed 0 the highest rate is best; with the others it breaks.
EDGE = {1e-3: (3.0, 3.0, 3.0), 2e-3: (2.0, 2.1, 2.2), 4e-3: (1.9, 2.6, 2.7)}


def edge(config: TrainConfig) -> float:
    return EDGE[config.method.inner.lr][config.seed]


def searched(tmp_path: Path, loss: Callable[[TrainConfig], float] = edge) -> Comparison:
    fields = {"methods": ("ddp", "diloco"), "tuning": Tuning(candidates={"": RATES})}
    return compared(tmp_path, Written(loss), seeds=(0, 1, 2), **fields)


def test_a_search_repeats_the_best_two_and_does_not_fall_for_one_seed(tmp_path) -> None:
    found = searched(tmp_path)
    assert [c.chosen.rates for c in found.tuning if c.chosen] == [Rates(inner_lr=2e-3)] * 2
    assert found.rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}
    assert len(list(tmp_path.glob("*/summary.json"))) == 2 * (3 + 2 * 2)
    assert (tmp_path / "ddp-inner_lr-0.002-seed1").is_dir()
    ddp = json.loads((tmp_path / "tuning.json").read_text())["rows"]["ddp"]
    assert ddp["chosen"] == {"inner_lr": 0.002}
    assert ddp["at_the_edge_of"] == []
    assert "best 2 of 3" in ddp["why"]
    runs = {c["settings"]["inner_lr"]: c["runs"] for c in ddp["candidates"]}
    assert runs[0.001] == {"0": {"folder": "ddp-inner_lr-0.001-seed0", "val_loss": 3.0}}
    assert runs[0.004]["2"]["val_loss"] == 2.7
    assert found.problems() == {}

    def never(config: TrainConfig) -> float:
        raise AssertionError("ran again")

    assert searched(tmp_path, never).rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}


def test_a_choice_at_the_edge_is_named_and_a_rate_that_diverges_is_a_result(tmp_path) -> None:
    for name, loss in (
        ("lowest", lambda c: c.method.inner.lr + c.seed),
        ("highest", lambda c: 1 - c.method.inner.lr),
    ):
        assert searched(tmp_path / name, loss).tuning[0].edges() == ["inner_lr"]
    one = SEARCH | {"tuning": Tuning(candidates={"": product(inner_lr=(0.1,))})}
    assert compared(tmp_path / "one", methods=("ddp",), **one).tuning[0].edges() == []
    found = searched(tmp_path, lambda c: math.nan if c.method.inner.lr == 4e-3 else edge(c))
    assert found.tuning[0].chosen.rates == Rates(inner_lr=2e-3)
    assert found.problems() == {}
    assert "diverged" in (tmp_path / "tuning.json").read_text()
    everything = searched(tmp_path / "all", lambda c: math.nan)
    assert everything.tuning[0].chosen is None
    assert everything.problems()["ddp"].why == "every candidate diverged with at least one seed"


def test_nothing_is_chosen_while_a_run_is_missing_and_one_that_failed_is_tried_again(
    tmp_path,
) -> None:
    def fails(config: TrainConfig) -> float:
        missing = config.method.name == "ddp" and config.method.inner.lr == 1e-3
        return math.inf if missing else edge(config)

    found = searched(tmp_path, fails)
    assert [choice.chosen is None for choice in found.tuning] == [True, False]
    trouble = found.problems()["ddp-inner_lr-0.001-seed0"]
    assert trouble.state is RunState.FAILED
    assert "OSError: the loss is inf" in trouble.why
    mended = searched(tmp_path)
    assert mended.problems() == {}
    assert mended.rows[0].losses == {0: 2.0, 1: 2.1, 2: 2.2}


def test_every_method_gets_the_same_budget_of_candidates(tmp_path) -> None:
    rates = product(inner_lr=(1e-3, 2e-3), outer_lr=(0.7, 1.0))
    runner = Written(lambda c: c.method.inner.lr)
    with pytest.raises(ConfigurationError, match="ddp has 2 different candidates and diloco 4"):
        compared(tmp_path, runner, seeds=(0, 1), tuning=Tuning(candidates={"": rates}))
    assert not runner.seen
    own = product(inner_lr=(1e-3, 2e-3, 4e-3, 8e-3))
    equal = Tuning(candidates={"": rates, "ddp": own})
    found = compared(tmp_path, runner, seeds=(0, 1), tuning=equal)
    assert {len(choice.tried) for choice in found.tuning} == {4}
    assert json.loads((tmp_path / "tuning.json").read_text())["candidates_per_row"] == 4
    for candidates in ({}, {"": ()}):
        with pytest.raises(ConfigurationError, match="no candidates"):
            Tuning(candidates=candidates)
    with pytest.raises(ConfigurationError, match="0 of them"):
        Tuning(candidates={"": RATES}, repeated=0)


def labels(**fields: Any) -> list[str]:
    return [spec.label for spec in specs_of(Experiment(**fields))]


def test_rows_and_folders_of_a_grid_and_single_values_leave_names_as_they_were() -> None:
    single = {"workers": (2,), "sync_every": (5,), "inner_lr": (0.1,), "outer_lr": (0.7,)}
    experiment = Experiment(methods=("ddp", "diloco"), **single)
    ddp, diloco = specs_of(experiment)
    assert [spec.folder(3) for spec in (ddp, diloco)] == ["ddp-seed3", "diloco-seed3"]
    config = configure(experiment, diloco, 3)
    assert (config.workers, config.method.sync_every, config.seed) == (2, 5, 3)
    assert (config.method.inner.lr, config.method.outer.lr) == (0.1, 0.7)
    assert configure(experiment, ddp, 3).method.sync_every == 1
    experiment = Experiment(methods=("diloco",), workers=(1, 8), sync_every=(5, 15))
    specs = specs_of(experiment)
    assert specs[-1].folder(0) == "diloco-K-8-H-15-seed0"
    assert len({spec.folder(0) for spec in specs}) == 4
    configs = [configure(experiment, spec, 0) for spec in specs]
    assert {config.tokens_per_step for config in configs} == {16 * 128}
    assert [(c.workers, c.method.sync_every) for c in configs] == [(1, 5), (1, 15), (8, 5), (8, 15)]


def test_an_interval_in_a_name_stays_that_of_the_name() -> None:
    for axis in ((15,), (15, 30)):
        experiment = Experiment(methods=("diloco:sync_every=10",), sync_every=axis)
        (spec,) = specs_of(experiment)
        assert configure(experiment, spec, 0).method.sync_every == 10


def test_what_has_no_meaning_for_a_method_is_one_row() -> None:
    grid = {"sync_every": (5, 15), "outer_lr": (0.7, 1.0)}
    assert labels(methods=("ddp",), sync_every=(5, 15), outer_lr=(0.7, 1.0)) == ["ddp"]
    found = labels(methods=("ddp", "diloco", "muloco:bits=4"), **grid)
    assert len(found) == len(set(found)) == 1 + 4 + 4
    assert "muloco:bits=4 H=15 outer_lr=0.7" in found
    # What a method's text says is kept on an axis.
    assert labels(methods=("diloco:sync_every=60",), sync_every=(5, 15)) == ["diloco:sync_every=60"]
    assert labels(methods=("diloco", "diloco"), seeds=(0, 0)) == ["diloco"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:wrong", "int and not an Experiment"),
        ("mine.py:none", "no function"),
        ("laptop", r"FILE\.py:FUNCTION"),
    ],
)
def test_what_is_no_experiment_is_refused(tmp_path, monkeypatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def wrong():\n    return 3\n")
    with pytest.raises(ConfigurationError, match=message):
        load_experiment(name)


def test_rates_go_to_the_fields_that_an_outer_optimizer_has() -> None:
    rates = Rates(outer_lr=0.8, outer_momentum=0.4)
    for name, expected in (
        ("diloco", outer.SGD(lr=0.8, momentum=0.4, nesterov=True)),
        ("noloco", outer.Gossip(lr=0.8, momentum=0.4)),
    ):
        found = with_rates(laptop(name).method, sync_every=7, rates=rates)
        assert (found.outer, found.sync_every) == (expected, 7)
