"""Each message that pages quote in tables of what went wrong is still said by the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = {"troubleshooting.md": 55, "launching.md": 8, "bucket.md": 10}
TABLE = re.compile(r"^\| (?:message|what is said) \|.*\n((?:\|.*\n)+)", re.MULTILINE)
OF_THE_SYSTEM = {"Address already in use"}


def quoted(page: str) -> list[str]:
    rows = [row for table in TABLE.findall(page) for row in table.splitlines()]
    cells = [row.split(" | ")[0] for row in rows]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@cache
def said() -> tuple[str, ...]:
    """Every text of the source, with a mark where an f-string has a value."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    return tuple(text for tree in trees for text in texts(tree))


def texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(p.value if isinstance(p, ast.Constant) else "\0" for p in parts)
            case _:
                pass


def is_said(message: str) -> bool:
    """Each part of it, with any text for `...` and any number."""
    return all(any(part.search(text) for text in said()) for part in parts(message))


def parts(message: str) -> Iterator[re.Pattern[str]]:
    for part in message.split("; "):
        words = re.sub(r"^(cannot|because|do:|\.\.\.) ", "", part)
        known = (re.escape(word.strip()) for word in re.split(r"\.\.\.|\d+", words))
        yield re.compile(".*".join(known), re.DOTALL)


@pytest.mark.parametrize(("page", "least"), [*LEAST.items()])
def test_every_message_is_said_by_the_source(page: str, least: int) -> None:
    messages = quoted((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(messages) >= least
    assert [m for m in messages if m not in OF_THE_SYSTEM and not is_said(m)] == []


def test_another_message_is_found_out() -> None:
    table = "| message | cause |\n|---|---|\n| `it is not so` | a |\n"
    assert quoted(f"| `flag` | a |\n\n{table}\n| `flag` | b |\n") == ["it is not so"]
    assert not is_said("it is not so, by no means")
