"""Public names: a change of any is on purpose, and none goes without a warning before."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import public_names

NOW, OLD = ["thinwire.a"], ["thinwire.a", "thinwire.presets.b"]
REMOVED, DEPRECATED = "### Removed\n\n- `presets.b`.\n", "### Deprecated\n\n- `presets.b`.\n"


def test_public_names_and_parameters_are_those_of_the_file() -> None:
    frozen = json.loads(public_names.FILE.read_text())
    found = public_names.public_names()
    changed = {name for name in frozen.keys() | found if frozen.get(name) != found.get(name)}
    assert not changed, "on purpose? then: python tools/public_names.py"
    assert "sync_every" in found["thinwire.Method"]


@pytest.mark.parametrize(
    ("changelog", "gone"),
    [
        (f"## [2]\n{REMOVED}### Fixed\n## [1]\n{DEPRECATED}", []),
        (f"## [2]\n{REMOVED}## [1]\n### Added\n", ["thinwire.presets.b"]),
        (f"## [2]\n### Fixed\n`presets.b`\n## [1]\n{DEPRECATED}", ["thinwire.presets.b"]),
        (f"## [2]\n{REMOVED}{DEPRECATED}## [1]\n", ["thinwire.presets.b"]),
        ("", ["thinwire.presets.b"]),
    ],
    ids=["deprecated before", "not deprecated", "not said", "at once", "nothing"],
)
def test_a_name_goes_only_after_a_version_that_deprecated_it(changelog, gone) -> None:
    assert list(public_names.removed_without_warning(OLD, NOW, changelog)) == gone
    assert list(public_names.removed_without_warning(NOW, OLD, changelog)) == []


def test_a_name_that_was_not_deprecated_stays_in_the_file(monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "names.json"
    file.write_text(json.dumps({"thinwire.nothing": ""}))
    monkeypatch.setattr(public_names, "FILE", file)
    assert public_names.main() == 1
    assert "thinwire.nothing is gone" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"thinwire.nothing": ""}
