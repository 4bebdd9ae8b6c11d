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
        assert commands
        assert job["timeout-minutes"] <= 90
        for name in re.findall(r"matrix\.(\w+)", file.read_text()):
            assert name in job["strategy"]["matrix"]
        for command in commands:
            for path in re.findall(r"\btests/[\w/.]+", command):
                assert (ROOT / path).exists(), path
            for wanted in re.findall(r"\.\[([\w,]+)\]", command):
                assert set(wanted.split(",")) <= set(extras)


def test_there_is_one() -> None:
    assert FILES
