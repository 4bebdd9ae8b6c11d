"""Runs of an experiment that are trained, one after the other and in parallel."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from doomed import Doomed
from thinwire import inner
from thinwire.errors import ConfigurationError
from thinwire.experiments import Experiment, compare
from thinwire.experiments.grid import configure, specs_of
from thinwire.experiments.parallel import ParallelRunner
from thinwire.experiments.runners import PlannedRun, no_observer, one_by_one
from thinwire.runs.folder import RunFolder
from thinwire.runs.status import RunState, status_of
from thinwire.train.checkpoints import locked
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.observers import Observer
from training import corpus, tiny

__all__ = ["corpus", "tiny"]


@pytest.fixture
def of_method(tmp_path, tiny) -> Callable[[str], TrainConfig]:
    """A recipe of a few steps of one worker; `killed` and `failing` are methods, too."""
    doomed = {
        "killed": Doomed(how="kill_once", file=str(tmp_path / "was-killed")),
        "always-killed": Doomed(how="kill", file=str(tmp_path / "attempts")),
        "failing": Doomed(how="fail"),
        "noisy": Doomed(how="say"),
        "diverging": inner.SGD(lr=1e30),
    }

    def recipe(name: str) -> TrainConfig:
        sizes = {"workers": 1, "steps": 6, "global_batch": 2, "machine": Runtime()}
        config = tiny("diloco", periods=Intervals(checkpoint_steps=2), **sizes)
        slots = {"inner": doomed.get(name, config.method.inner), "sync_every": 2}
        return dataclasses.replace(config, method=dataclasses.replace(config.method, **slots))

    return recipe


@pytest.mark.slow_cases("two")
@pytest.mark.parametrize("runner", [one_by_one, ParallelRunner(2)], ids=["one", "two"])
def test_one_that_fails_says_so_at_once_and_has_a_log_and_others_go_on(
    tmp_path, of_method, runner
) -> None:
    changes = {"periods": Intervals(log_steps=2)}
    methods = ("failing", "diverging", "diloco")
    experiment = Experiment(recipe=of_method, methods=methods, changes=changes)
    out, heard = tmp_path / "out", Heard(list)
    found = compare(experiment, out, heard.of, runner)
    trouble = found.problems()
    assert trouble.keys() == {"failing-seed0", "diverging-seed0"}
    assert trouble["failing-seed0"].state is RunState.FAILED
    assert "RuntimeError: the accelerator is on fire" in trouble["failing-seed0"].why
    assert trouble["diverging-seed0"].state is RunState.DIVERGED
    assert found.rows[2].statuses[0].run.summary.steps == 6
    noted = json.loads((out / "failing-seed0" / "failed.json").read_text())
    assert noted["kind"] == "RuntimeError"
    assert json.loads((out / "diloco-seed0" / "data.json").read_text())["fingerprint"]
    begins, failed, ends = heard["failing seed 0"]
    assert (begins, ends) == ("begins", "ends")
    assert failed.startswith("failing seed 0 failed: RuntimeError: the accelerator is on fire; its")
    assert heard["diloco seed 0"] == ["begins", 2, 4, 6, "ends"]
    told = heard["diverging seed 0"]
    assert (told[0], told[-1]) == ("begins", "ends")
    assert " failed: NonFiniteError: cannot " in told[-2]
    # What thinwire refuses says all there is to say.
    (log,) = (out / "logs").iterdir()
    assert log.name == "failing-seed0.log"
    assert log.read_text().startswith("Traceback (most recent call last):")
    assert "on fire" in log.read_text()


def test_a_run_goes_on_with_the_threads_it_was_begun_with_if_nobody_writes_it(
    tmp_path, of_method
) -> None:
    experiment, folder = (
        Experiment(recipe=of_method, methods=("diloco",)),
        tmp_path / "o/diloco-seed0",
    )
    (spec,) = specs_of(experiment)
    config = configure(experiment, spec, 0)
    machine = dataclasses.replace(config.machine, threads=3, device="cpu")
    with locked(folder):
        RunFolder(folder).open(dataclasses.replace(config, machine=machine).describe())
        before = {p.name for p in folder.iterdir()}
        found = compare(experiment, tmp_path / "o", no_observer)
        assert "another process" in found.problems()["diloco-seed0"].why
        assert {p.name for p in folder.iterdir()} == before
    standing = status_of(folder, config.describe())
    assert standing.state is RunState.UNFINISHED
    assert standing.why == "it has no summary, none of 6 steps recorded"
    assert compare(experiment, tmp_path / "o", no_observer).problems() == {}
    assert json.loads((folder / "config.json").read_text())["machine"]["threads"] == 3
    explicit = dataclasses.replace(experiment, changes={"machine.threads": 2})
    trouble = compare(explicit, tmp_path / "o", no_observer).problems()
    assert trouble["diloco-seed0"].why == "machine.threads is 3 there and 2 here"


@pytest.mark.slow
def test_parallel_runs_give_the_same_bits_and_outlive_a_killed_process(tmp_path, of_method) -> None:
    experiment = Experiment(
        recipe=of_method, methods=("failing", "killed", "diloco"), changes={"machine.threads": 1}
    )
    side = compare(experiment, tmp_path / "side", no_observer, ParallelRunner(2))
    assert side.problems().keys() == {"failing-seed0"}
    assert "on fire" in side.problems()["failing-seed0"].why
    # Killed in step 5, it went on from the checkpoint of step 4.
    assert (tmp_path / "was-killed").read_text() == ".."
    # Where an SGD was made, torch runs the hooks of a class derived from it twice a step.
    torch.optim.SGD([torch.zeros(1)])
    turn = compare(experiment, tmp_path / "turn", no_observer, one_by_one)
    for one, other in zip(side.rows[1:], turn.rows[1:], strict=True):
        digests = [row.statuses[0].run.summary.described["outer_digest"] for row in (one, other)]
        assert digests[0] == digests[1]


class Heard(defaultdict):
    """What observers are told of each run, in the order in which they are told."""

    def of(self, run: PlannedRun) -> Observer:
        told, observer = self[run.title], Observer()
        told.append("begins")
        observer.record = lambda record: told.append(record["step"])
        observer.fail = told.append
        observer.close = lambda: told.append("ends")
        return observer


@pytest.mark.slow
def test_a_process_that_dies_twice_is_given_up_and_one_that_prints_has_a_log(
    tmp_path, of_method, capfd
) -> None:
    methods, heard = ("always-killed", "noisy", "diloco"), Heard(list)
    experiment = Experiment(recipe=of_method, methods=methods, baseline="diloco")
    found = compare(experiment, tmp_path / "out", heard.of, ParallelRunner(2))
    (problem,) = found.problems().values()
    assert problem.state is RunState.FAILED
    assert problem.why == "killed: its process ended with status -9"
    assert (tmp_path / "attempts").read_text() == ".."
    said = heard["always-killed seed 0"]
    assert said[::3] + said[2::3] == ["begins", "begins", "ends", "ends"]
    assert all(problem.why in text for text in said[1::3])
    assert found.rows[2].losses
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    printed = (tmp_path / "out" / "logs" / "noisy-seed0.log").read_text()
    for where in ("to stdout", "to stderr", "past Python"):
        assert f"said {where}" in printed


def test_nothing_runs_if_one_configuration_cannot_be_sent(tmp_path, of_method) -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(inner.InnerOptimizer):
        def build(self, model):
            raise AssertionError

    def recipe(text: str) -> TrainConfig:
        config = of_method("diloco")
        slots = dataclasses.replace(config.method, inner=Local())
        return dataclasses.replace(config, method=slots) if text == "local" else config

    experiment = Experiment(recipe=recipe, methods=("diloco", "local"))
    with pytest.raises(ConfigurationError, match="0 jobs"):
        ParallelRunner(0)
    with pytest.raises(ConfigurationError, match=r"send local seed 0 to another process.*--jobs 1"):
        compare(experiment, tmp_path / "out", no_observer, ParallelRunner(1))
    assert not (tmp_path / "out").exists()


def test_which_runs_are_wanted_is_told_before_they_begin(tmp_path, of_method) -> None:
    told: list[list[tuple[str, RunState]]] = []
    for seeds in ((0,), (0, 1)):
        compare(
            Experiment(recipe=of_method, methods=("diloco",), seeds=seeds),
            tmp_path / "out",
            no_observer,
            one_by_one,
            lambda runs: told.append([(run.title, status.state) for run, status in runs]),
        )
    first, second = ((f"diloco seed {seed}", RunState.ABSENT) for seed in (0, 1))
    assert told == [[first], [(first[0], RunState.FINISHED), second]]
    assert not (tmp_path / "out" / "logs").exists()
