"""What a package's source adds up to: lines, classes, functions, by its syntax trees alone.

`python tools/architecture.py --count SRC` prints these beside the counts of rooms and arrows.
A line is one of: blank, comment (nothing else on it), docstring, code. A function's lines go from
`def` to its end without its docstring; stubs (abstract methods, overloads) do not count.
"""

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SAME_BY_DESIGN = {"AdamW", "SGD", "Muon"}
"""Class names that `inner`, `outer` and `optim` share on purpose."""

INTERFACES = ("Transport", "OuterState", "ExchangeState", "Membership")
"""Classes whose public members are counted: what a new implementation has to know."""

SAME_LINES = 5
"""So many equal lines of code in a row, in two places, are a duplicate."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def counts(folder: Path) -> dict[str, str]:
    """Each count by its name, as text, of all Python files below `folder`."""
    files = sorted(folder.rglob("*.py"))
    trees = {file: ast.parse(file.read_bytes(), filename=str(file)) for file in files}
    lines = [_lines(file, tree) for file, tree in trees.items()]
    total, blank, comments, docstrings = (sum(column) for column in zip(*lines, strict=True))
    code = total - blank - comments - docstrings
    lengths = [length for tree in trees.values() for length in _function_lengths(tree)] or [0]
    names = class_names(trees)
    twice = sorted(n for n, where in names.items() if len(where) > 1 and n not in SAME_BY_DESIGN)
    return {
        "modules": f"{len(files):,}",
        "lines": f"{total:,}",
        "lines of code": f"{code:,}",
        "docstrings": f"{docstrings / total:.1%} of lines",
        "comments": f"{comments / total:.1%} of lines",
        "classes": f"{sum(map(len, names.values())):,}",
        "class names used twice": f"{len(twice)}{': ' * bool(twice)}{', '.join(twice)}",
        "functions": f"{len(lengths):,}",
        "lines of a function": (
            f"median {statistics.median(lengths):g}, mean {statistics.fmean(lengths):.1f}"
        ),
        "duplicates": _duplicates(trees),
        "longest file": f"{max(row[0] for row in lines):,}",
        "median file": f"{statistics.median(row[0] for row in lines):g}",
        **{
            f"members of {node.name}": str(len(_public_members(node)))
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name in INTERFACES
        },
    }


def class_names(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Where each class name is defined, as `file:line`."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{file}:{node.lineno}")
    return found


def _lines(file: Path, tree: ast.Module) -> tuple[int, int, int, int]:
    """All lines, blank ones, comments that have a line to themselves, docstrings."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    strings = _docstring_lines(tree)
    blank = sum(not line.strip() for n, line in enumerate(lines, 1) if n not in strings)
    alone = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    return len(lines), blank, len(alone), len(strings)


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings, and of strings that stand below an assignment to document it."""
    found: set[int] = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(node, Documented) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    found.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
                case _:
                    pass
    return found


def _function_lengths(tree: ast.Module) -> Iterator[int]:
    """Lines of each function that is not a stub."""
    strings = _docstring_lines(tree)
    for node in ast.walk(tree):
        if isinstance(node, Function) and not _is_stub(node):
            yield sum(n not in strings for n in range(node.lineno, (node.end_lineno or 0) + 1))


def _is_stub(function: Function) -> bool:
    """Nothing but a docstring, `...` or `pass`: an abstract method or an overload."""
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in function.body
    )


def _duplicates(trees: dict[Path, ast.Module]) -> str:
    """Runs of at least SAME_LINES lines of code that stand in two places, and their lines.

    Compared without indentation; imports, docstrings, comments and lone brackets do not count. A
    run is found where it stands again, as long as it goes.
    """
    places: dict[tuple[str, ...], tuple[Path, int]] = {}
    runs = lines = 0
    for file, tree in trees.items():
        code = _code_lines(file, tree)
        again = -1  # where the run that is being read ends
        for start in range(len(code) - SAME_LINES + 1):
            window = tuple(code[start : start + SAME_LINES])
            first = places.setdefault(window, (file, start))
            if first != (file, start):
                runs += start >= again
                lines += start + SAME_LINES - max(start, again)
                again = start + SAME_LINES
    return f"{runs:,} runs of {SAME_LINES} lines or more, {lines:,} lines"


def _code_lines(file: Path, tree: ast.Module) -> list[str]:
    left_out = _docstring_lines(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    text = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    code = [line.strip() for n, line in text if n not in left_out]
    return [line for line in code if line.strip("()[]{},:") and not line.startswith("#")]


def _public_members(node: ast.ClassDef) -> set[str]:
    """Methods, properties and annotated attributes without an underscore in front."""
    names = {item.name for item in node.body if isinstance(item, Function)}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
    return {name for name in names if not name.startswith("_")}
