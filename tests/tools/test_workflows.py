"""Workflows: they can be read, and name what exists."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_workflow_names_what_exists(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(workflow) == {"name", True, "jobs"}  # YAML reads `on` as a yes
    for job in workflow["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands or any("publish" in step.get("uses", "") for step in job["steps"])
        assert job["timeout-minutes"] <= 90
        for name in re.findall(r"matrix\.(\w+)", str(job)):
            assert name in str(job["strategy"]["matrix"])
        for command in commands:
            for path in re.findall(r"\btests/[\w/.]+", command):
                assert (ROOT / path).exists(), path
            for wanted in re.findall(r"\.\[([\w,]+)\]", command):
                assert set(wanted.split(",")) <= set(extras)


def test_a_release_is_published_for_a_tag_alone_and_without_a_secret() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text


def test_every_python_that_the_package_names_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if ":: 3." in c}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in matrix} == named
    extras = {name for row in matrix for name in row["extras"].split(",")}
    assert extras <= set(project["optional-dependencies"])


def test_there_is_one() -> None:
    assert FILES
