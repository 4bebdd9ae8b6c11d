"""`import thinwire` is for libraries and notebooks, commands answer at once: both stay light."""

import os
import subprocess
import sys

import pytest

import thinwire as tw
from thinwire.cli.command import COMMANDS

HEAVY = {"transformers", "datasets", "triton", "plotly", "tokenizers", "tyro", "rich"}
SLOW = {"torch", "numpy", "transformers", "datasets"}
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def loaded_by(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_pulls_in_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import thinwire; thinwire.OuterLoop, thinwire.presets")


@pytest.mark.slow
def test_import_loads_nothing_of_elastic_runs() -> None:
    before = loaded_by("import thinwire; thinwire.OuterLoop, thinwire.transport.Distributed")
    assert not [module for module in before if module.startswith("thinwire.elastic")]
    # The control: naming it does.
    assert "thinwire.elastic.transport" in loaded_by("import thinwire; thinwire.transport.Elastic")


@pytest.mark.slow_cases("report", "doctor")
@pytest.mark.parametrize("module", ["method", "plan.forecast", "report", "doctor"])
def test_any_module_may_be_the_first(module: str) -> None:
    """The package looks its public names up in `api`, which imports what it is needed for."""
    assert f"thinwire.{module}" in loaded_by(f"import thinwire.{module}")


@pytest.mark.slow
def test_import_takes_at_most_a_fifth_longer_than_torch() -> None:
    def seconds(module: str) -> float:
        # A collection of what torch has made is due about now, and falls on whoever comes next.
        code = (
            "import gc, time; gc.disable(); t = time.process_time(); "
            f"import {module}; print(time.process_time() - t)"
        )
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # What else the machine does only ever adds: of eight, the least come close.
    pairs = [(seconds("torch, thinwire.outer_loop"), seconds("torch")) for _ in range(8)]
    ours, theirs = zip(*pairs, strict=True)
    assert min(ours) / min(theirs) <= 1.2


# -- names that are imported when they are asked for -----------------------------------------------


def test_all_names_come_with_a_star_and_an_unknown_one_is_an_error() -> None:
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert set(tw.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="no attribute 'OuterLop'"):
        _ = tw.OuterLop


# -- commands --------------------------------------------------------------------------------------

LIGHT = [
    "",
    "--help",
    "--tyro-print-completion bash",
    *(f"{command} --help" for command in COMMANDS),
    "trian",
    "train --sync-evry 3",
    "train --steps many",
    "train --out ''",
    "plan",
    "plan --parameters 1B --sealed",
    "report",
    "join h:1",
    "train s3://bucket/run",
    "status s3://bucket",
]


def test_help_and_what_is_mistyped_come_without_torch() -> None:
    """And so within half a second; one process runs them all, as this one has loaded torch."""
    code = (
        "import shlex, sys\nfrom thinwire.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        main(shlex.split(line))\n    except SystemExit:\n        pass\n"
        f"    slow = {SLOW} & set(sys.modules)\n"
        "    if slow:\n        sys.exit(f'{line!r} loads {slow}')\n"
    )
    command = [sys.executable, "-c", code, *LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
