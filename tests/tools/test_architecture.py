"""tools/architecture.py counts what it says."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import architecture  # noqa: E402

SOURCE = '''"""A module.

In three lines."""

import io
from a import (
    b,
)

# a comment
X = 1  # not a line of its own


class Transport:
    """One line."""

    rank: int

    def run(self):
        """A docstring."""
        import os
        y = """
        a string
        """

        return y

    def stub(self):
        """Nothing here."""
        ...
'''


def test_counts_of_a_source() -> None:
    # class, rank, def, four of the body, def and its dots, X
    assert architecture.counts(SOURCE) == architecture.Counts(10, 1, (4,))


def test_counts_of_this_checkout(capsys, tmp_path) -> None:
    assert architecture.main(["--count"]) == 0
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    rooms = [int(n.replace(",", "")) for name, n in printed.items() if "lines of" in name]
    assert int(printed["code lines"].replace(",", "")) > 0
    assert len(rooms) > 10
    assert architecture.main(["--count", str(tmp_path)]) == 2
