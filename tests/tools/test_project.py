"""Workflows name what exists; public names change on purpose and after a warning."""

import json
import re
import tomllib
from pathlib import Path

import public_names
import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(file: Path) -> dict:
    return pytest.importorskip("yaml").safe_load(file.read_text())


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_names_what_exists(file: Path) -> None:
    workflow = read(file)
    assert set(workflow) == {"name", True, "jobs"}  # YAML reads `on` as a yes
    for job in workflow["jobs"].values():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        assert job["timeout-minutes"] <= 90
        assert set(re.findall(r"matrix\.(\w+)", str(job))) <= set(
            re.findall(r"'(\w+)':", str(job.get("strategy")))
        )
        for path in re.findall(r"\b(?:tests|tools)/[\w/.]+", commands):
            assert (ROOT / path).exists(), path
        for extras in re.findall(r"\.\[([\w,]+)\]", commands):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_a_release_is_published_for_a_tag_alone_and_without_a_secret() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in str(workflow)


def test_every_python_that_the_package_names_is_tested() -> None:
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    workflow = read(ROOT / ".github" / "workflows" / "tests.yml")
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in matrix} == named
    extras = {name for row in matrix for name in row["extras"].split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])


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
        ("", True),
    ],
    ids=["deprecated before", "not deprecated", "not said", "at once", "nothing"],
)
def test_a_name_goes_only_after_a_version_that_deprecated_it(changelog, is_refused) -> None:
    now, old = ["thinwire.a"], ["thinwire.a", "thinwire.presets.b"]
    refused = ["thinwire.presets.b"] if is_refused else []
    assert list(public_names.removed_without_warning(old, now, changelog)) == refused
    assert list(public_names.removed_without_warning(now, old, changelog)) == []


def test_a_name_that_was_not_deprecated_stays_in_the_file(monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "names.json"
    file.write_text(json.dumps({"thinwire.nothing": ""}))
    monkeypatch.setattr(public_names, "FILE", file)
    assert public_names.main() == 1
    assert "thinwire.nothing is gone" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"thinwire.nothing": ""}
