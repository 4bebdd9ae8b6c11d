"""Output of commands, to a terminal that may be gone, and signals that ask them to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from thinwire.plan.units import nbytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SAME_S = 0.3


def say(console: Console, text: str) -> None:
    """Print `text` as it is, because names that users choose may look like rich's markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def closing_line(summary: Mapping[str, Any], out: Path) -> str:
    """The result of a run, from its summary.

    Args:
        summary: contents of summary.json.
        out: folder of the run.
    """
    one = "this worker of" if "events" in summary else "each of"
    return (
        f"{summary['method']}: validation loss {summary['val_loss']:.4f} after "
        f"{summary['tokens']:,} tokens in {summary['wall_s']:.1f} s; {one} "
        f"{summary['workers']} workers sent {nbytes_text(summary['sent_bytes_per_worker'])} "
        f"(a payload once) and received {nbytes_text(summary['received_bytes_per_worker'])}; "
        f"outer_digest {summary['outer_digest'][:12]}; {out}"
    )


def table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    named: int = 0,
    caption: str | None = None,
) -> Table:
    """A table of numbers.

    Args:
        title: text above the table.
        head: heading of each column.
        rows: rows with a text for each column.
        named: index of the column of names, which is never folded.
        caption: text below the table.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    # No borders: a method's text and seven numbers have to fit into 80 columns.
    found = Table(
        box=SIMPLE_HEAD, padding=0, title=title, caption=caption, min_width=min(80, len(title))
    )
    for column, heading in enumerate(head):
        is_name = column == named
        found.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        found.add_row(*map(escape, row))
    return found


@contextmanager
def lasting_output() -> Generator[None]:
    """Drop output that a terminal, pipe or file does not take, instead of raising.

    For commands that leave their result in a folder: hours of training must not end because their
    terminal did.
    """
    out, err = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            # The interpreter would try again to write what could not be written.
            out.flush()


class _LastingStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"  # a path may hold bytes that are not text
        with self._dropping():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _dropping(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError):  # ValueError: it is closed
            # Drop its buffer too, which the interpreter would write at exit.
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def noted_signals(*numbers: int) -> Generator[list[int]]:
    """A list that collects the numbers of signals; a repeated signal acts as it did before.

    Args:
        numbers: signals to collect.
    """
    # Not an Event, because the code that a signal interrupts may hold its lock.
    noted, first_s = list[int](), dict[int, float]()

    def note(number: int, _: Any) -> None:
        noted.append(number)
        # Ranks get the same signal from the terminal and from torchrun.
        if time.monotonic() > first_s.setdefault(number, time.monotonic()) + _SAME_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
