"""The documentation has no dead links, and the tool that says so finds them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_links.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_link_of_the_documentation_is_dead(tool) -> None:
    assert list(tool.broken_links(tool.ROOT)) == []
    assert len(tool.pages(tool.ROOT)) > 10


def test_finds_dead_files_and_headings(tool, tmp_path) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "# One\n[a](docs/b.md) [b](docs/b.md#two-words) [c](#one) [d](https://x.test/y)\n"
        "[e](docs/absent.md) [f](docs/b.md#one) [g](#two)\n```\n[h](absent)\n```\n"
    )
    (tmp_path / "docs" / "b.md").write_text(
        "## Two, words\n[back](../README.md#one) [no](README.md)\n"
        "![p](p.svg#gh-dark-mode-only) ![q](q.svg#gh-dark-mode-only)\n"
    )
    (tmp_path / "docs" / "deep" / "c.md").write_text("[b](../b.md#two-words) [no](b.md)\n")
    (tmp_path / "docs" / "p.svg").write_text("<svg/>")
    assert [(str(page), target) for page, target in tool.broken_links(tmp_path)] == [
        ("README.md", "docs/absent.md"),
        ("README.md", "docs/b.md#one"),
        ("README.md", "#two"),
        ("docs/b.md", "README.md"),
        ("docs/b.md", "q.svg#gh-dark-mode-only"),
        ("docs/deep/c.md", "b.md"),
    ]
