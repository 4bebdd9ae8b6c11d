import re
import tomllib
from pathlib import Path

import pytest

from thinwire.cli.extras import EXTRA_OF, install_text

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("module", EXTRA_OF)
def test_an_extra_installs_the_modules_that_errors_name_it_for(module: str) -> None:
    assert module in [re.match(r"[\w-]+", wanted)[0] for wanted in EXTRAS[EXTRA_OF[module]]]


def test_every_package_of_an_extra_for_users_has_one() -> None:
    wanted = [
        line for name, lines in EXTRAS.items() if name not in ("dev", "docs") for line in lines
    ]
    assert {re.match(r"[\w-]+", line)[0] for line in wanted} - {"thinwire"} == set(EXTRA_OF)


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
    page = (PYPROJECT.parent / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("## Extras")[2].partition("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == EXTRAS.keys()
