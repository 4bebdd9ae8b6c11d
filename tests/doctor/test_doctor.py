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
from contextlib import closing, contextmanager

import pytest
import torch

from elastic_http import eventually
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
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.chdir(tmp_path)


def look(name: str, lacking="fail", **options) -> Finding:
    return examine(name, machine_checks(lacking=lacking, **options)[name])


def test_a_check_that_hangs_is_left_behind() -> None:
    never = threading.Event()
    start_s = time.monotonic()
    finding = examine("it", lambda: never.wait() and None, limit_s=0.05)
    assert time.monotonic() - start_s < 2
    assert (finding.status, finding.found) == ("warn", "not established: no answer within 0.05 s")
    assert "again while the machine is idle" in finding.do


def test_a_check_that_breaks_is_no_verdict() -> None:
    def broken() -> Finding:
        raise KeyError("x")

    finding = examine("it", broken)
    assert finding.found == "not established: KeyError('x')"
    assert finding.do.startswith("report it")


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.2.0", "ok"),
        ("0.2.7.dev1+cpu", "ok"),
        ("0.1.9", "fail"),
        ("0.3.0", "fail"),
        ("1.0", "fail"),
        ("odd", "fail"),
    ],
)
def test_versions_of_torchft_are_in_range_or_named(monkeypatch, version, status) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    finding = look("torchft")
    assert finding.status == status
    assert version in finding.found
    assert ("thinwire[elastic]" in finding.do) == (status == "fail")


@pytest.mark.parametrize("lacking", ["warn", "fail"])
def test_what_is_not_installed_is_as_bad_as_the_run_needs_it(monkeypatch, lacking) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert look("torchft", lacking).status == lacking
    assert look("safetensors", lacking).status == lacking
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

    def refused(device):
        raise ConfigurationError("encode", because="it is not there", do="install it")

    monkeypatch.setattr(machine, "kernel_backend", refused)
    finding = look("kernels")
    assert (finding.status, finding.found, finding.do) == ("fail", "it is not there", "install it")


def test_an_old_python_is_not_enough(monkeypatch) -> None:
    assert look("python").status == "ok"
    monkeypatch.setattr(machine, "_PYTHON", (99, 0))
    assert look("python").status == "fail"


def test_the_token_is_there_or_it_says_how_to_give_it(monkeypatch, tmp_path) -> None:
    assert look("token").status == "fail"
    assert "THINWIRE_TOKEN" in look("token").do
    monkeypatch.setenv("THINWIRE_TOKEN", "short")
    assert "5 characters" in look("token").found
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    finding = look("token")
    assert finding.status == "ok"
    assert SECRET not in finding.found
    assert look("token", token_file=tmp_path / "none").status == "fail"


