"""The package as an index and a user's environment see it."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import thinwire as tw

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = """import thinwire as tw
from torch import nn, optim

model = nn.Linear(3, 3)
outer = tw.OuterLoop(model, optim.SGD(model.parameters(), lr=0.1), tw.presets.diloco(sync_every=3))
outer.step()
"""
WRONG = """outer.sted()
tw.presets.muloco(bitz=2)
tw.Method(sync_every=3)
"""


def test_all_places_name_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {tw.__version__}\n" in citation
    (date,) = re.findall(r'date-released: "(.*)"', citation)
    assert f"\n## [{tw.__version__}] - {date}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_an_index_lists_every_extra_and_needs_no_repository() -> None:
    page = (ROOT / PROJECT["readme"]).read_text()
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert [target for target in targets if "://" not in target] == []
    extras = PROJECT["optional-dependencies"].keys() - {"dev", "docs"}  # of a checkout
    assert [e for e in extras if f"`{e}`" not in page and f"[{e}]" not in page] == []
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert set(everything[len("thinwire[") : -1].split(",")) == extras - {"all"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """sdist and wheel, the wheel out of the sdist."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree") / "thinwire"

    def left_out(folder: str, names: list[str]) -> set[str]:
        top = {".git", ".venv", "build", "dist", "runs"} if Path(folder) == ROOT else set()
        ends = (".egg-info", "_cache", "__pycache__", ".hypothesis")
        return {name for name in names if name in top or name.endswith(ends)}

    shutil.copytree(ROOT, tree, ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    return tree / "dist"


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    tree = {str(f.relative_to(source)) for f in (source / "thinwire").rglob("*") if f.is_file()}
    assert names == {name for name in tree if "__pycache__" not in name}


@pytest.mark.slow
def test_the_sdist_has_what_tests_and_pages_need(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("benchmarks", "docs", "examples", "src/thinwire", "tests", "tools", ".github")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    kinds = (".cff", ".in", ".md", ".toml", ".txt", ".yml")
    files += [ROOT / "Makefile", *(f for f in ROOT.iterdir() if f.suffix in kinds)]
    wanted = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    assert sorted(name for name in wanted - names if ".egg-info/" not in name) == []
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_users_script_is_checked_by_the_types_of_the_wheel(
    dist: Path, tmp_path: Path, checker: str
) -> None:
    # Not on the checkers' own path: there they would read types without py.typed, too.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(SCRIPT + WRONG)
    beside = Path(sys.executable).parent
    python = str(tmp_path / "env" / "bin" / "python")
    flags = {
        "pyright": ["--pythonpath", python],
        "mypy": ["--python-executable", python, "--follow-imports", "silent"],
    }
    environment = {"PATH": "/usr/bin:/bin"}

    def lines(name: str) -> tuple[int, set[int]]:
        command = [str(beside / checker), *flags[checker], name]
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, **how)
        found = re.findall(rf"{name}:(\d+)(?::\d+)?[: -]+error", done.stdout)
        return done.returncode, {int(line) for line in found}

    assert lines("right.py") == (0, set())
    status, found = lines("wrong.py")
    first = SCRIPT.count("\n") + 1
    assert status == 1
    assert found == {first, first + 1, first + 2}
