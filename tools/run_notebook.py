"""Run the notebooks of the documentation, and write what their cells put out into them.

    python tools/run_notebook.py            # runs docs/**/*.ipynb and stores texts and pictures
    python tools/run_notebook.py --check    # 1 if a committed output is not what a cell puts out

Needs no Jupyter: cells are plain Python, run in order in one namespace. Stores what they print, and
the value of a last line that is an expression, as a picture if it can draw itself.
"""

import argparse
import ast
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def notebooks() -> list[Path]:
    """The notebooks of the documentation, in order."""
    return sorted((ROOT / "docs").rglob("*.ipynb"))


def executed(text: str) -> str:
    """The notebook `text` with the outputs that its code cells have now."""
    notebook = json.loads(text)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["execution_count"] = number
        cell["outputs"] = list(_outputs("".join(cell["source"]), number, namespace))
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _outputs(source: str, number: int, namespace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"<cell {number}>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), namespace)
    if printed.getvalue():
        text = _lines(printed.getvalue())
        yield {"output_type": "stream", "name": "stdout", "text": text}
    if value is not None:
        yield {
            "output_type": "execute_result",
            "execution_count": number,
            "metadata": {},
            "data": _forms(value),
        }


def _forms(value: object) -> dict[str, list[str]]:
    draw = getattr(value, "_repr_svg_", None)
    if draw is None:
        return {"text/plain": _lines(repr(value))}
    # A default repr would hold a memory address, which differs in every run.
    return {"image/svg+xml": _lines(draw()), "text/plain": [f"<{type(value).__name__}>"]}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the outputs, or check those that are there; 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if not current")
    is_check = parser.parse_args(arguments).check
    status = 0
    for path in notebooks():
        text = path.read_text(encoding="utf-8")
        found = executed(text)
        if found == text:
            continue
        if is_check:
            print(f"{path.name} is not current: python tools/run_notebook.py")
            status = 1
        else:
            path.write_text(found, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
