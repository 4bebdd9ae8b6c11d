"""The reference shows every public name, and each method has a section with its equations."""

import importlib
import inspect
import re
from pathlib import Path

import public_names

from thinwire import presets

DOCS = Path(__file__).parents[2] / "docs"
# Every name of their `__all__` is shown.
PUBLIC = """asynchronous codecs errors exchange feedback fragments inner integrations.shares
    optim outer presets report testing transport"""


def text_of(folder: str) -> str:
    return "\n".join(page.read_text("utf-8") for page in sorted((DOCS / folder).glob("*.md")))


def test_every_public_name_is_on_a_page_and_exists() -> None:
    names = set(re.findall(r"^::: ([\w.]+)$", text_of("reference"), re.MULTILINE))
    missing = {
        f"{module}.{n}"
        for module in (f"thinwire.{name}" for name in PUBLIC.split())
        for n in public_names.names_of(importlib.import_module(module))
        # A function that shares the name of its module is on a page by its place in that.
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


def test_every_method_has_a_section_with_the_equations_of_its_preset_and_a_row() -> None:
    found: dict[str, str] = {}
    for section in re.split(r"^## ", text_of("methods"), flags=re.MULTILINE):
        for name in re.findall(r"^<!-- settings: (\w+) -->$", section, re.MULTILINE):
            assert name not in found, f"{name} has two sections"
            found[name] = section
    assert set(found) == {*presets.names(), "async_diloco"}
    index = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|[^|]+\| `(\w+)` \|", index, re.MULTILINE)) == set(found)
    for name, section in found.items():
        words = " ".join((inspect.getdoc(getattr(presets, name)) or "").split())
        assert f"<!-- sources: {name} -->" in section
        for block in re.findall(r"```text\n(.*?)\n```", section, re.DOTALL):
            lines = [" ".join(line.split()) for line in block.splitlines()]
            assert [line for line in lines if line not in words] == [], name
