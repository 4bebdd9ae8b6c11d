"""The reference shows every public name, and pages of methods say what their presets do."""

import importlib
import inspect
import re
from pathlib import Path

import public_names
import pytest

from thinwire import presets

ROOT = Path(__file__).parents[2]
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


def test_every_public_name_is_on_a_page_and_exists() -> None:
    names = shown()
    missing = {
        f"{module}.{n}"
        for module in PUBLIC[1:]
        for n in public_names.names_of(importlib.import_module(module))
        # A function that shares the name of its module stands on a page by its place in that.
        if not {f"{module}.{n}", f"{module}.{n}.{n}"} & names
    }
    assert missing == set()
    # Modules have pages of their own.
    modules = {"codecs", "inner", "optim", "outer", "presets", "transport", "__version__"}
    top = set(public_names.names_of(importlib.import_module("thinwire")))
    assert top - {name.rpartition(".")[2] for name in names} <= modules
    for name in names:
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


def sections() -> dict[str, str]:
    """The section of each method, by the preset whose settings it shows."""
    found: dict[str, str] = {}
    for page in sorted(METHODS.glob("*.md")):
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            for name in re.findall(r"^<!-- settings: (\w+) -->$", section, re.MULTILINE):
                assert name not in found, f"{name} has two sections"
                found[name] = section
    return found


def docstring_of(name: str) -> str:
    return inspect.getdoc(getattr(presets, name)) or ""


def test_every_method_has_a_section_and_a_row_in_the_index() -> None:
    assert set(sections()) == set(methods())
    index = (METHODS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|[^|]+\| `(\w+)` \|", index, re.MULTILINE)) == set(methods())


@pytest.mark.parametrize("name", methods())
def test_equations_of_a_method_are_those_of_its_preset(name: str) -> None:
    section, words = sections()[name], " ".join(docstring_of(name).split())
    assert f"<!-- sources: {name} -->" in section
    for block in re.findall(r"```text\n(.*?)\n```", section, re.DOTALL):
        assert [x for x in block.splitlines() if " ".join(x.split()) not in words] == []


def test_a_page_of_methods_cites_the_papers_of_its_presets_and_each_once() -> None:
    everywhere: list[str] = []
    for page in sorted(METHODS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        docstrings = [docstring_of(name) for name in re.findall(r"<!-- settings: (\w+) -->", text)]
        cited = re.findall(r"eprint = \{(\S+)\}", text)
        assert len(re.findall(r"  author = \{\S", text)) == len(cited)
        assert bool(cited) == any("Source:" in d or "Settings:" in d for d in docstrings), page
        assert [number for number in cited if not any(number in d for d in docstrings)] == []
        everywhere += cited
    assert len(everywhere) == len(set(everywhere)) == 8