@pytest.mark.parametrize(
    ("free_gib", "status"), [(0, "fail"), (0.99, "fail"), (1, "warn"), (9.9, "warn"), (10, "ok")]
)
def test_room_for_checkpoints(monkeypatch, free_gib, status) -> None:
    usage = namedtuple("Usage", "total used free")(0, 0, int(free_gib * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert look("folder").status == status


def test_a_folder_without_write_access_is_found(monkeypatch) -> None:
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    finding = look("folder")
    assert finding.status == "fail"
    assert "Permission denied" in finding.found


@contextmanager
def registry_server(lighthouse_port: int) -> Iterator[str]:
    opened = RegistryServer(
        TOKEN,
        host="127.0.0.1",
        port=0,
        lighthouse_port=lighthouse_port,
        heartbeat_timeout_s=5.0,
        on_event=lambda _: None,
    )
    try:
        yield f"127.0.0.1:{opened.port}"
    finally:
        opened.close()


@contextmanager
def pretended(routes) -> Iterator[str]:
    """A registry that says what a test wants to be told; what is None it does not know.

    What can be called answers by itself.
    """
    plain = {
        ("GET", "/time"): {"time": time.time()},
        ("GET", "/peers"): {"heartbeat_timeout_s": 5.0, "peers": []},
        ("POST", "/probe"): {"reached": True, "why": ""},
        ("POST", "/discard"): {},
    }
    noise = {("GET", "/noise"): lambda _: HttpReply(body=bytes(1 << 20))}
    told = {key: value for key, value in (plain | noise | routes).items() if value is not None}
    answers = {
        key: v if callable(v) else (lambda _, v=v: json_answer(v)) for key, v in told.items()
    }
    server = RunServer(TOKEN, answers, host="127.0.0.1")
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


def findings(address: str, token: Token | None = TOKEN) -> dict[str, Finding]:
    return {finding.name: finding for finding in network_findings(address, token)}


@contextmanager
def worker_at(address: str, identity: str) -> Iterator[RunServer]:
    """A worker that has joined; its server listens where others reach it."""
    server = RunServer(TOKEN, {}, host="127.0.0.1")
    worker = RegistryClient(TOKEN, address, identity, {})
    worker.join(Progress(version=0, step=0, digest=""), f"127.0.0.1:{server.port}")
    try:
        yield server
    finally:
        server.close()


def test_a_way_that_is_clear_is_ok_from_end_to_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lighthouse:
        port = lighthouse.getsockname()[1]
        with registry_server(port) as address, worker_at(address, "a"):
            found = findings(address)
    assert {finding.status for finding in found.values()} == {"ok"}, found
    checks = ["name", "registry", "clock", "lighthouse", "rate", "method", "inbound", "peers"]
    assert list(found) == checks
    assert found["peers"].found == "1 reached directly, 0 by way of the lighthouse"
    to, back = re.findall(r"[\d.]+ [MG]bit/s", found["rate"].found)
    assert min(parse_rate(to), parse_rate(back)) > 1e6
    if hasattr(socket, "TCP_INFO"):
        assert re.search(r"\d\.\d % of packets sent again", found["rate"].found)
    to, back = to.replace(" ", ""), back.replace(" ", "")
    assert f"--up {to} --down {back} --latency" in found["method"].do
    assert "reckoned for 150m, 2 workers" in found["method"].found


def test_a_worker_that_cannot_be_connected_to_is_reached_by_way_of_the_lighthouse(
    monkeypatch,
) -> None:
    direct = Dialer._direct

    def blocked(self, address: str, timeout_s: float):
        if address != self._relay:
            raise OSError("no route to host")
        return direct(self, address, timeout_s)

    with registry_server(1) as address, worker_at(address, "a") as server:
        where = f"127.0.0.1:{server.port}"
        relayed = RelayedServer(Dialer(TOKEN, address), address, where, server.serve)
        assert eventually(lambda: open_stream_works(address, where))
        monkeypatch.setattr(Dialer, "_direct", blocked)
        found = findings(address)["peers"]
        relayed.close()
    assert found.found == "0 reached directly, 1 by way of the lighthouse"


def open_stream_works(address: str, where: str) -> bool:
    try:
        open_stream(Dialer(TOKEN), address, f"worker/{where}", timeout_s=5).close()
    except ExchangeError:
        return False
    return True


def test_what_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with registry_server(free) as address:
        worker = RegistryClient(TOKEN, address, "b", {})
        worker.join(Progress(version=0, step=0, digest=""), f"127.0.0.1:{free}")
        found = findings(address)
    assert found["lighthouse"].status == found["peers"].status == "fail"
    assert found["peers"].found.startswith(f"1 of 1 not reached: b at 127.0.0.1:{free}: ")
    assert "is connected to the relay" in found["peers"].found


def test_a_registry_that_is_not_there(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for token in (TOKEN, None):
        found = findings(f"127.0.0.1:{port}", token)
        assert found["registry"].status == "fail"
        assert "start thinwire lighthouse there" in found["registry"].do
        assert found["the rest"].found.startswith("not established")


def test_another_token_than_the_registrys_or_none() -> None:
    with registry_server(1) as address:
        refused = findings(address, Token("another secret of many characters"))
        unasked = findings(address, None)
    assert refused["registry"].status == "fail"
    assert "THINWIRE_TOKEN" in refused["registry"].do
    assert unasked["registry"].status == "warn"
    assert "no token to ask more with" in unasked["registry"].found


def test_a_name_that_is_unknown(monkeypatch) -> None:
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

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
        (3, "ok", "ahead of"),
        (290, "ok", "ahead of"),
        (3600, "warn", "1 h ahead of"),
        (-3600, "warn", "1 h behind"),
    ],
)
def test_the_clock_is_compared_with_the_registrys(behind_s, status, word) -> None:
    with pretended({("GET", "/time"): {"time": time.time() - behind_s}}) as address:
        found = findings(address)["clock"]
    assert found.status == status
    assert word in found.found
    assert ("15 min" in found.do) == (status == "warn")


@pytest.mark.parametrize(
    "told", [None, {}, {"time": None}, {"time": "noon"}, {"time": float("nan")}, [], "12"]
)
def test_a_lighthouse_that_does_not_tell_its_time_leaves_the_clock_unknown(told) -> None:
    with pretended({("GET", "/time"): told}) as address:
        found = findings(address)
    assert found["clock"].status == found["registry"].status == "ok"
    assert found["clock"].found.startswith("unknown: ")


def test_what_it_takes_to_connect_does_not_move_the_clock(monkeypatch) -> None:
    direct = Dialer._direct

    def slow(self, address: str, timeout_s: float):
        time.sleep(0.3)
        return direct(self, address, timeout_s)

    monkeypatch.setattr(Dialer, "_direct", slow)
    with registry_server(1) as address:
        found = findings(address)
    ahead, within = map(float, re.findall(r"([\d.]+) s", found["clock"].found))
    assert ahead <= within + 0.001
    assert within < 0.1


# -- which method fits -----------------------------------------------------------------------------

LINK = Link.of(20e6, latency_s=0.02)
BILLION = ExpectedRun(
    shape=Shape.of_size(10**9, 10),
    shape_flags="--parameters 1B --layers 10",
    workers=3,
    step_s=2.0,
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
    again = run.method()
    assert again is not None
    assert again.describe() == method.describe()


def test_of_a_slow_link_it_says_what_fits_with_the_settings_for_it() -> None:
    """Dense fp32 of 80 MB takes 53 s of every 83; few of the numbers take less than one."""
    shape = ExpectedRun(shape=Shape.of_size(2 * 10**7, 8), workers=2, step_s=1.0)
    finding = method_finding(Link.of(12e6, latency_s=0.02), shape, RunDescription())
    assert finding.status == "ok"
    best, figures = finding.found.split("; ")
    assert figures == "reckoned for 20M in 8 layers, 2 workers with this link, 1 s a step"
    assert finding.run is not None
    first, *others = finding.run.advice.recommended
    busy = first.forecast.utilisation
    assert best == (
        f"{first.choice.text} keeps a worker busy {share_text(busy)} at the least measured loss"
    )
    assert len(others) >= 2
    for row in (first, *others):
        assert row.forecast.utilisation >= 0.9
        assert row.choice.sync_every is not None
        row.choice.method().check_elastic()
    assert finding.do.startswith("all workers take the flags of one below; ")


def test_a_slow_line_is_measured_and_planned_for(monkeypatch) -> None:
    def slow(_: bytes) -> HttpReply:
        time.sleep(0.8)
        return HttpReply(body=bytes(1 << 20))

    # It may take longer than other checks.
    monkeypatch.setattr(network, "_CHECK_S", 0.2)
    with pretended({("GET", "/noise"): slow}) as address:
        found = findings(address)
    back = re.findall(r"([\d.]+ [kM]bit/s) from it", found["rate"].found)
    assert 1e5 < parse_rate(back[0]) <= 1.01 * 8 * 2**20 / 0.8  # three digits
    assert found["method"].status == "ok"
    # Dense pre-training of 150m needs a hundred times as much.
    assert "bits=1:" in found["method"].found


def test_half_an_answer_is_no_measurement() -> None:
    with pretended({("GET", "/noise"): {}}) as address:
        found = findings(address)
    assert found["rate"].status == found["method"].status == "warn"
    assert "it sent 2 bytes of 1048576" in found["rate"].found
    assert "not measured" in found["method"].found


def test_its_advice_is_that_of_the_command_that_it_names(capsys) -> None:
    finding = method_finding(LINK, BILLION, RunDescription())
    assert finding.run is not None
    said = {row.choice.text: row.forecast.utilisation for row in finding.run.advice.recommended}
    command = finding.do.partition("thinwire ")[2].split()
    assert main([*command, "--json", "--methods", "ddp"]) == 0
    planned = json.loads(capsys.readouterr().out)["advice"]["recommended"]
    shared = {
        row["method"]: row["forecast"]["utilisation"] for row in planned if row["method"] in said
    }
    assert list(shared) == [row["method"] for row in planned if "noloco" not in row["method"]]
    assert list(said)[: len(shared)] == list(shared)
    assert len(shared) >= 2
    assert all(said[method] == pytest.approx(busy) for method, busy in shared.items())


def test_where_nothing_fits_it_says_which_comes_closest_and_what_would_help() -> None:
    finding = method_finding(Link.of(1e6, latency_s=0.02), BILLION, RunDescription())
    assert finding.status == "warn"
    assert "nothing tried keeps a worker busy 90 % of the time; the busiest: " in finding.found
    assert finding.run is not None
    assert {change.quantity for change in finding.run.advice.changes} >= {"bandwidth", "sync-every"}


def test_methods_that_an_elastic_run_refuses_are_not_offered() -> None:
    for rate in (1e5, 1e9, 1e13):
        run = method_finding(Link.of(rate), BILLION, RunDescription()).run
        assert run is not None
        found = [row.choice.preset for row in run.advice.recommended]
        found += [change.choice.preset for change in run.advice.changes]
        assert found
        assert not {"ddp", "noloco", "demo", "decoupled_momentum"} & set(found)


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, None])
@pytest.mark.parametrize("way", ["up", "down"])
def test_what_was_not_measured_is_not_reckoned_with(rate, way) -> None:
    up, down = (rate, 1e6) if way == "up" else (1e6, rate)
    assert measured_link(up, down, 0.1) is None
    assert measured_link(1e6, 1e6, math.nan) is None
    finding = method_finding(measured_link(up, down, 0.1), BILLION, RunDescription())
    assert finding.status == "warn"
    assert "not measured" in finding.found


