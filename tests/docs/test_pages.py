"""Links, quoted messages, the notebook's outputs and pictures are up to date."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import concept_pictures
import pytest
import run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "tutorials" / "one-outer-step.ipynb"
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def prose(page: Path) -> str:
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return CODE.sub("", page.read_text(encoding="utf-8"))


def test_no_link_is_dead() -> None:
    """Files and headings exist; GitHub's anchors are lower case, with hyphens for spaces."""
    dead, count = [], 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]:
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            alive = "://" in target or file.exists()
            if alive and anchor and file.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)
                marks = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)
                alive = anchor in marks
            count += 1
            dead += [] if alive else [f"{page.relative_to(ROOT)}: {target}"]
    assert dead == []
    assert count > 200


def quoted(text: str) -> list[str]:
    """Messages in the first column of tables of what went wrong."""
    tables = re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = (row.split(" | ")[0] for table in tables for row in table.splitlines())
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@cache
def texts() -> tuple[str, ...]:
    """Every string of the source, with a mark where an f-string has a value."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    found.append(text)
                case ast.JoinedStr(values=parts):
                    values = (p.value if isinstance(p, ast.Constant) else "\0" for p in parts)
                    found.append("".join(values))
    return tuple(found)


def is_in_the_source(message: str) -> bool:
    """Each part of it, with any text for `...` and any number."""
    for part in message.split("; "):
        words = re.sub(r"^(cannot|because|do:|\.\.\.) ", "", part)
        known = ".*".join(re.escape(word.strip()) for word in re.split(r"\.\.\.|\d+", words))
        if not any(re.search(known, text, re.DOTALL) for text in texts()):
            return False
    return True


def test_messages_that_a_page_quotes_are_in_the_source() -> None:
    messages = quoted((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) >= 50
    of_the_system = {"Address already in use"}
    assert [m for m in messages if m not in of_the_system and not is_in_the_source(m)] == []
    assert not is_in_the_source("it is not so, by no means")


def test_outputs_of_the_notebook_are_current_and_it_agrees_with_the_loop_bit_for_bit() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    found = run_notebook.executed(text)
    # Another processor may round the last digit of a loss otherwise. Pictures are compared, too.
    assert NUMBER.sub("", found) == NUMBER.sub("", text)
    numbers = ([float(n) for n in NUMBER.findall(each)] for each in (found, text))
    assert next(numbers) == pytest.approx(next(numbers), rel=1e-3, abs=1e-3)
    compared = [line for line in text.splitlines() if re.search("bit for bit.*(True|False)", line)]
    assert len(compared) >= 8
    assert [line for line in compared if "False" in line] == []


def test_pictures_of_concepts_are_current() -> None:
    drawn = concept_pictures.files()
    assert [p.name for p, svg in drawn.items() if p.read_text() != svg] == []


def test_the_page_of_the_loop_shows_the_example_as_it_is() -> None:
    text = (ROOT / "docs" / "how-to" / "own-loop.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert shown
    assert shown[1] in (ROOT / "examples" / "plain_pytorch.py").read_text()
