"""The notebook of one outer step runs as it is, and what it shows is what its cells put out."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "one-outer-step.ipynb"


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import run_notebook

        yield run_notebook
    finally:
        sys.path.remove(str(ROOT / "tools"))


def cells(text: str, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == kind]


def printed(text: str) -> str:
    outputs = [output for cell in cells(text, "code") for output in cell["outputs"]]
    return "".join(line for output in outputs for line in output.get("text", []))


_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]


def test_the_committed_outputs_are_current(tool: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = tool.executed(text)
    # Another processor may round the last digit of a loss otherwise. Pictures are compared, too.
    assert _NUMBER.sub("", found) == _NUMBER.sub("", text)
    assert numbers(found) == pytest.approx(numbers(text), rel=1e-3, abs=1e-3)
    said = re.findall(r"bit for bit.*", printed(text))
    assert len(said) >= 8
    assert [line for line in said if "False" in line or "True" not in line] == []


def test_another_outer_step_is_not_that_of_the_loop(tool: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    other = text.replace("alpha=0.9", "alpha=0.8")
    assert other != text
    assert "bit for bit: anchor False" in printed(tool.executed(other))


def test_an_output_that_is_not_current_is_found_and_written(
    tool: ModuleType, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    page = tmp_path / "docs" / "a.ipynb"
    page.parent.mkdir()
    cell = {"cell_type": "code", "source": ["print(1)\n", "1 + 1"], "outputs": []}
    page.write_text(json.dumps({"cells": [cell]}))
    assert tool.main(["--check"]) == 1
    assert "a.ipynb is not current" in capsys.readouterr().out
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    (written,) = cells(page.read_text(), "code")
    assert written["outputs"][0]["text"] == ["1\n"]
    assert written["outputs"][1]["data"] == {"text/plain": ["2"]}


def test_it_is_a_notebook_of_format_4_5() -> None:
    notebook = json.loads(PAGE.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    keys = {"cell_type", "id", "metadata", "source"}
    of_code = keys | {"execution_count", "outputs"}
    found = notebook["cells"]
    assert [c for c in found if c.keys() != (of_code if c["cell_type"] == "code" else keys)] == []
    assert len({cell["id"] for cell in found}) == len(found)


def test_its_links_lead_to_files() -> None:
    text = "".join(
        "".join(cell["source"]) for cell in cells(PAGE.read_text(encoding="utf-8"), "markdown")
    )
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert len(targets) >= 6
    assert [target for target in targets if not (PAGE.parent / target).is_file()] == []
