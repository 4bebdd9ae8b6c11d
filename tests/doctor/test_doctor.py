"""`thinwire doctor`: what it finds, and that it always comes to an end."""

import importlib.metadata
import json
import math
import re
import shlex
import shutil
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from unittest import mock

import pytest
import torch

from elastic_http import eventually, serving
from thinwire import presets
from thinwire.cli import main
from thinwire.codecs.kernels import VARIABLE
from thinwire.doctor import ExpectedRun, Finding, examine, machine, machine_checks, network
from thinwire.doctor.method import RunDescription, measured_link, method_finding
from thinwire.doctor.network import network_findings
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import HttpReply, RunServer, json_answer
from thinwire.elastic.registry_server import RegistryClient, RegistryServer
from thinwire.elastic.relay import RelayedServer
from thinwire.errors import ConfigurationError, ExchangeError
from thinwire.handshake import flatten_description
from thinwire.membership import Progress
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop
from thinwire.plan.link import Link
from thinwire.plan.shape import Shape
from thinwire.plan.units import parse_rate, share_text
from thinwire.security.token import Token
from thinwire.transport.address import interface_addresses

SECRET = "a secret of many characters"
TOKEN = Token(SECRET)


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
    assert time.monotonic() - start_s < 2
    assert (finding.status, finding.found) == ("warn", "not established: no answer within 0.05 s")
    assert "again while the machine is idle" in finding.do
    finding = examine("it", lambda: {}["x"])
    assert finding.found == "not established: KeyError('x')"
    assert finding.do.startswith("report it")


