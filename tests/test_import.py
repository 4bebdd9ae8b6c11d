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


def output_of(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


# To load torch takes seconds: the children of a process that has it load nothing else in common.
FIRST = """
import os, sys, torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code)
        print(*sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, code
"""


def test_import_is_light_and_any_module_may_be_the_first() -> None:
    """The package looks its public names up in `api`, which imports what it is needed for."""
    modules = [f"thinwire.{name}" for name in ("method", "plan.forecast", "report", "doctor")]
    plain = "import thinwire; thinwire.OuterLoop, thinwire.presets, thinwire.transport.Distributed"
    elastic = "import thinwire; thinwire.transport.Elastic"
    lines = output_of(FIRST, plain, elastic, *map("import {}".format, modules)).splitlines()
    light, control, *others = (set(line.split()) for line in lines)
    assert not HEAVY & light
    assert not [module for module in light if module.startswith("thinwire.elastic")]
    assert "thinwire.elastic.transport" in control
    for module, loaded in zip(modules, others, strict=True):
        assert module in loaded


@pytest.mark.slow
def test_import_takes_at_most_a_fifth_longer_than_torch() -> None:
    def seconds(module: str) -> float:
        # A collection of what torch has made is due about now, and falls on whoever comes next.
        return float(
            output_of(
                "import gc, time; gc.disable(); t = time.process_time(); "
                f"import {module}; print(time.process_time() - t)"
            )
        )

    # What else the machine does only ever adds: of eight, the least come close.
    pairs = [(seconds("torch, thinwire.outer_loop"), seconds("torch")) for _ in range(8)]
    ours, theirs = zip(*pairs, strict=True)
    assert min(ours) / min(theirs) <= 1.2


def test_all_names_come_with_a_star_and_an_unknown_one_is_an_error() -> None:
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert set(tw.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="no attribute 'OuterLop'"):
        _ = tw.OuterLop


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
    "plan --parameters 1B --elastic",
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
    output_of(code, *LIGHT)
