"""Signals that ask a command to end."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_signals(*numbers: int) -> Generator[list[int]]:
    """A list to which each of these signals adds its number; a second one does what it always did.

    Args:
        numbers: of the signals.
    """
    # Not an Event: its lock may be held by the very code that a signal interrupts.
    noted: list[int] = []

    def note(number: int, _: Any) -> None:
        noted.append(number)
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
