"""The error for a name that is not known."""

import pytest

from thinwire.errors import ConfigurationError, CorpusError, unknown_name

KNOWN = ("ddp", "diloco", "MuLoCo", "")


@pytest.mark.parametrize(
    ("name", "closest"),
    [("dilocco", "diloco"), ("DILOCO", "diloco"), ("muloco", "MuLoCo"), ("x", None), ("", None)],
)
def test_the_closest_name_is_suggested_whatever_its_capitals(name, closest) -> None:
    error = unknown_name(f"use method {name!r}", name, KNOWN)
    assert isinstance(error, ConfigurationError)
    assert error.because == "there are only ddp, diloco, MuLoCo"
    guess = "" if closest is None else f"did you mean {closest!r}? otherwise "
    assert error.do == f"{guess}pass one of these"


def test_reason_advice_and_kind_may_be_others() -> None:
    more = {"because": "it is gone", "do": "look", "kind": CorpusError}
    error = unknown_name("find corpus 'x'", "x", KNOWN, **more)
    assert str(error) == "cannot find corpus 'x'; because it is gone; do: look"
    assert type(error) is CorpusError
