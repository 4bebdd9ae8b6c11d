"""Errors for names that are not known, and for numbers out of range."""

import math
from contextlib import nullcontext

import pytest

from thinwire.errors import ConfigurationError, check_range, check_whole, unknown_name

KNOWN = ("ddp", "diloco", "MuLoCo", "")


@pytest.mark.parametrize(
    ("name", "closest"), [("DILOCO", "diloco"), ("muloco", "MuLoCo"), ("x", None), ("", None)]
)
def test_the_closest_name_is_suggested_whatever_its_capitals(name, closest) -> None:
    error = unknown_name(f"use method {name!r}", name, KNOWN)
    assert isinstance(error, ConfigurationError)
    assert error.because == "there are only ddp, diloco, MuLoCo"
    guess = "" if closest is None else f"did you mean {closest!r}? otherwise "
    assert error.do == f"{guess}pass one of these"


@pytest.mark.parametrize(
    ("check", "value", "limits", "word"),
    [
        *((check_range, value, {}, r"lie in \[0, inf\)") for value in (-1e-9, math.nan, math.inf)),
        (check_range, 1.0, {"below": 1}, r"set it to 1.0; .* lie in \[0, 1\)"),
        (check_range, 1.5, {"most": 1}, r"lie in \[0, 1\]"),
        *((check_whole, value, {}, "a whole number from 1") for value in (0, True, 1.5, "3")),
        (check_whole, 5, {"least": 0, "most": 4}, "set it to 5; .* from 0 to 4"),
        # The ends belong to a range as the brackets say.
        *((check_range, *end, None) for end in ((0, {}), (0.999, {"below": 1}), (1, {"most": 1}))),
        *((check_whole, *end, None) for end in ((1, {}), (0, {"least": 0}), (4, {"most": 4}))),
    ],
)
def test_numbers_out_of_range_are_refused(check, value, limits, word: str | None) -> None:
    with pytest.raises(ConfigurationError, match=word) if word else nullcontext():
        check("it", value, **limits)
