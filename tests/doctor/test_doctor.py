"""`thinwire doctor`: what it finds, and that it always comes to an end."""

import importlib.metadata
import re
import shutil
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elastic_http import eventually
from thinwire.cli import main
from thinwire.codecs.kernels import VARIABLE
from thinwire.doctor import Finding, examine, machine, machine_checks
from thinwire.doctor.network import network_findings
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer, json_answer
from thinwire.elastic.registry_server import RegistryClient, RegistryServer
from thinwire.elastic.relay import RelayedServer
from thinwire.errors import ConfigurationError, ExchangeError
from thinwire.membership import Progress
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
        ("GET", "/peers"): {"heartbeat_timeout_s": 5.0, "peers": []},
        ("POST", "/probe"): {"reached": True, "why": ""},
        ("POST", "/discard"): {},
        ("GET", "/noise"): {},
    }
    answers = {key: (lambda _, v=v: json_answer(v)) for key, v in (plain | routes).items()}
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
    assert list(found) == ["name", "registry", "clock", "lighthouse", "rate", "inbound", "peers"]
    assert found["peers"].found == "1 reached directly, 0 by way of the lighthouse"
    to, back = re.findall(r"([\d.]+)Mbit/s", found["rate"].found)
    assert min(float(to), float(back)) > 1
    if hasattr(socket, "TCP_INFO"):
        assert re.search(r"\d\.\d % of packets sent again", found["rate"].found)
    assert f"thinwire plan --up {to}Mbit/s --down {back}Mbit/s --latency" in found["rate"].do


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
    [(0, "ok", ""), (-3, "ok", "behind"), (3, "ok", "ahead of"), (3600, "ok", "ahead of")],
)
def test_the_clock_is_compared_with_the_registrys(behind_s, status, word) -> None:
    with pretended({("GET", "/time"): {"time": time.time() - behind_s}}) as address:
        found = findings(address)["clock"]
    assert found.status == status
    assert word in found.found


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
