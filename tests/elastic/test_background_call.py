"""Calls that can be left behind."""

import threading

import pytest

from thinwire.elastic.background_call import BackgroundCall


class Panic(BaseException):
    """As what torchft's client raises where its own code fails, which is not an Exception."""


def test_what_a_call_raises_is_raised_where_its_result_is_asked_for() -> None:
    def work() -> None:
        raise Panic

    call = BackgroundCall(work, name="test")
    assert call.done.wait(10)
    with pytest.raises(Panic):
        call.result()


def test_a_call_that_does_not_return_keeps_nothing_waiting() -> None:
    ends = threading.Event()
    call = BackgroundCall(ends.wait, name="test")
    assert not call.done.wait(0.05)
    ends.set()
    assert call.done.wait(10)
    assert call.result()
