"""Means, standard errors and paired differences, by hand."""

import math

import pytest

from thinwire.runs.statistics import estimate, mean_curve, paired_difference, standard_error


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


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert estimate({0: 5.0}).standard_error is None
    assert estimate({0: 1.0, 1: 2.0, 2: 6.0}).standard_error == pytest.approx(math.sqrt(7 / 3))
    assert estimate(dict.fromkeys(range(7), 0.1)).text(".1f") == "0.1 ± 0.0"


def test_a_mean_has_only_steps_that_all_runs_have() -> None:
    runs = {0: {1: 1.0, 2: 2.0, 3: 3.0}, 1: {2: 2.0, 3: 3.0, 5: 5.0}}
    assert mean_curve(runs).steps == (2, 3)
    assert mean_curve({0: {1: 1.0}, 1: {}}).steps == ()
    assert mean_curve({}).steps == ()
