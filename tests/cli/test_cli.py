import json
import os
import re
import subprocess
import sys

import pytest

from thinwire.cli import main
from thinwire.cli.command import COMMANDS

FLAGS = {
    "train": """accumulate checkpoint-steps clip-norm compile corpus device evaluate-steps
        global-batch inner-lr keep-checkpoints log-steps method model out outer-device outer-lr
        outer-momentum precision recipe resume seed sequence-length steps sync-every tensorboard
        threads timeout-s tokenizer trackio wandb warmup-steps worker-size workers
        elastic identity min-workers patience token-file bucket run-name worker""",
    "compare": """accumulate baseline bits checkpoint-steps clip-norm compile corpus density device
        evaluate-steps experiment global-batch inner-lr jobs keep-checkpoints log-steps methods
        model out outer-device outer-lr outer-momentum precision recipe seeds sequence-length
        steps sync-every threads timeout-s tokenizer tune warmup-steps worker-size workers""",
    "plan": """accelerator accelerators-per-worker bandwidth decode-time down egress-price
        elastic encode-time from get-price json latency layers methods mfu model parameters
        put-price sealed step-time sync-every target tokens tokens-per-step topology
        traffic-price up worker-price workers""",
    "report": "out watch",
    "lighthouse": """allow-fork bind heartbeat-timeout-s join-timeout-s metrics min-workers public
        token-file""",
    "status": "json run-name token-file watch",
    "doctor": "layers model parameters step-time token-file workers",
    "serve": """accumulate bind checkpoint-steps clip-norm compile corpus device equal-steps
        evaluate-steps global-batch grace-s inner-lr keep-checkpoints log-steps lost-after-s method
        model out outer-device outer-lr outer-momentum precision recipe seed sequence-length steps
        sync-every threads timeout-s token-file tokenizer warmup-steps worker-size workers""",
}
FLAGS["join"] = FLAGS["train"]
FLAGS["work"] = re.sub("bind|equal-steps|grace-s|lost-after-s|out ", "", FLAGS["serve"])
FLAGS["work"] += " worker give-up-s"
NINES = "9" * 5000
PLAN = ["plan", "--parameters", "1B", "--layers", "10", "--workers", "2", "--step-time", "1s"]
PLAN += ["--bandwidth", "1Gbit/s"]


