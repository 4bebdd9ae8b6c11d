"""The code of the tutorials is that of the examples, or it runs as it stands."""

import os
import re
import sys
from pathlib import Path

import pytest

from processes import free_port, output_of, start, start_two

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.M | re.S)


def script_of(page: str, folder: Path) -> Path:
    """All Python blocks of a page, as one file."""
    script = folder / "script.py"
    script.write_text("\n".join(blocks(page)))
    return script


@pytest.mark.parametrize(
    ("page", "example"),
    [("own-loop.md", "plain_pytorch.py"), ("hugging-face.md", "hugging_face_trainer.py")],
)
def test_a_page_shows_the_example_as_it_is(page: str, example: str) -> None:
    found = blocks(page)
    assert found
    text = (ROOT / "examples" / example).read_text()
    assert [block for block in found if block not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own-codec.md", "own-outer-optimizer.md"])
def test_an_extension_runs_and_keeps_its_contract(page: str, tmp_path: Path) -> None:
    script = script_of(page, tmp_path)
    assert "rounds: 2" in output_of(start([sys.executable, str(script)]))
    options = ["-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    tested = output_of(start([sys.executable, "-m", "pytest", *options, str(script)]))
    assert int(re.findall(r"(\d+) passed", tested)[0]) >= 5


@pytest.mark.slow
def test_nodes_of_two_ranks_end_with_equal_shards(tmp_path: Path) -> None:
    script = script_of("fsdp2-nodes.md", tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = "".join(output_of(process) for process in start_two([*launch, str(script)]))
    found = re.findall(r"worker (\d) rank (\d): 4 rounds ([0-9a-f]{64})", output)
    assert sorted((w, r) for w, r, _ in found) == [(w, r) for w in "01" for r in "01"]
    assert len({(rank, digest) for _, rank, digest in found}) == 2


@pytest.mark.slow
def test_workers_by_an_address_run_the_commands_of_the_page(tmp_path: Path) -> None:
    text = (PAGES / "two-machines.md").read_text()
    found = re.findall(r"^THINWIRE_MEET=HOST:29400 (.*) python (\S+) (\S+)$", text, re.M)
    assert len(found) == 2
    meeting = f"127.0.0.1:{free_port()}"
    team = [
        start(
            [sys.executable, str(ROOT / script), str(tmp_path / folder)],
            THINWIRE_MEET=meeting,
            **dict(pair.split("=") for pair in settings.split()),
        )
        for settings, script, folder in found
    ]
    digests = re.findall(r"[0-9a-f]{64}", "".join(output_of(process) for process in team))
    assert len(digests) == 2
    assert len(set(digests)) == 1
