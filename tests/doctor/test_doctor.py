"""`thinwire doctor`: what it finds, and that it always comes to an end."""

import importlib.metadata
import json
import re
import shlex
import shutil
import threading
import time
from collections import namedtuple
from contextlib import closing
from unittest import mock

import pytest
import torch

from elastic_ready import write_run
from thinwire import presets
from thinwire.address import Address
from thinwire.cli import main
from thinwire.cli.advice import command_line
from thinwire.codecs.kernels import VARIABLE
from thinwire.doctor import machine
from thinwire.doctor.machine import Finding, examine, machine_checks
from thinwire.doctor.method import ExpectedRun, RunDescription, method_finding
from thinwire.doctor.store import store_findings
from thinwire.elastic.roll import View
from thinwire.errors import ConfigurationError
from thinwire.handshake import flatten_description
from thinwire.membership import Progress
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop
from thinwire.plan.advice import Choice
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.shape import Shape
from thinwire.security.token import Token

SECRET = "a secret of many characters"
TOKEN = Token(SECRET)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path) -> None:
    for name in ("THINWIRE_TOKEN", VARIABLE, "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def look(name: str, lacking="fail", **options) -> Finding:
    return examine(name, machine_checks(lacking=lacking, **options)[name])


def test_a_check_that_hangs_or_breaks_is_no_verdict() -> None:
    never = threading.Event()
    start_s = time.monotonic()
    finding = examine("it", lambda: never.wait() and None, limit_s=0.05)
    assert time.monotonic() - start_s < 60
    never.set()  # its thread ends
    assert (finding.status, finding.found) == ("warn", "not established: no answer within 0.05 s")
    assert "again while the machine is idle" in finding.do
    finding = examine("it", lambda: {}["x"])
    assert finding.found == "not established: KeyError('x')"
    assert finding.do.startswith("report this line")


def test_an_old_obstore_is_named_and_one_may_have_to_be_there(monkeypatch) -> None:
    oks, fails = ("0.12.0", "0.12.1.dev1+cpu", "1.0"), ("0.11.9", "odd")
    for version, status in (*((v, "ok") for v in oks), *((v, "fail") for v in fails)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        finding = look("obstore")
        assert finding.status == status
        assert version in finding.found
        assert ("thinwire[elastic]" in finding.do) == (status == "fail")
    missing = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    for lacking in ("warn", "fail"):
        assert look("obstore", lacking).status == lacking
        assert look("torch", lacking).status == "fail"


def test_it_says_which_kernels_encode(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "kernel_backend", lambda device: "numba 1.2")
    assert look("kernels") == Finding(name="kernels", status="ok", found="numba 1.2, for cpu")
    monkeypatch.setattr(machine, "kernel_backend", lambda device: "torch")
    assert look("kernels").status == "warn"
    assert "thinwire[fast]" in look("kernels").do
    monkeypatch.setenv(VARIABLE, "torch")
    assert look("kernels").status == "ok"
    error = ConfigurationError("encode", because="it is not there", do="install it")
    monkeypatch.setattr(machine, "kernel_backend", mock.Mock(side_effect=error))
    assert look("kernels")[:3] == ("fail", "it is not there", "install it")


def test_the_token_is_there_or_it_says_how(monkeypatch, tmp_path) -> None:
    assert look("python").status == "ok"
    assert look("token").status == "warn"
    assert "THINWIRE_TOKEN" in look("token").do
    monkeypatch.setenv("THINWIRE_TOKEN", "short")
    assert "5 characters" in look("token").found
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    assert look("token").status == "ok"
    assert SECRET not in look("token").found
    assert look("token", token_file=tmp_path / "none").status == "fail"


def test_a_folder_has_room_for_checkpoints_and_can_be_written_to(monkeypatch) -> None:
    for gib, status in ((0, "fail"), (0.99, "fail"), (1, "warn"), (9.9, "warn"), (10, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=gib * 2**30: Usage(0, 0, free))
        assert look("folder").status == status
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    assert look("folder").status == "fail"
    assert "Permission denied" in look("folder").found


LINK = Link.of(20e6, latency_s=0.02)
BILLION = ExpectedRun(shape=Shape.of_size(10**9, 10), workers=3, step_s=2.0)


def described(method: Method, *rows: int, **more: str) -> dict[str, str]:
    """What a worker that trains `method` says of its run when it joins."""
    parameters = {f"model.layers.{place}.w": f"[{count}, 1]" for place, count in enumerate(rows)}
    nested = {"method": method.describe(), "parameters": parameters}
    return flatten_description(nested) | more


def test_the_size_of_a_run_is_that_of_its_parameters() -> None:
    """Of a description as a worker makes it, and not as a test thinks that it does."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = presets.streaming_diloco(layers=1)
    with closing(OuterLoop(model, optimizer, method)) as loop:
        run = RunDescription(fields=loop._state.description)
    assert run.size() == (13, 2)
    assert run.method().describe() == method.describe()
    for name in presets.names():
        method = presets.by_name(name)()
        fields = described(method, 1)
        for its in (fields, {key: fields[key] for key in sorted(fields)}):
            assert RunDescription(fields=its).method().describe() == method.describe()


def test_of_a_slow_link_it_says_what_fits_as_the_command_does_that_it_names(capsys) -> None:
    finding = method_finding(LINK, BILLION, RunDescription())
    assert finding.status == "ok"
    assert finding.do.startswith("all workers take the flags of one below; ")
    recommended = finding.run.advice.recommended
    said = {row.choice.text: row.forecast.utilisation for row in recommended}
    command = finding.do.partition("thinwire ")[2].split()
    assert main([*command, "--json", "--methods", "ddp"]) == 0
    planned = json.loads(capsys.readouterr().out)["advice"]["recommended"]
    shared = {row["method"]: row["forecast"] for row in planned if row["method"] in said}
    assert list(shared) == [row["method"] for row in planned if "noloco" not in row["method"]]
    assert list(said)[: len(shared)] == list(shared)
    assert len(shared) >= 2
    for method, forecast in shared.items():
        assert said[method] == pytest.approx(forecast["utilisation"])


def test_where_nothing_fits_it_says_which_comes_closest_and_what_would_help() -> None:
    assert "not measured" in method_finding(None, BILLION, RunDescription()).found
    # Methods that an elastic run refuses are not offered.
    for rate, said in ((1e-305, "no presets"), (1e6, "no presets"), (1e13, "5 presets")):
        finding = method_finding(Link.of(rate, latency_s=0.02), BILLION, RunDescription())
        assert f"{said} keep a worker busy 90 % of the time" in finding.found
        assert (finding.status == "ok") == (rate == 1e13)
        advice = finding.run.advice
        found = {row.choice.preset for row in (*advice.recommended, *advice.changes)}
        assert found
        # Methods that an elastic run refuses are not offered.
        assert not {"ddp", "noloco", "demo", "decoupled_momentum"} & found
        if rate == 1e6:
            assert {change.quantity for change in advice.changes} >= {"bandwidth", "sync-every"}


def test_the_runs_own_method_and_size_come_from_the_store(tmp_path) -> None:
    pytest.importorskip("obstore")
    method = presets.from_text("muloco:bits=2", sync_every=17)
    more = {"method.name": "muloco:bits=2", "method.kind": "Method"}
    at = Progress(version=3, step=51, digest="ab")
    newest = View(number=1, names=("a:1",), phase="round", position=at)
    about, url = described(method, 10**9, 10**9, **more), f"file://{tmp_path}"
    write_run(url, newest, token=TOKEN, about=about)
    *_, found = store_findings(url, run="r", token=TOKEN)
    assert found.found.startswith("the run's muloco:bits=2 (H=17) keeps a worker busy ")
    assert "computed for 2B in 2 layers, 2 workers" in found.found
    assert "--parameters 2000000000 --layers 2 --workers 2" in found.do
    # Of another run only the link is known.
    *_, found = store_findings(url, run="typo", token=TOKEN)
    assert found.status != "fail"
    assert "computed for 150m, 2 workers" in found.found
    assert found.found.startswith("run 'typo' has no worker that this token opens; ")


def test_a_run_that_is_under_way_leaves_no_choice_while_its_method_fits() -> None:
    run = RunDescription(fields=described(presets.from_text("sparse_muloco"), 4, 3), workers=1)
    fits = method_finding(LINK, ExpectedRun(), run)
    assert (fits.status, fits.run) == ("ok", None)
    assert fits.found.startswith("the run's method (H=15) keeps a worker busy 99.7 %; computed")
    slow = method_finding(Link.of(1e6), BILLION, run)
    assert slow.status == "warn"
    assert "; no presets keep" in slow.found
    assert slow.do.startswith("begin another run, all workers of which have the flags of one below")
    assert slow.run is not None
    # What the user says is believed more than the store.
    for sizes, workers, expected, reckoned in (
        ((4, 3), 5, BILLION, "computed for 1B in 10 layers, 3 workers"),
        ((4, 3), 5, ExpectedRun(), "7 in 2 layers, 6 workers"),
        ((1,), 1, ExpectedRun(), "1 in 1 layers, 2 workers"),
    ):
        run = RunDescription(fields=described(presets.diloco(), *sizes), workers=workers)
        assert reckoned in method_finding(LINK, expected, run).found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method.outer": "SGD", "method.outer.lr": "1"},
        {"method.outer.lr": "1", "method.outer": "SGD"},
        {"method.sync_every": "many"},
        *({"parameters.w": told} for told in ("many", "7", '["many"]', "[0, 3]", "[-7]")),
        {"parameters.w": "[" * 5000},
        described(presets.diloco()) | {"method.codec.kind": "OfALaterVersion"},
        described(presets.diloco()) | {"method.sync_every": "-1"},
        # Read back, it would be another one than it was.
        described(presets.diloco()) | {"method.sync_every": "030"},
    ],
)
def test_a_description_that_says_nothing_or_something_else_is_passed_over(fields) -> None:
    run = RunDescription(fields=fields, workers=1)
    assert run.method() is run.size() is None
    if not fields:
        assert "computed for 150m" in method_finding(LINK, ExpectedRun(), run).found


def test_the_command_takes_the_flags_of_plan_and_names_one_that_joins(
    monkeypatch, capsys, tmp_path
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    url, size = f"file://{tmp_path}/store/r", "--parameters 1B --layers 10 --workers 3"
    main(["doctor", url, *size.split(), "--step-time", "2s"])
    told = capsys.readouterr().out
    assert "thinwire plan --parameters 1000000000 --layers 10 --workers 3 --step-time 2s" in told
    assert "what to run: busy 90 % of the time or more, least measured loss first" in told
    line = next(line for line in told.splitlines() if line.startswith("1  "))
    where = shlex.quote(url)
    assert line.startswith(f"1  thinwire join {where} --recipe paper --model config.json --me")
    assert line.endswith(" --workers 3 --out runs/here")
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(line)[2:], "--help"])
    capsys.readouterr()
    main(["doctor", url])
    assert f"1  thinwire join {where} --recipe paper --model 150m --m" in capsys.readouterr().out
    # Without the token, which no output has; with the place where it belongs.
    job = Job(shape=Shape.of_size(1000, 1), workers=2, compute=Compute(step_s=1), link=Link.of(1e6))
    line = command_line(Choice(preset="muloco"), job, at=Address("hub://h:1", "r"))
    assert line.startswith("thinwire join hub://TOKEN@h:1/r ")


def test_the_command_shows_a_table_and_its_status_is_that_of_the_worst(
    monkeypatch, capsys, tmp_path
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**40))

    def told(status: int, *arguments: str) -> str:
        assert main(["doctor", *arguments]) == status
        return "".join(capsys.readouterr())

    local = told(0)
    assert "obstore" in local
    assert "THINWIRE_TOKEN" in local
    assert "checks failed: token" in told(1, "--token-file", "nowhere")
    (tmp_path / "file").touch()
    assert "checks failed: store" in told(1, f"file://{tmp_path}/file/r")
    assert re.search(r"s +(ahead of|behind) +the store's", told(0, f"file://{tmp_path}/r"))
