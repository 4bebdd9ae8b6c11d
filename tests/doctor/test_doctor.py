"""`thinwire doctor`: what it finds, and that it always comes to an end."""

import importlib.metadata
import shutil
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from thinwire.cli import main
from thinwire.codecs.kernels import VARIABLE
from thinwire.doctor import Finding, examine, machine, machine_checks, network
from thinwire.doctor.network import network_findings
from thinwire.elastic.registry_server import RegistryClient, RegistryServer
from thinwire.elastic.signed_http import SignedServer, json_answer
from thinwire.elastic.token import Token
from thinwire.errors import ConfigurationError
from thinwire.membership import Progress
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


def test_a_check_that_breaks_is_no_verdict() -> None:
    def broken() -> Finding:
        raise KeyError("x")

    assert examine("it", broken).found == "not established: KeyError('x')"


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
    """A registry that says what a test wants to be told."""
    plain = {
        ("GET", "/time"): {"time": time.time()},
        ("GET", "/peers"): {"lighthouse_port": 1, "heartbeat_timeout_s": 5.0, "peers": []},
        ("POST", "/probe"): {"reached": True, "why": ""},
    }
    answers = {key: (lambda _, v=v: json_answer(v)) for key, v in (plain | routes).items()}
    server = SignedServer(TOKEN, answers, host="127.0.0.1")
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


def findings(address: str, token: Token | None = TOKEN) -> dict[str, Finding]:
    return {finding.name: finding for finding in network_findings(address, token)}


def test_a_way_that_is_clear_is_ok_from_end_to_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lighthouse:
        port = lighthouse.getsockname()[1]
        with registry_server(port) as address:
            worker = RegistryClient(TOKEN, address, "a", {})
            worker.join(Progress(version=0, step=0, digest=""), f"127.0.0.1:{port}")
            found = findings(address)
    assert {finding.status for finding in found.values()} == {"ok"}, found
    assert list(found) == [
        *("name", "registry", "clock", "lighthouse", "route", "gloo", "inbound", "peers")
    ]
    assert found["route"].found == "from 127.0.0.1 on lo"
    assert found["peers"].found == "1 reached"


def test_what_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with registry_server(free) as address:
        worker = RegistryClient(TOKEN, address, "b", {})
        worker.join(Progress(version=0, step=0, digest=""), f"127.0.0.1:{free}")
        found = findings(address)
    assert found["lighthouse"].status == found["peers"].status == "fail"
    assert f"let TCP port {free}" in found["lighthouse"].do
    assert found["peers"].found.startswith(f"1 of 1 not reached: b at 127.0.0.1:{free}: ")


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
    [(0, "ok", ""), (-3, "warn", "behind"), (3, "warn", "ahead of"), (90, "fail", "ahead of")],
)
def test_the_clock_is_compared_with_the_registrys(behind_s, status, word) -> None:
    with pretended({("GET", "/time"): {"time": time.time() - behind_s}}) as address:
        found = findings(address)["clock"]
    assert found.status == status
    assert word in found.found


def test_a_clock_too_far_off_to_be_answered_is_named(monkeypatch) -> None:
    # No difference is small enough: as if it were a large one.
    monkeypatch.setattr("thinwire.elastic.signed_http._SKEW_S", -1.0)
    with pretended({}) as address:
        found = findings(address)["registry"]
    assert found.status == "fail"
    assert "clock is" in found.found
    assert found.do == "set this machine's clock (NTP)"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"reached": False, "why": "timed out"}, "timed out"),
        ({"reached": True, "why": ""}, "another machine that has this address"),
    ],
)
def test_a_registry_that_cannot_connect_back_is_a_failure(told, why) -> None:
    with pretended({("POST", "/probe"): told}) as address:
        found = findings(address)["inbound"]
    assert found.status == "fail"
    assert why in found.found
    assert "WireGuard" in found.do


def test_a_machine_whose_name_is_its_loopback_is_told_of(monkeypatch) -> None:
    monkeypatch.setattr(network, "local_address", lambda _: "10.1.1.1")
    monkeypatch.setattr(
        network, "interface_addresses", lambda: {"eth7": "10.1.1.1", "lo": "127.0.0.1"}
    )
    monkeypatch.setattr(network, "_gloo_refuses", lambda _: "")
    monkeypatch.setattr(network.socket, "gethostbyname", lambda _: "127.0.1.1")
    checks = network._NetworkChecks("10.0.0.1:1", TOKEN)
    assert checks.gloo().status == "warn"
    assert checks.gloo().do == "export GLOO_SOCKET_IFNAME=eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert checks.gloo().status == checks.route().status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert checks.route().status == "warn"
    assert "GLOO_SOCKET_IFNAME is eth8" in checks.route().found
    assert "no address" in checks.gloo().found


def test_a_route_over_loopback_to_a_registry_elsewhere_is_told_of(monkeypatch) -> None:
    monkeypatch.setattr(network, "local_address", lambda _: "127.0.0.1")
    assert network._NetworkChecks("10.0.0.1:1", TOKEN).route().status == "warn"
    assert network._NetworkChecks("127.0.0.1:1", TOKEN).route().status == "ok"


def test_gloo_listens_on_addresses_of_this_machine_only(monkeypatch) -> None:
    monkeypatch.setattr(network, "local_address", lambda _: "203.0.113.1")
    found = network._NetworkChecks("10.0.0.1:1", TOKEN).gloo()
    assert found.status == "fail"
    assert "203.0.113.1" in found.found


def test_interfaces_have_their_addresses() -> None:
    assert "127.0.0.1" in interface_addresses().values()


def test_the_command_shows_a_table_and_its_status_is_that_of_the_worst(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    usage = namedtuple("Usage", "total used free")(0, 0, 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(["doctor"]) == 0
    local = capsys.readouterr().out
    assert "torchft" in local
    assert "THINWIRE_TOKEN" in local
    with pretended({}) as address:
        assert main(["doctor", "--elastic", address]) == 1
        told = capsys.readouterr()
        assert "checks failed: token" in told.err
        assert "takes connections; no token to ask more with" in told.out
        monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
        assert main(["doctor", "--elastic", address]) == 1
        assert "checks failed: lighthouse, inbound" in capsys.readouterr().err
    assert main(["doctor", "--elastic", "nowhere"]) == 1
    assert "not HOST:PORT" in capsys.readouterr().err
