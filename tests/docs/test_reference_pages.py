"""The reference shows every public name, and pages of methods say what their presets do."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from thinwire import presets

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import public_names  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
METHODS = ROOT / "docs" / "methods"
# Every name of their `__all__` has to be shown.
PUBLIC = (
    "thinwire",
    "thinwire.asynchronous",
    "thinwire.codecs",
    "thinwire.doctor",
    "thinwire.errors",
    "thinwire.exchange",
    "thinwire.feedback",
    "thinwire.fragments",
    "thinwire.inner",
    "thinwire.integrations.shares",
    "thinwire.optim",
    "thinwire.outer",
    "thinwire.presets",
    "thinwire.report",
    "thinwire.testing",
    "thinwire.transport",
)


def shown() -> set[str]:
    pages = sorted(REFERENCE.glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_a_page(module: str) -> None:
    last_names = {name.rpartition(".")[2] for name in shown()}
    modules = {"codecs", "inner", "optim", "outer", "presets", "transport", "__version__"}
    names = set(public_names.names_of(importlib.import_module(module)))
    if module == "thinwire":
        assert names - last_names <= modules  # modules have pages of their own
    else:
        # A function that shares the name of its module stands on a page by its place in that.
        assert [n for n in names if not {f"{module}.{n}", f"{module}.{n}.{n}"} & shown()] == []


def test_every_name_on_a_page_exists() -> None:
    for name in shown():
        module, _, last = name.rpartition(".")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:  # an extra that is not installed
            if (error.name or "").startswith("thinwire"):
                raise
            continue
        assert hasattr(found, last), name


def methods() -> list[str]:
    return [*presets.names(), "async_diloco"]


@pytest.mark.parametrize("name", methods())
def test_equations_of_a_method_are_those_of_its_preset(name: str) -> None:
    page = (METHODS / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- settings: {name} -->" in page
    assert f"<!-- sources: {name} -->" in page
    docstring = " ".join((inspect.getdoc(getattr(presets, name)) or "").split())
    for block in re.findall(r"```text\n(.*?)\n```", page, re.DOTALL):
        for line in block.splitlines():
            assert " ".join(line.split()) in docstring


def test_every_method_has_a_page() -> None:
    assert {page.stem for page in METHODS.glob("*.md")} == {*methods(), "index"}


@pytest.mark.parametrize("name", methods())
def test_papers_to_cite_are_sources_of_the_preset(name: str) -> None:
    page = (METHODS / f"{name}.md").read_text(encoding="utf-8")
    cited = re.findall(r"eprint = \{(\S+)\}", page)
    assert len(re.findall(r"  author = \{\S", page)) == len(cited)
    docstring = inspect.getdoc(getattr(presets, name)) or ""
    assert bool(cited) == ("Source:" in docstring or "Settings:" in docstring)
    assert [number for number in cited if number not in docstring] == []