def test_so_slow_a_link_that_no_exchange_ends_is_said() -> None:
    finding = method_finding(Link.of(1e-305), BILLION, RunDescription())
    assert finding.status == "warn"
    assert "no method's first exchange would ever end" in finding.found


def test_the_runs_own_method_and_size_come_from_the_registry() -> None:
    method = presets.from_text("muloco:bits=2", sync_every=17)
    with registry_server(1) as address:
        more = {"method.name": "muloco:bits=2", "method.kind": "Method"}
        worker = RegistryClient(TOKEN, address, "a", described(method, 10**9, 10**9, **more))
        worker.join(Progress(version=0, step=0, digest=""), "127.0.0.1:1")
        found = findings(address)["method"]
    assert found.found.startswith("the run's muloco:bits=2 (H=17) keeps a worker busy ")
    assert "reckoned for 2B in 2 layers, 2 workers" in found.found
    assert "(assumed: say yours with --step-time)" in found.found
    assert "--parameters 2000000000 --layers 2 --workers 2" in found.do


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


def test_what_the_user_says_is_believed_more_than_the_registry() -> None:
    run = RunDescription(fields=described(presets.diloco(), 4, 3), workers=5)
    assert "reckoned for 1B in 10 layers, 3 workers" in method_finding(LINK, BILLION, run).found
    assert "7 in 2 layers, 6 workers" in method_finding(LINK, ExpectedRun(), run).found
    tiny = RunDescription(fields=described(presets.diloco(), 1), workers=1)
    assert "1 in 1 layers, 2 workers" in method_finding(LINK, ExpectedRun(), tiny).found