def help_of(*arguments: str, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_frozen(monkeypatch, command: str, capsys) -> None:
    """A new flag is a decision: most settings belong into a recipe."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(command, capsys=capsys)
    assert sorted(re.findall(r"^\W --([a-z][a-z-]+)", shown, re.M)) == sorted(
        FLAGS[command].split()
    )
    assert max(map(len, shown.splitlines())) <= 100  # those of the description
    assert "None" not in shown
    assert ("(default: the recipe's)" in shown) == ("--recipe" in shown)


def test_all_commands_are_listed_for_a_newcomer(capsys) -> None:
    listed = help_of(capsys=capsys)
    assert re.findall(r"^\W+ (\w+)  +[A-Z]", listed, re.M) == list(COMMANDS)
    for command in ("compare", "report", "train", "doctor"):
        assert f"\n$ thinwire {command} " in listed
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert capsys.readouterr().out == listed


def test_completion_knows_flags(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--tyro-print-completion", "bash"])
    assert not caught.value.code
    assert "--sync-every" in capsys.readouterr().out


SMALL = [
    "--steps", "6", "--sync-every", "2", "--sequence-length", "16", "--threads", "1",
    "--global-batch", "4", "--workers", "2", "--evaluate-steps", "0", "--warmup-steps", "2",
]  # fmt: skip


def test_train_prints_and_writes_a_summary(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert main(["train", "--method", "muloco", "--out", str(out), "--tensorboard", *SMALL]) == 0
    summary = json.loads((out / "summary.json").read_text())
    printed = capsys.readouterr().out
    assert f"validation loss {summary['val_loss']:.4f}" in printed
    assert summary["outer_digest"][:12] in printed
    assert list((out / "tensorboard").iterdir())
    assert json.loads((out / "config.json").read_text())["method"]["sync_every"] == 2


@pytest.mark.parametrize("name", ["[/red]", "[bold]", "[link=x]"])
def test_a_folder_is_named_as_it_is_called(tmp_path, monkeypatch, capsys, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--out", name, *SMALL]) == 0
    begins, *_, ends = capsys.readouterr().out.splitlines()
    assert begins == f"{name}: going on from step 0"
    assert ends.endswith(f"; {name}")


def test_compare_prints_a_table_and_keeps_finished_runs(tmp_path, capsys) -> None:
    methods = "ddp,diloco,muloco:bits=2"  # --sync-every acts on those that have rounds
    arguments = ["compare", "--methods", methods, "--seeds", "0,1", "--out", str(tmp_path)]
    assert main([*arguments, *SMALL]) == 0
    first = (tmp_path / "diloco-seed0" / "summary.json").read_text()
    assert main([*arguments, *SMALL]) == 0
    assert (tmp_path / "diloco-seed0" / "summary.json").read_text() == first
    printed = capsys.readouterr().out
    assert "±" in printed
    assert printed.count("\n muloco:bits=2 ") == 2
    assert "memory" in printed
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert [len(runs) for runs in compared.values()] == [2, 2, 2]
    memory = compared["muloco:bits=2"][0]["memory_bytes"]
    assert memory["feedback"] == memory["anchor"] == memory["live_weights"]
    assert len({run["tokens"] for runs in compared.values() for run in runs}) == 1


def test_compare_takes_a_grid_and_says_what_is_missing(tmp_path, capsys) -> None:
    (tmp_path / "mine.py").write_text(
        "from thinwire.experiments import Experiment\n"
        "def grid():\n    return Experiment(methods=('ddp',), seeds=(0, 1))\n"
    )
    out = tmp_path / "out"
    own = ["--experiment", f"{tmp_path}/mine.py:grid", "--methods", "diloco", "--seeds", "0"]
    arguments = ["compare", *own, *SMALL, "--sync-every", "2,3", "--out", str(out)]
    assert main(arguments) == 0
    assert set(json.loads((out / "compare.json").read_text())) == {"diloco H=2", "diloco H=3"}
    (out / "diloco-H-2-seed0" / "summary.json").write_text("{")
    capsys.readouterr()
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "left out of the tables above" in captured.out
    assert "diloco-H-2-seed0 has no result (corrupt: summary.json cannot be" in captured.err
    assert captured.err.count("\n") == 1
    compared = json.loads((out / "compare.json").read_text())
    assert [len(runs) for runs in compared.values()] == [0, 1]


@pytest.mark.slow
def test_compare_searches_rates(tmp_path, capsys) -> None:
    tune = ["--tune", "inner-lr=1e-3,8e-3", "diloco:outer-lr=0.5", "ddp:inner-lr=2e-3,4e-3"]
    few = ["--methods", "ddp,diloco", "--seeds", "0,1", "--baseline", "ddp", *SMALL]
    assert main(["compare", *tune, *few, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "tuning.json").read_text())["rows"]
    tried = {
        row: [candidate["settings"] for candidate in found["candidates"]]
        for row, found in rows.items()
    }
    assert tried["ddp"] == [{"inner_lr": 0.002}, {"inner_lr": 0.004}]
    assert [c["inner_lr"] for c in tried["diloco"]] == [0.001, 0.008]
    assert {c["outer_lr"] for c in tried["diloco"]} == {0.5}
    assert all(len(c["runs"]) == 2 for found in rows.values() for c in found["candidates"])
    assert "rates, out of 2 tried for each" in capsys.readouterr().out
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert {method: len(runs) for method, runs in compared.items()} == {"ddp": 2, "diloco": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["--method", "ddp"], "see thinwire --help"),
        (["train", "--out", ""], "--out that is empty"),
        (["train", "--out="], "--out= that is empty"),
        (["join", ""], "join that is empty"),
        (["report"], "without FOLDER..."),
        (["report", "--watch"], "without FOLDER..."),
        (["train", "--method", "dilocco"], "did you mean 'diloco'"),
        (["train", "--corpus", "no-such-corpus"], "no-such-corpus"),
        (["train", "--recipe", "laptpo"], "did you mean 'laptop'"),
        (["train", "--recipe", "missing.py:f"], "missing.py:f"),
        (["train", "--recipe", "broken.py:f"], "SyntaxError"),
        (["train", "--recipe", "empty.py:f"], "NoneType and not a TrainConfig"),
        (["train", "--resume"], "resume without --out"),
        (["train", "--model", "7q"], "7q"),
        (["train", "--sync-every", "0"], "sync_every=0"),
        (["train", "--method", "ddp", "--outer-lr", "0.5"], "has no lr"),
        (["train", "--outer-momentum", "1.0"], "momentum=1.0"),
        (["train", "--method", "noloco", "--outer-momentum", "0.9"], "they drift apart"),
        (["train", "--workers", "3"], "global batch of 16"),
        (["train", "--workers", "0"], "workers=0"),
        (["train", "--inner-lr", "-1"], "lr"),
        (["train", "--device", "abacus"], "abacus"),
        (["train", "--seed", str(10**30)], "seed=1000"),
        (["train", "--threads", str(10**30)], "threads=1000"),
        (["train", "--global-batch", str(10**30)], "global_batch=1000"),
        (["train", "--clip-norm", "inf"], "clip_norm=inf"),
        (["train", "--clip-norm", "nan"], "clip_norm=nan"),
        (["train", "--timeout-s", "inf"], "wait inf s"),
        (["train", "--timeout-s", "nan"], "wait nan s"),
        (["train", "--outer-lr", "1e308"], "lr=1e+308"),
        (["train", "--device", "meta"], "holds no numbers"),
        (["train", "--recipe", "raises.py:f"], "ZeroDivisionError: mine"),
        (["status", f"node:{NINES}", "--token-file", "good.txt"], "not HOST:PORT"),
        (["status", "tape://here", "--run-name", "r"], "tape://here"),
        (["status", "memory://"], "without --run-name"),
        (["join", "tape://here", "--run-name", "r", "--model", "250k"], "tape://here"),
        (["join", "memory://"], "without --run-name"),
        (["lighthouse", "--bind", f"127.0.0.1:{NINES}"], "not HOST:PORT"),
        (["lighthouse", "--bind", f"{'a' * 5000}:0"], "not HOST:PORT"),
        (["lighthouse", "--bind", "a..b:0"], "not HOST:PORT"),
        (["lighthouse", "--bind", "127.0.0.1:0", "--min-workers", NINES[:30]], "min_workers=999"),
        (["lighthouse", "--token-file", "latin.txt"], "latin.txt"),
        (["lighthouse", "--token-file", "empty.txt"], "0 characters"),
        (["lighthouse", "--token-file", "."], "Is a directory"),
        ([*PLAN, "--parameters", "1e30"], "parameters in 10 layers"),
        ([*PLAN, "--parameters", "1e308"], "parameters in 10 layers"),
        ([*PLAN, "--parameters", "1T", "--layers", "10k"], "product is at most"),
        ([*PLAN, "--workers", "1e9"], "workers=1000000000"),
        ([*PLAN, "--sync-every", "1e18"], "sync_every=1000000000000000000"),
        ([*PLAN, "--sync-every", "1e30"], "sync_every=1000"),
        (["compare", "--methods", "ddp,nope"], "nope"),
        (["compare", "--seeds", "0,x"], "--seeds '0,x'"),
        (["compare", "--workers", "1,"], "--workers '1,'"),
        (["compare", "--density", "1/0"], "--density '1/0'"),
        (["compare", "--bits", "3", "--methods", "muloco"], "3 bits"),
        (["compare", "--bits", "2", "--methods", "diloco"], "none of diloco has a bits"),
        (["compare", "--workers", "3"], "global batch of 16"),
        (["compare", "--jobs", "0"], "0 jobs"),
        (["compare", "--baseline", "dilco"], "'dilco'"),
        (["compare", "--experiment", "missing.py:f"], "missing.py:f"),
        (["compare", "--experiment", "empty.py:grid"], "int and not an Experiment"),
        (["compare", "--experiment", "empty.py:grid", "--recipe", "paper"], "has its own"),
        (["compare", "--tune", "inner-lr=1e-3,2e-3"], "one seed picks"),
        (["compare", "--tune", "lr=1e-3"], "none of inner-lr"),
        (["compare", "--tune", "inner-lr=x", "--seeds", "0,1"], "--tune 'x'"),
        (["compare", "--tune", "outer-lr=0.5,1", "--seeds", "0,1"], "same budget"),
    ],
)
def test_bad_input_is_one_clear_line_and_an_exit_status(
    tmp_path, monkeypatch, capsys, arguments, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "latin.txt").write_bytes(b"a token of many letters: \xe9")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "good.txt").write_text("a token of many letters")
    (tmp_path / "empty.py").write_text("def f(method):\n    pass\ndef grid():\n    return 3\n")
    (tmp_path / "raises.py").write_text("def f(method):\n    raise ZeroDivisionError('mine')\n")
    status = main(arguments)
    assert status in (1, 2)  # 2 for a name that does not exist
    error = capsys.readouterr().err
    assert status == 2 or "did you mean" not in error
    assert error.startswith("error: cannot ")
    assert message in error
    assert "because" in error
    assert "do:" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/summary.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--sync-evry", "3"], "Perhaps you meant: --sync-every INT"),
        (["train", "--metod", "x"], "Perhaps you meant: --method STR"),
        (["train", "--jobs", "2"], "Unrecognized options: --jobs"),
        (["train", "--steps", "many"], "--steps: no type matching INT"),
        (["train", "--steps", "None"], "--steps: no type matching INT"),
        (["train", "--clip-norm", "x"], "--clip-norm: no type matching FLOAT"),
        (["train", "--steps"], "Missing value for argument '--steps'"),
        (["train", "--precision", "fp8"], "invalid choice 'fp8'"),
        (["train", "diloco"], "Unrecognized options: diloco"),
        (["train", "--no-resume"], "Unrecognized options: --no-resume"),
        (["work", "h:1"], "--worker INT"),
        (["status"], "TICKET|URL"),
    ],
)
def test_what_tyro_cannot_read_ends_with_status_2(
    monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in " ".join(re.sub(r"[^\x20-\x7e]", " ", error).split())
    assert f"thinwire {arguments[0]} --help" in error


@pytest.mark.parametrize(
    ("command", "goes_on"),
    [
        (["train"], "; to go on: the same thinwire train with --resume and --out FOLDER"),
        (["join", "h:1"], "; to go on: the same thinwire join with --resume and --out FOLDER"),
        (["compare"], "; to go on: the same thinwire compare with --out FOLDER"),
        (["serve"], "; to go on: the same thinwire serve with --out FOLDER"),
        (["lighthouse"], ""),
        (["work", "h:1", "--worker", "0"], "; to go on: the same thinwire work"),
        (["plan"], ""),
    ],
)
def test_ctrl_c_names_the_command_that_goes_on(
    monkeypatch, capsys, command: list[str], goes_on: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS[command[0]], "main", interrupted)
    assert main(command) == 130
    assert capsys.readouterr().err == f"stopped{goes_on}\n"


def test_the_largest_number_that_a_flag_takes_can_be_read(tmp_path, capsys) -> None:
    assert main(["train", "--steps", "1" + 20 * "0", "--out", str(tmp_path / "run")]) == 1
    assert "up to 9,007,199,254,740,992\n" in capsys.readouterr().err


def test_under_torchrun_workers_come_from_the_ranks(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--workers", "2", "--out", str(tmp_path / "a")]) == 1
    assert "every rank is one worker" in capsys.readouterr().err
    assert main(["compare"]) == 1
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_without_an_out_folder_reaches_the_digest_of_one_process(tmp_path) -> None:
    """The command of the README, as it stands there."""
    at = SMALL.index("--workers")
    small = SMALL[:at] + SMALL[at + 2 :]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "thinwire", "train", "--method", "muloco", *small]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["muloco-1"]
    ranked = json.loads((tmp_path / "runs" / "muloco-1" / "summary.json").read_text())
    assert main(["train", "--method", "muloco", "--out", str(tmp_path / "one"), *SMALL]) == 0
    simulated = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert ranked["outer_digest"] == simulated["outer_digest"]
    assert ranked["workers"] == simulated["workers"] == 2


def test_a_recipe_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\nfrom thinwire.train.recipes import laptop\n"
        "def fast(method):\n    return dataclasses.replace(laptop(method), steps=3)\n"
    )
    out = tmp_path / "run"
    small = [a for a in SMALL if a not in ("--steps", "6")]
    assert main(["train", "--recipe", f"{file}:fast", "--out", str(out), *small]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 3
    assert main(["train", "--recipe", f"{file}:slow", "--out", str(out)]) == 1


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "train", "--method", "nope"],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot use method 'nope'")


def test_without_a_package_the_command_says_what_to_install(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL]) == 1
    error = capsys.readouterr().err
    assert "transformers" in error
    assert "pip install 'thinwire[train]'" in error
    assert error.count("\n") == 1


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "thinwire.cli.command", raising=False)
    assert main(["train"]) == 1
    assert "pip install 'thinwire[cli]'" in capsys.readouterr().err
