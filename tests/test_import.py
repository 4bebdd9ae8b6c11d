"""`import thinwire` is for libraries and notebooks, commands answer at once: both stay light."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire as tw
from forked import Forked
from thinwire.cli import main

HEAVY = {"transformers", "datasets", "triton", "plotly", "tokenizers", "torchdata", "tyro", "rich"}
SLOW = {"torch", "numpy", "transformers", "datasets"}
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
COMMANDS = ["train", "compare", "plan", "report", "bench", "serve", "work", "lighthouse", "status"]
COMMANDS += ["doctor"]


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


def test_import_loads_torch_where_it_is_used_and_not_before() -> None:
    described = "import thinwire as tw; method = tw.presets.sparseloco(); "
    described += "tw.Method.from_dict({'name': 'x'} | method.describe()); tw.codecs.from_id"
    assert not SLOW & loaded_by(described)
    assert "torch" in loaded_by("import thinwire; thinwire.OuterLoop")


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


@pytest.mark.slow_cases("experiments", "optim", "train", "transport")
@pytest.mark.parametrize("package", [".", "optim", "transport", "experiments", "train/data"])
def test_what_type_checkers_see_is_what_there_is(package: str) -> None:
    file = Path(tw.__file__).parent / package / "__init__.py"
    tree = ast.parse(file.read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    dotted = ".".join(("thinwire", *Path(package).parts))
    code = f"import json, {dotted} as package; "
    code += "print(json.dumps([dir(package), package.__all__, [repr(getattr(package, n)) for n in "
    code += "package.__all__]]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, public, found = json.loads(done.stdout)
    eager = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen | (eager & set(public)) == set(public)
    assert set(public) <= set(listed)
    # A module of a name's own name must not take its place.
    assert all("<module" not in text for text in found) or package == "."


def test_all_names_come_with_a_star_and_an_unknown_one_is_an_error() -> None:
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert set(tw.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="no attribute 'OuterLop'"):
        _ = tw.OuterLop


# -- commands --------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    # Boxes are drawn as the encoding of the stream allows.
    return [word for word in re.sub(r"[^\x21-\x7e]+", " ", text).split() if word.strip("-+|*")]


def same_answer(arguments: list[str], folder: Path) -> set[str]:
    """Modules that a command loads, whose answer is that of a process that has torch already."""
    code = (
        "import sys\nfrom thinwire.cli import main\n"
        "try:\n    status = main(sys.argv[2:])\n"
        "except SystemExit as error:\n    status = error.code\n"
        "open(sys.argv[1], 'w').write(' '.join(sys.modules))\nsys.exit(status)"
    )
    modules = folder / "modules.txt"
    command = [sys.executable, "-c", code, str(modules), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    control = Forked(["-m", "thinwire", *arguments], env=ENVIRONMENT)
    out, error = control.communicate(timeout=60)
    assert done.returncode == control.returncode
    assert [words(done.stdout), words(done.stderr)] == [words(out), words(error)]
    assert out + error
    return set(modules.read_text().split())


@pytest.mark.slow_cases("bench", "doctor", "lighthouse", "serve", "status", "work")
@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=" ".join)
def test_help_comes_without_torch(tmp_path, arguments: list[str]) -> None:
    loaded = same_answer([*arguments, "--help"], tmp_path)
    assert not loaded & (SLOW | {"rich"})


@pytest.mark.slow_cases(
    "compare", "doctor", "lighthouse", "serve", "status", "train", but=("train --sync-evry",)
)
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train", "--sync-evry", "3"],
        ["train", "--steps", "many"],
        ["train", "--resume"],
        ["train", "--method", "dilocco"],
        ["train", "--method", "ddp", "--outer-lr", "0.5"],
        ["train", "--workers", "3"],
        ["train", "--model", "7q"],
        ["train", "--patience", "0.5"],
        ["compare", "--methods", "ddp,nope"],
        ["compare", "--tune", "lr=1e-3"],
        ["plan"],
        ["plan", "--parameters", "many"],
        ["report", "nowhere"],
        ["bench", "nothing"],
        ["serve", "--bind", "a..b:0"],
        ["lighthouse", "--bind", "a..b:0"],
        ["status", "node:port", "--token-file", "missing.txt"],
        ["status", "s3://bucket"],
        ["doctor", "a..b:0"],
    ],
    ids=" ".join,
)
def test_wrong_flags_are_refused_without_torch(tmp_path, arguments: list[str]) -> None:
    assert not same_answer(arguments, tmp_path) & SLOW


def test_a_run_is_reported_without_torch(tmp_path) -> None:
    run = str(tmp_path / "run")
    steps = ["--steps", "4", "--warmup-steps", "2", "--sync-every", "2", "--evaluate-steps", "2"]
    sizes = ["--workers", "2", "--global-batch", "4", "--sequence-length", "16", "--threads", "1"]
    assert main(["train", "--out", run, *steps, *sizes]) == 0
    page = tmp_path / "page.html"
    assert not same_answer(["report", run, "--out", str(page)], tmp_path) & SLOW
    assert "diloco" in page.read_text()
