"""Which runs can be compared or are variants of each other, and what is reckoned over seeds."""

import math

import pytest

from run_folders import change, config_of, runs_in, write_run
from thinwire.runs.comparable import common_ground, not_comparable
from thinwire.runs.statistics import Estimate, estimate, mean_curve, paired_difference
from thinwire.runs.status import read_run
from thinwire.runs.variants import repeated_runs, variants_of
from thinwire.train.data import Data


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"steps": 40}, "tokens is 5120, not 2944"),
        ({"data": Data(sequence_length=8)}, "data.sequence_length is 8, not 16"),
        ({"steps": 46, "global_batch": 4}, "global_batch is 4, not 8; steps is 46, not 23"),
    ],
)
def test_other_tokens_batches_and_data_are_left_out(tmp_path, other, reason: str) -> None:
    assert not_comparable([]) == {}
    spoilt = write_run(tmp_path / "other", config_of("muloco", **other))
    for seed in (0, 1):
        write_run(tmp_path / f"run{seed}", config_of("diloco", seed=seed))
    ((folder, why),) = not_comparable(runs_in(tmp_path)).items()
    assert folder == spoilt
    assert reason in why


def test_a_worker_that_may_leave_is_never_one_of_a_fixed_team(tmp_path) -> None:
    folder = write_run(tmp_path / "a", config_of("diloco"))
    (fixed,) = runs_in(tmp_path)
    change(folder / "summary.json", events={})
    assert common_ground(fixed) != common_ground(read_run(folder).run)


def test_a_copy_of_a_run_is_no_second_seed_and_threads_make_no_other_method(tmp_path) -> None:
    a = write_run(tmp_path / "a", config_of("diloco"))
    b = write_run(tmp_path / "b", config_of("diloco"))
    why = f"the same configuration and seed as {a}, which is shown"
    assert repeated_runs(runs_in(tmp_path)) == {b: why}
    change(a / "config.json", machine__threads=7, periods__log_steps=1)
    write_run(b, config_of("diloco", seed=1))
    (variant,) = variants_of(runs_in(tmp_path))
    assert variant.loss.seeds == (0, 1)


def test_errors_and_paired_differences_by_hand() -> None:
    # mean 4, deviations -2 0 2 -> s^2 = 8 / 2 = 4, s = 2, 2 / sqrt 3
    found = estimate({0: 2.0, 1: 4.0, 2: 6.0})
    assert found.standard_error == pytest.approx(2 / math.sqrt(3), rel=1e-15)
    assert estimate({0: 5.0, 1: 5.0}).standard_error == 0.0
    assert estimate({4: 2.0}) == Estimate(mean=2.0, standard_error=None, seeds=(4,))
    assert estimate(dict.fromkeys(range(7), 0.1)).text(".1f") == "0.1 ± 0.0"
    found = paired_difference({2: 3.5, 0: 1.0, 7: 100.0}, {0: 0.5, 2: 1.0, 1: -100.0})
    # differences 0.5 and 2.5: mean 1.5, s = sqrt 2, s / sqrt 2 = 1
    assert (found.seeds, found.mean) == ((0, 2), 1.5)
    assert found.standard_error == pytest.approx(1.0, rel=1e-15)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_mean_has_only_steps_that_all_runs_have() -> None:
    runs = {0: {1: 1.0, 2: 2.0, 3: 3.0}, 1: {2: 2.0, 3: 3.0, 5: 5.0}}
    assert list(mean_curve(runs)) == [2, 3]
    assert mean_curve({0: {1: 1.0}, 1: {}}) == mean_curve({}) == {}
