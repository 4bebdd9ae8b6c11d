"""The rows of an experiment: their labels, folders and configurations."""

from typing import Any

import pytest

from thinwire import outer
from thinwire.errors import ConfigurationError
from thinwire.experiments import Experiment, load_experiment
from thinwire.experiments.experiment import Rates
from thinwire.experiments.grid import configure, specs_of, with_rates
from thinwire.train import recipes


def labels(**fields: Any) -> list[str]:
    return [spec.label for spec in specs_of(Experiment(**fields))]


def test_single_values_leave_names_as_they_were() -> None:
    experiment = Experiment(
        methods=("ddp", "diloco"), workers=(2,), sync_every=(5,), inner_lr=(0.1,), outer_lr=(0.7,)
    )
    ddp, diloco = specs_of(experiment)
    assert [spec.folder(3) for spec in (ddp, diloco)] == ["ddp-seed3", "diloco-seed3"]
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
    specs = specs_of(experiment)
    assert specs[-1].folder(0) == "diloco-K-8-H-15-seed0"
    assert len({spec.folder(0) for spec in specs}) == 4
    configs = [configure(experiment, spec, 0) for spec in specs]
    assert {config.tokens_per_step for config in configs} == {16 * 128}
    assert [(c.workers, c.method.sync_every) for c in configs] == [(1, 5), (1, 15), (8, 5), (8, 15)]


def test_what_a_methods_text_says_is_kept_on_an_axis() -> None:
    both = ("muloco", "muloco:bits=1")
    assert labels(methods=both, bits=(2, 4)) == ["muloco:bits=2", "muloco:bits=4", "muloco:bits=1"]
    assert labels(methods=("diloco:sync_every=60",), sync_every=(5, 15)) == ["diloco:sync_every=60"]
    assert labels(methods=("diloco", "diloco"), seeds=(0, 0)) == ["diloco"]


def test_an_experiment_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from thinwire.experiments import Experiment\n"
        "def grid():\n    return Experiment(methods=('diloco',), workers=(1, 2))\n"
        "def wrong():\n    return 3\n"
    )
    assert load_experiment(f"{file}:grid").workers == (1, 2)
    with pytest.raises(ConfigurationError, match="int and not an Experiment"):
        load_experiment(f"{file}:wrong")
    with pytest.raises(ConfigurationError, match="no function"):
        load_experiment(f"{file}:none")
    with pytest.raises(ConfigurationError, match=r"FILE\.py:FUNCTION"):
        load_experiment("laptop")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("diloco", outer.SGD(lr=0.8, momentum=0.4, nesterov=True)),
        ("noloco", outer.Gossip(lr=0.8, momentum=0.4)),
    ],
)
def test_rates_go_to_the_fields_that_an_outer_optimizer_has(method: str, expected) -> None:
    rates = Rates(outer_lr=0.8, outer_momentum=0.4)
    found = with_rates(recipes.laptop(method).method, sync_every=7, rates=rates)
    assert (found.outer, found.sync_every) == (expected, 7)
