"""Count files, classes, functions and code lines: `architecture.py --count [CHECKOUT]`.

A *code line* is any line except blanks, comments, docstrings and imports. A *body* is the code
lines of a function below its signature; abstract methods and overloads have none. A *room* is a
module or package directly below `thinwire`.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Counts(NamedTuple):
    """A file's code lines, classes, and the length of each function's body."""

    code: int
    classes: int
    bodies: tuple[int, ...]


def counts(text: str) -> Counts:
    """Count the source of one file.

    >>> counts("import io\\ndef f():\\n    'Two.'\\n    # why\\n    x = 1\\n    return x\\n")
    Counts(code=3, classes=0, bodies=(2,))
    """
    tree = ast.parse(text)
    left_out: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            left_out.add(token.start[0])
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= _lines(node, node)
        if isinstance(node, (ast.Module, ast.ClassDef, *Function)) and ast.get_docstring(node):
            left_out |= _lines(node.body[0], node.body[0])
    lines = enumerate(text.splitlines(), 1)
    code = {n for n, line in lines if line.strip() and n not in left_out}
    bodies = [
        len(_lines(body[0], body[-1]) & code)
        for node in ast.walk(tree)
        if isinstance(node, Function) and (body := list(_statements(node)))
    ]
    classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Counts(len(code), classes, tuple(bodies))


def _lines(first: ast.stmt, last: ast.stmt) -> set[int]:
    return set(range(first.lineno, (last.end_lineno or last.lineno) + 1))


def _statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """Statements that do something: no docstring, no `...`, no `pass`."""
    for statement in function.body:
        is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (is_constant or isinstance(statement, ast.Pass)):
            yield statement


def table(checkout: Path) -> dict[str, str]:
    """The counts of a checkout, by name."""
    package = checkout / "src" / "thinwire"
    rooms: Counter[str] = Counter()
    found: list[Counts] = []
    for file in sorted(package.rglob("*.py")):
        found.append(counts(file.read_text(encoding="utf-8")))
        parts = file.relative_to(package).parts
        rooms[parts[0] if len(parts) > 1 else "top"] += found[-1].code
    bodies = [length for each in found for length in each.bodies]
    tests = sum(
        len(file.read_text(encoding="utf-8").splitlines())
        for file in (checkout / "tests").rglob("*.py")
    )
    return {
        "code lines": f"{sum(each.code for each in found):,}",
        "files": f"{len(found):,}",
        "classes": f"{sum(each.classes for each in found):,}",
        "functions": f"{len(bodies):,}",
        "mean body of a function": f"{sum(bodies) / max(len(bodies), 1):.1f} lines",
        "lines of tests": f"{tests:,}",
        **{f"code lines of {room}": f"{lines:,}" for room, lines in rooms.most_common()},
    }


def main(arguments: Sequence[str]) -> int:
    """Print the counts of a checkout; 2 if it has no package."""
    parser = argparse.ArgumentParser(description="What the source adds up to.")
    parser.add_argument("--count", nargs="?", type=Path, const=ROOT, required=True)
    checkout = parser.parse_args(arguments).count
    if not (checkout / "src" / "thinwire").is_dir():
        print(f"{checkout} has no src/thinwire: pass a checkout", file=sys.stderr)
        return 2
    for name, count in table(checkout).items():
        print(f"{name:<32} {count:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
