"""Every fenced block of the documentation: Python is compiled, commands are read by the real CLI.

Tutorials are run as wholes by their own tests. Other blocks of Python are compiled, not run: most
need a model, a loader or another machine.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tyro

import thinwire.cli.command as command

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = {"", "bash", "bibtex", "console", "json", "promql", "python", "sh", "text", "toml", "yaml"}


class Snippet(NamedTuple):
    """A fenced block, with its number on the page."""

    page: str
    number: int
    kind: str
    text: str


def snippets() -> Iterator[Snippet]:
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        name = page.relative_to(ROOT).as_posix()
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            yield Snippet(name, number, kind, text)


SNIPPETS = list(snippets())
PYTHON = [s for s in SNIPPETS if s.kind == "python"]


def commands(text: str) -> Iterator[list[str]]:
    """The words after `thinwire` of each command in a block, without options in brackets."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        found = re.search(r"(?:^|\s|/)thinwire ([a-z].*)$", line.removeprefix("$ "))
        if found is None or line.lstrip().startswith("#"):
            continue
        yield shlex.split(re.split(r"\s(?:#|>|\||&)", found[1])[0], comments=True)


COMMANDS = [
    pytest.param(words, id=f"{s.page}-{s.number}-{' '.join(words[:1])}")
    for s in SNIPPETS
    if s.kind in ("", "bash", "sh", "console")
    for words in commands(s.text)
]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: f"{s.page}-{s.number}")
def test_a_block_has_a_known_kind(snippet: Snippet) -> None:
    assert snippet.kind in KINDS


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda s: f"{s.page}-{s.number}")
def test_python_can_be_read(snippet: Snippet) -> None:
    compile(snippet.text, f"{snippet.page}, block {snippet.number}", "exec")


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_line_reads_a_command(words: list[str]) -> None:
    tyro.cli(command.Command, prog="thinwire", args=words)  # exits where a flag is unknown


def test_there_are_commands_and_one_with_a_wrong_flag_fails() -> None:
    assert len(COMMANDS) > 20
    with pytest.raises(SystemExit):
        tyro.cli(command.Command, prog="thinwire", args=["plan", "--parametres", "1B"])
