"""The code of the tutorials is that of the examples, or it runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import free_port

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.M | re.S)


def script_of(page: str, folder: Path) -> Path:
    """All Python blocks of a page, as one file."""
    script = folder / "script.py"
    script.write_text("\n".join(blocks(page)))
    return script


def start(command: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )


def output_of(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize(
    ("page", "example"),
    [("own-loop.md", "plain_pytorch.py"), ("hugging-face.md", "hugging_face_trainer.py")],
)
def test_a_page_shows_the_example_as_it_is(page: str, example: str) -> None:
    found = blocks(page)
    assert found
    text = (ROOT / "examples" / example).read_text()
    assert [block for block in found if block not in text] == []
