"""Sums by halves, and the root mean square that is made of them."""

import math

import pytest
import torch

from thinwire.codecs.levels import root_mean_square, sum_by_halves


def test_the_second_half_is_added_to_the_first() -> None:
    # ((2^24 + 1) - 2^24) + (1 + 1): 2^24 + 1 rounds to 2^24. In order it would be 1 + 1 + 1.
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0], [2.0**24, -(2.0**24), 1.0, 1.0]])
    assert sum_by_halves(x).tolist() == [[2.0], [1.0]]


@pytest.mark.parametrize("columns", [1, 2, 3, 4096])
def test_zeros_add_up_to_plus_zero(columns: int) -> None:
    assert not sum_by_halves(torch.full((2, columns), -0.0)).signbit().any()


def test_the_numbers_stay_as_they_are() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    sum_by_halves(x)
    root_mean_square(x)
    assert torch.equal(x, before)


def test_the_root_mean_square_of_the_largest_numbers_is_finite_and_of_zeros_zero() -> None:
    largest = torch.finfo(torch.float32).max
    found = root_mean_square(torch.tensor([[largest, -largest], [0.0, -0.0], [math.inf, 1.0]]))
    assert found[:2].tolist() == [[pytest.approx(largest, rel=2.0**-22)], [0.0]]
    assert not found[2].isfinite()
