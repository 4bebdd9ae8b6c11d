"""The public names and their parameters, which later versions keep: `python tools/public_names.py`.

Writes `tests/frozen/public-names.json`, and refuses to drop a name that CHANGELOG.md does not list
under *Removed*, and under *Deprecated* of an earlier version.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "frozen" / "public-names.json"
PUBLIC = (
    "thinwire",
    "thinwire.asynchronous",
    "thinwire.codecs",
    "thinwire.errors",
    "thinwire.experiments",
    "thinwire.inner",
    "thinwire.optim",
    "thinwire.outer",
    "thinwire.presets",
    "thinwire.testing",
    "thinwire.train.config",
    "thinwire.train.trainer",
    "thinwire.transport",
)
"""Packages that users import from. Those of `integrations` need other libraries."""


def public_names() -> dict[str, str]:
    """Parameters by dotted name: functions, classes and their members; "" for other values.

    A member that another public class declares is listed there, and not for its subclasses.
    """
    modules = {package: importlib.import_module(package) for package in PUBLIC}
    values = {
        f"{package}.{name}": getattr(module, name)
        for package, module in modules.items()
        for name in names_of(module)
    }
    classes = {value for value in values.values() if inspect.isclass(value)}
    found = {dotted: _parameters(value) for dotted, value in values.items()}
    for dotted, value in values.items():
        if inspect.isclass(value):
            members = _members(value, classes - {value})
            found |= {f"{dotted}.{member}": text for member, text in members}
    return dict(sorted(found.items()))


def names_of(module: ModuleType) -> list[str]:
    """Names that a package exports, or that a module defines without an underscore."""
    defined: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
            case _:
                pass
    variables = {name for name in defined if isinstance(vars(module)[name], TypeVar)}
    public = [name for name in defined - variables if not name.startswith("_")]
    return sorted(getattr(module, "__all__", public))


def _members(kind: type, others: Collection[type]) -> Iterator[tuple[str, str]]:
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("thinwire")]
    declared = {base: dict.fromkeys(inspect.get_annotations(base)) | vars(base) for base in bases}
    known = {name for base in bases if base in others for name in declared[base]}
    for base in bases:
        for name, value in declared[base].items():
            if not name.startswith("_") and name not in known:
                yield name, _parameters(inspect.unwrap(getattr(value, "__func__", value)))


def _parameters(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:  # exceptions take what any exception takes
        return "(...)"
    # Left out, because more precise types change nothing for the caller.
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def removed_without_warning(
    old: Iterable[str], new: Iterable[str], changelog: str
) -> Iterator[str]:
    """Names of `old` that are gone without a deprecation in an earlier version of the changelog.

    Args:
        old: dotted names of the last version.
        new: current dotted names.
        changelog: text of the changelog, newest version first.
    """
    versions = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    removed = [_section(version, "Removed") for version in versions]
    deprecated = [_section(version, "Deprecated") for version in versions]
    for name in sorted(set(old) - set(new)):
        short = f"`{name.removeprefix('thinwire.')}`"
        said = [number for number, text in enumerate(removed) if short in text]
        if not said or not any(short in text for text in deprecated[said[0] + 1 :]):
            yield name


def _section(version: str, title: str) -> str:
    found = re.search(rf"^### {title}\n(.*?)(?=^### |\Z)", version, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def main() -> int:
    """Write the file; 1 if a name would go that was not deprecated."""
    new = public_names()
    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    gone = list(removed_without_warning(old, new, (ROOT / "CHANGELOG.md").read_text()))
    for name in gone:
        print(f"{name} is gone, and was not deprecated: docs/guarantees.md#deprecation")
    if not gone:
        FILE.write_text(json.dumps(new, indent=1) + "\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
