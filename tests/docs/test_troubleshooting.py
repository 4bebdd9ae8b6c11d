"""Each message that docs/troubleshooting.md quotes is still said by the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted(page: str) -> list[str]:
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
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
    words = message.removeprefix("cannot ").removeprefix("do: ")
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in words.split("...")), re.S)
    return any(pattern.search(text) for text in said())


def test_every_message_is_said_by_the_source() -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) >= 25
    assert [message for message in messages if not is_said(message)] == []


def test_another_message_is_found_out() -> None:
    assert quoted("| `it is not so` | a | b |\n") == ["it is not so"]
    assert not is_said("it is not so, by no means")
