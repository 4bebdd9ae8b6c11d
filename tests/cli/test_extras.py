import re
import tomllib
from pathlib import Path

import pytest

from thinwire.cli import EXTRAS, install_text

ROOT = Path(__file__).parents[2]
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = {
    extra: {re.match(r"[\w-]+", line)[0] for line in lines} - {"thinwire"}
    for extra, lines in TOML.items()
    if extra not in ("dev", "docs")
}


def test_an_error_names_the_extra_that_installs_a_module() -> None:
    assert all(modules <= PACKAGES[extra] for extra, modules in EXTRAS.items())
    assert set().union(*PACKAGES.values()) == set().union(*EXTRAS.values())


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("tyro", "pip install 'thinwire[cli]'"),
        ("torchdata.stateful_dataloader", "pip install 'thinwire[train]'"),
        ("wandb.sdk", "pip install wandb"),
        (None, "pip install 'thinwire[all]'"),
    ],
)
def test_an_error_names_what_installs_the_module(name: str | None, do: str) -> None:
    assert install_text(ModuleNotFoundError(name=name)) == do


def test_the_page_of_how_to_install_has_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("## Extras")[2].partition("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == TOML.keys()