def test_versions_of_torchft_are_in_range_or_named_and_one_may_have_to_be(monkeypatch) -> None:
    for version, status in (
        *(("0.2.0", "ok"), ("0.2.7.dev1+cpu", "ok")),
        *((version, "fail") for version in ("0.1.9", "0.3.0", "1.0", "odd")),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        finding = look("torchft")
        assert finding.status == status
        assert version in finding.found
        assert ("thinwire[elastic]" in finding.do) == (status == "fail")
    missing = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    for lacking in ("warn", "fail"):
        assert look("torchft", lacking).status == look("safetensors", lacking).status == lacking
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
    finding = look("kernels")
    assert (finding.status, finding.found, finding.do) == ("fail", "it is not there", "install it")


def test_python_is_new_enough_and_the_token_is_there_or_it_says_how(monkeypatch, tmp_path) -> None:
    assert look("python").status == "ok"
    monkeypatch.setattr(machine, "_PYTHON", (99, 0))
    assert look("python").status == look("token").status == "fail"
    assert "THINWIRE_TOKEN" in look("token").do
    monkeypatch.setenv("THINWIRE_TOKEN", "short")
    assert "5 characters" in look("token").found
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    assert look("token").status == "ok"
    assert SECRET not in look("token").found
    assert look("token", token_file=tmp_path / "none").status == "fail"


def test_a_folder_has_room_for_checkpoints_and_can_be_written_to(monkeypatch) -> None:
    for gib, status in ((0, "fail"), (0.99, "fail"), (1, "warn"), (9.9, "warn"), (10, "ok")):
        usage = namedtuple("Usage", "total used free")(0, 0, int(gib * 2**30))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert look("folder").status == status
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    assert look("folder").status == "fail"
    assert "Permission denied" in look("folder").found


@contextmanager
def registry_server(lighthouse_port: int = 1) -> Iterator[str]:
    told = {"lighthouse_port": lighthouse_port, "on_event": lambda _: None}
    opened = RegistryServer(TOKEN, host="127.0.0.1", port=0, heartbeat_timeout_s=5.0, **told)
    with closing(opened):
        yield f"127.0.0.1:{opened.port}"


@contextmanager
def pretended(routes) -> Iterator[str]:
    """A registry that says what a test wants to be told; what is None it does not know."""
    told = {
        ("GET", "/time"): {"time": time.time()},
        ("GET", "/peers"): {"heartbeat_timeout_s": 5.0, "peers": []},
        ("GET", "/noise"): lambda _: HttpReply(body=bytes(1 << 20)),
        ("POST", "/probe"): {"reached": True, "why": ""},
        ("POST", "/discard"): {},
    } | routes
    answers = {
        key: v if callable(v) else (lambda _, v=v: json_answer(v))
        for key, v in told.items()
        if v is not None
    }
    with serving(answers) as port:
        yield f"127.0.0.1:{port}"


def findings(address: str, token: Token | None = TOKEN) -> dict[str, Finding]:
    return {finding.name: finding for finding in network_findings(address, token)}


@contextmanager
def worker_at(address: str) -> Iterator[RunServer]:
    """One that has joined; its server listens where others reach it."""
    with closing(RunServer(TOKEN, {}, host="127.0.0.1")) as server:
        join(address, "a", f"127.0.0.1:{server.port}")
        yield server


def join(address: str, identity: str, where: str, **described: str) -> None:
    worker = RegistryClient(TOKEN, address, identity, described)
    worker.join(Progress(version=0, step=0, digest=""), where)


def test_a_way_that_is_clear_is_ok_from_end_to_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lighthouse:
        port = lighthouse.getsockname()[1]
        with registry_server(port) as address, worker_at(address):
            found = findings(address)
    assert {finding.status for finding in found.values()} == {"ok"}, found
    assert " ".join(found) == "name registry clock lighthouse rate method inbound peers"
    assert found["peers"].found == "1 reached directly, 0 by way of the lighthouse"
    to, back = re.findall(r"[\d.]+ [MG]bit/s", found["rate"].found)
    assert min(parse_rate(to), parse_rate(back)) > 1e6
    if hasattr(socket, "TCP_INFO"):
        assert re.search(r"\d\.\d % of packets sent again", found["rate"].found)
    to, back = to.replace(" ", ""), back.replace(" ", "")
    assert f"--up {to} --down {back} --latency" in found["method"].do
    assert "reckoned for 150m, 2 workers" in found["method"].found


def test_a_worker_that_cannot_be_connected_to_is_reached_by_the_lighthouse(monkeypatch) -> None:
    direct = Dialer._direct

    def blocked(self, address: str, timeout_s: float):
        if address != self._relay:
            raise OSError("no route to host")
        return direct(self, address, timeout_s)

    with registry_server() as address, worker_at(address) as server:
        where = f"127.0.0.1:{server.port}"
        relayed = RelayedServer(Dialer(TOKEN, address), address, where, server.serve)

        def is_open() -> bool:
            with suppress(ExchangeError):
                open_stream(Dialer(TOKEN), address, f"worker/{where}", timeout_s=5).close()
                return True
            return False

        assert eventually(is_open)
        monkeypatch.setattr(Dialer, "_direct", blocked)
        found = findings(address)["peers"]
        relayed.close()
    assert found.found == "0 reached directly, 1 by way of the lighthouse"


def test_what_cannot_be_reached_is_named(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with registry_server(free) as address:
        join(address, "b", f"127.0.0.1:{free}")
        found = findings(address)
        refused = findings(address, Token("another secret of many characters"))["registry"]
        unasked = findings(address, None)["registry"]
    assert found["lighthouse"].status == found["peers"].status == "fail"
    assert found["peers"].found.startswith(f"1 of 1 not reached: b at 127.0.0.1:{free}: ")
    assert "is connected to the relay" in found["peers"].found
    assert refused.status == "fail"
    assert "THINWIRE_TOKEN" in refused.do
    assert unasked.status == "warn"
    assert "no token to ask more with" in unasked.found
    for token in (TOKEN, None):
        found = findings(f"127.0.0.1:{free}", token)
        assert found["registry"].status == "fail"
        assert "start thinwire lighthouse there" in found["registry"].do
        assert found["the rest"].found.startswith("not established")
    unknown = mock.Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = findings("nowhere.invalid:29400")
    assert list(found) == ["name", "the rest"]
    assert found["name"].status == "fail"
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        findings("nowhere")


@pytest.mark.parametrize(
    ("behind_s", "status", "word"),
    [
        (0, "ok", ""),
        (-3, "ok", "behind"),
        (290, "ok", "ahead of"),
        (3600, "warn", "1 h ahead of"),
        (-3600, "warn", "1 h behind"),
        *((told, "ok", "unknown: ") for told in (None, {}, [], "12")),
        *(({"time": told}, "ok", "unknown: ") for told in (None, "noon", float("nan"))),
    ],
)
def test_the_clock_is_compared_with_the_registrys_if_it_tells(behind_s, status, word) -> None:
    is_told = isinstance(behind_s, int)
    told = {"time": time.time() - behind_s} if is_told else behind_s
    with pretended({("GET", "/time"): told}) as address:
        found = findings(address)
    assert (found["registry"].status, found["clock"].status) == ("ok", status)
    assert word in found["clock"].found
    assert found["clock"].found.startswith("unknown: ") == (not is_told)
    assert ("15 min" in found["clock"].do) == (status == "warn")


def test_what_it_takes_to_connect_does_not_move_the_clock(monkeypatch) -> None:
    direct = Dialer._direct

    def slow(self, address: str, timeout_s: float):
        time.sleep(0.3)
        return direct(self, address, timeout_s)

    monkeypatch.setattr(Dialer, "_direct", slow)
    with registry_server() as address:
        found = findings(address)
    ahead, within = map(float, re.findall(r"([\d.]+) s", found["clock"].found))
    assert ahead <= within + 0.001
    assert within < 0.1


LINK = Link.of(20e6, latency_s=0.02)
BILLION = ExpectedRun(
    shape=Shape.of_size(10**9, 10), shape_flags="--parameters 1B --layers 10", workers=3, step_s=2.0
)


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
        read = RunDescription(fields=described(method, 1)).method()
        assert read.describe() == method.describe()


def test_of_a_slow_link_it_says_what_fits_with_the_settings_for_it() -> None:
    """Dense fp32 of 80 MB takes 53 s of every 83; few of the numbers take less than one."""
    shape = ExpectedRun(shape=Shape.of_size(2 * 10**7, 8), workers=2, step_s=1.0)
    finding = method_finding(Link.of(12e6, latency_s=0.02), shape, RunDescription())
    assert finding.status == "ok"
    best, figures = finding.found.split("; ")
    assert figures == "reckoned for 20M in 8 layers, 2 workers with this link, 1 s a step"
    first, *others = finding.run.advice.recommended
    busy = share_text(first.forecast.utilisation)
    assert best == f"{first.choice.text} keeps a worker busy {busy} at the least measured loss"
    assert len(others) >= 2
    for row in (first, *others):
        assert row.forecast.utilisation >= 0.9
        assert row.choice.sync_every is not None
        row.choice.method().check_elastic()
    assert finding.do.startswith("all workers take the flags of one below; ")


def test_a_slow_line_is_measured_and_planned_for_and_half_an_answer_is_none(monkeypatch) -> None:
    # It may take longer than other checks.
    monkeypatch.setattr(network, "_CHECK_S", 0.2)
    noise = HttpReply(body=bytes(1 << 20))
    with pretended({("GET", "/noise"): lambda _: time.sleep(0.8) or noise}) as address:
        found = findings(address)
    back = re.findall(r"([\d.]+ [kM]bit/s) from it", found["rate"].found)
    assert 1e5 < parse_rate(back[0]) <= 1.01 * 8 * 2**20 / 0.8  # three digits
    assert found["method"].status == "ok"
    # Dense pre-training of 150m needs a hundred times as much.
    assert "bits=1:" in found["method"].found
    monkeypatch.undo()
    with pretended({("GET", "/noise"): {}}) as address:
        found = findings(address)
    assert found["rate"].status == found["method"].status == "warn"
    assert "it sent 2 bytes of 1048576" in found["rate"].found
    assert "not measured" in found["method"].found


def test_its_advice_is_that_of_the_command_that_it_names(capsys) -> None:
    finding = method_finding(LINK, BILLION, RunDescription())
    said = {row.choice.text: row.forecast.utilisation for row in finding.run.advice.recommended}
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
    finding = method_finding(Link.of(1e6, latency_s=0.02), BILLION, RunDescription())
    assert finding.status == "warn"
    assert "nothing tried keeps a worker busy 90 % of the time; the busiest: " in finding.found
    assert {change.quantity for change in finding.run.advice.changes} >= {"bandwidth", "sync-every"}
    finding = method_finding(Link.of(1e-305), BILLION, RunDescription())
    assert finding.status == "warn"
    assert "no method's first exchange would ever end" in finding.found
    # Methods that an elastic run refuses are not offered.
    for rate in (1e5, 1e9, 1e13):
        advice = method_finding(Link.of(rate), BILLION, RunDescription()).run.advice
        found = {row.choice.preset for row in (*advice.recommended, *advice.changes)}
        assert found
        assert not {"ddp", "noloco", "demo", "decoupled_momentum"} & found


def test_what_was_not_measured_is_not_reckoned_with() -> None:
    for rate in (0, -1.0, math.inf, math.nan, None):
        assert measured_link(rate, 1e6, 0.1) is measured_link(1e6, rate, 0.1) is None
    assert measured_link(1e6, 1e6, math.nan) is None
    finding = method_finding(None, BILLION, RunDescription())
    assert finding.status == "warn"
    assert "not measured" in finding.found


def test_the_runs_own_method_and_size_come_from_the_registry() -> None:
    method = presets.from_text("muloco:bits=2", sync_every=17)
    with registry_server() as address:
        more = {"method.name": "muloco:bits=2", "method.kind": "Method"}
        join(address, "a", "127.0.0.1:1", **described(method, 10**9, 10**9, **more))
        found = findings(address)["method"]
    assert found.found.startswith("the run's muloco:bits=2 (H=17) keeps a worker busy ")
    assert "reckoned for 2B in 2 layers, 2 workers" in found.found
    assert "(assumed: say yours with --step-time)" in found.found
    assert "--parameters 2000000000 --layers 2 --workers 2" in found.do
    # One that does not tell its run is no obstacle.
    for told in (None, {}, [], {"description": 3}):
        with pretended({("GET", "/description"): told}) as address:
            found = findings(address)["method"].found
        assert "reckoned for 150m, 2 workers" in found
        assert "(assumed: say yours with --model, --workers, --step-time)" in found


def test_a_run_that_is_under_way_leaves_no_choice_while_its_method_fits() -> None:
    run = RunDescription(fields=described(presets.from_text("sparse_muloco"), 4, 3), workers=1)
    fits = method_finding(LINK, ExpectedRun(), run)
    assert (fits.status, fits.run) == ("ok", None)
    assert fits.found.startswith("the run's method (H=15) keeps a worker busy 99.8 %; reckoned")
    slow = method_finding(Link.of(1e6), BILLION, run)
    assert slow.status == "warn"
    assert ", too slow; nothing tried" in slow.found
    assert slow.do.startswith("begin another run, all workers of which have the flags of one below")
    assert slow.run is not None
    # What the user says is believed more than the registry.
    for sizes, workers, expected, reckoned in (
        ((4, 3), 5, BILLION, "reckoned for 1B in 10 layers, 3 workers"),
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
    assert "reckoned for 150m" in method_finding(LINK, ExpectedRun(), run).found


def test_the_command_takes_the_flags_of_plan_or_says_what_is_wrong(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    sizes = ["--parameters", "1B", "--layers", "10", "--workers", "3", "--step-time", "2s"]
    with pretended({}) as address:
        main(["doctor", address, *sizes])
    told = capsys.readouterr().out
    assert "reckoned for 1B in 10 layers, 3 workers with this link, 2 s a step" in told
    assert "thinwire plan --parameters 1B --layers 10 --workers 3 --step-time 2s" in told
    assert "what to run: busy 90 % of the time or more, least measured loss first" in told
    line = next(line for line in told.splitlines() if line.startswith("1  "))
    assert line.startswith("1  thinwire join 'TICKET' --recipe paper --model config.json --me")
    assert line.endswith(" --workers 3 --out runs/here")
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(line)[2:], "--help"])
    capsys.readouterr()
    for flags, why in [
        (["127.0.0.1:1", "--layers", "3"], "--layers and without --parameters"),
        (["127.0.0.1:1", "--parameters", "3"], "--parameters and without --layers"),
        (["127.0.0.1:1", "--model", "150m", "--layers", "3"], "both --model and --layers"),
        (["127.0.0.1:1", "--model", "7q"], "'7q'"),
        (["127.0.0.1:1", "--workers", "0"], "--workers '0'"),
        (["127.0.0.1:1", "--workers", "1M"], "workers=1000000"),
        (["127.0.0.1:1", "--step-time", "3q"], "--step-time '3q'"),
        (["--workers", "2"], "--workers without a ticket"),
    ]:
        assert main(["doctor", *flags]) in (1, 2)
        assert why in capsys.readouterr().err


def test_where_the_registry_cannot_connect_back_the_way_is_by_the_lighthouse() -> None:
    assert "127.0.0.1" in interface_addresses().values()
    for reached, told, why in (
        (False, "timed out", "timed out"),
        (True, "", "another machine that has this address"),
    ):
        with pretended({("POST", "/probe"): {"reached": reached, "why": told}}) as address:
            found = findings(address)["inbound"]
        assert found.status == "ok"
        assert why in found.found
        assert "by way of the lighthouse" in found.found


def test_the_command_shows_a_table_and_its_status_is_that_of_the_worst(monkeypatch, capsys) -> None:
    pytest.importorskip("torchft", reason="without it another check fails, too")
    monkeypatch.setenv("COLUMNS", "100")
    usage = namedtuple("Usage", "total used free")(0, 0, 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def told(status: int, *arguments: str) -> str:
        assert main(["doctor", *arguments]) == status
        return "".join(capsys.readouterr())

    local = told(0)
    assert "torchft" in local
    assert "THINWIRE_TOKEN" in local
    with pretended({}) as address:
        unasked = told(1, address)
        assert "checks failed: token" in unasked
        assert "takes connections; no token to ask more with" in unasked
        monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
        assert "checks failed: lighthouse" in told(1, address)
    assert "not HOST:PORT" in told(1, "nowhere")
