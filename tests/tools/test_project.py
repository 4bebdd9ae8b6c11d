"""Workflows name what exists; public names change on purpose and after a warning."""

import json
import re
import sys
import tomllib
from pathlib import Path

import public_names
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_workflows_name_paths_and_extras_that_exist() -> None:
    text = "".join(file.read_text() for file in (ROOT / ".github/workflows").glob("*.yml"))
    paths = re.findall(r"\b(?:tests|tools)/[\w/.]+", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    extras = re.findall(r"\.\[([\w,]+)\]", text) + re.findall(r'extras: "([\w,]+)"', text)
    named = {name for names in extras for name in names.split(",")}
    assert "all" in named
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons write types otherwise")
def test_public_names_and_parameters_are_those_of_the_file() -> None:
    frozen, found = json.loads(public_names.FILE.read_text()), public_names.public_names()
    changed = {name for name in frozen.keys() | found if frozen.get(name) != found.get(name)}
    assert not changed, "on purpose? then: python tools/public_names.py"
    assert "sync_every" in found["thinwire.Method"]


REMOVED, DEPRECATED = "### Removed\n\n- `presets.b`.\n", "### Deprecated\n\n- `presets.b`.\n"


@pytest.mark.parametrize(
    ("changelog", "is_refused"),
    [
        (f"## [2]\n{REMOVED}### Fixed\n## [1]\n{DEPRECATED}", False),
        (f"## [2]\n{REMOVED}## [1]\n### Added\n", True),
        (f"## [2]\n### Fixed\n`presets.b`\n## [1]\n{DEPRECATED}", True),
        (f"## [2]\n{REMOVED}{DEPRECATED}## [1]\n", True),
    ],
    ids=["deprecated before", "not deprecated", "not listed", "in one version"],
)
def test_a_name_goes_only_after_a_version_that_deprecated_it(changelog, is_refused) -> None:
    now, old = ["thinwire.a"], ["thinwire.a", "thinwire.presets.b"]
    refused = ["thinwire.presets.b"] if is_refused else []
    assert list(public_names.removed_without_warning(old, now, changelog)) == refused
    assert list(public_names.removed_without_warning(now, old, changelog)) == []