@pytest.mark.parametrize("name", presets.names())
def test_every_presets_description_is_read_back(name) -> None:
    method = presets.by_name(name)()
    again = RunDescription(fields=described(method, 1)).method()
    assert again is not None
    assert again.describe() == method.describe()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method.outer": "SGD", "method.outer.lr": "1"},
        {"method.outer.lr": "1", "method.outer": "SGD"},
        {"method.sync_every": "many"},
        {"parameters.w": "many"},
        {"parameters.w": "7"},
        {"parameters.w": '["many"]'},
        {"parameters.w": "[0, 3]"},
        {"parameters.w": "[-7]"},
        {"parameters.w": "[" * 5000},
        described(presets.diloco()) | {"method.codec.kind": "OfALaterVersion"},
        described(presets.diloco()) | {"method.sync_every": "-1"},
        # Read back, it would be another one than it was.
        described(presets.diloco()) | {"method.sync_every": "030"},
    ],
)
def test_a_description_that_says_nothing_or_something_else_is_passed_over(fields) -> None:
    run = RunDescription(fields=fields, workers=1)
    assert run.method() is None
    assert run.size() is None
    assert "reckoned for 150m" in method_finding(LINK, ExpectedRun(), run).found


@pytest.mark.parametrize("told", [None, {}, [], {"description": 3}])
def test_a_registry_that_does_not_tell_its_run_is_no_obstacle(told) -> None:
    with pretended({("GET", "/description"): told}) as address:
        found = findings(address)["method"]
    assert "reckoned for 150m, 2 workers" in found.found
    assert "(assumed: say yours with --model, --workers, --step-time)" in found.found


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
        (["--layers", "3"], "--layers and without --parameters"),
        (["--parameters", "3"], "--parameters and without --layers"),
        (["--model", "150m", "--layers", "3"], "both --model and --layers"),
        (["--model", "7q"], "'7q'"),
        (["--workers", "0"], "--workers '0'"),
        (["--workers", "1M"], "workers=1000000"),
        (["--step-time", "3q"], "--step-time '3q'"),
    ]:
        assert main(["doctor", "127.0.0.1:1", *flags]) in (1, 2)
        assert why in capsys.readouterr().err
    assert main(["doctor", "--workers", "2"]) == 1
    assert "--workers without a ticket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"reached": False, "why": "timed out"}, "timed out"),
        ({"reached": True, "why": ""}, "another machine that has this address"),
    ],
)
def test_where_the_registry_cannot_connect_back_the_way_is_by_the_lighthouse(told, why) -> None:
    with pretended({("POST", "/probe"): told}) as address:
        found = findings(address)["inbound"]
    assert found.status == "ok"
    assert why in found.found
    assert "by way of the lighthouse" in found.found


def test_interfaces_have_their_addresses() -> None:
    assert "127.0.0.1" in interface_addresses().values()


def test_the_command_shows_a_table_and_its_status_is_that_of_the_worst(monkeypatch, capsys) -> None:
    pytest.importorskip("torchft", reason="without it another check fails, too")
    monkeypatch.setenv("COLUMNS", "100")
    usage = namedtuple("Usage", "total used free")(0, 0, 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(["doctor"]) == 0
    local = capsys.readouterr().out
    assert "torchft" in local
    assert "THINWIRE_TOKEN" in local
    with pretended({}) as address:
        assert main(["doctor", address]) == 1
        told = capsys.readouterr()
        assert "checks failed: token" in told.err
        assert "takes connections; no token to ask more with" in told.out
        monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
        assert main(["doctor", address]) == 1
        assert "checks failed: lighthouse" in capsys.readouterr().err
    assert main(["doctor", "nowhere"]) == 1
    assert "not HOST:PORT" in capsys.readouterr().err
