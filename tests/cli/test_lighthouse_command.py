"""`thinwire lighthouse`."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from unittest import mock

import pytest

from elastic_registry import DESCRIPTION, at
from thinwire.cli import lighthouse as command
from thinwire.cli import main
from thinwire.elastic.registry_server import RegistryClient
from thinwire.security.ticket import Ticket
from thinwire.security.token import Token
from thinwire.transport import address


def test_the_printed_address_is_one_that_others_reach(monkeypatch) -> None:
    assert command._reachable_host("10.0.0.1") == "10.0.0.1"
    monkeypatch.setattr(address, "local_address", lambda: "10.7.0.1")
    assert command._reachable_host("0.0.0.0") == "10.7.0.1"
    no_way_out = mock.Mock(side_effect=OSError(101, "Network is unreachable"))
    monkeypatch.setattr(address, "local_address", no_way_out)
    found = {"lo": "127.0.0.1", "wg0": "192.168.0.2"}
    monkeypatch.setattr(address, "interface_addresses", lambda: found)
    assert command._reachable_host("0.0.0.0") == "192.168.0.2"
    monkeypatch.setattr(address, "interface_addresses", dict)
    assert command._reachable_host("0.0.0.0") == socket.gethostname()


@pytest.mark.slow_cases("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_token_address_and_events_and_ends_on_a_signal(number) -> None:
    pytest.importorskip("torchft")
    environment = {k: v for k, v in os.environ.items() if k not in ("THINWIRE_TOKEN", "RUST_LOG")}
    command = [sys.executable, "-m", "thinwire", "lighthouse", "--bind", "127.0.0.1:0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = environment | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([*command, "--metrics", "127.0.0.1:0"], **pipes) as process:
        stuck = threading.Timer(60, process.kill)
        stuck.start()
        export, ready, metrics = (process.stdout.readline() for _ in range(3))
        secret = export.removeprefix("export THINWIRE_TOKEN=").strip()
        assert len(secret) == 32
        line = r"ready; on every machine: thinwire join '(.*)' --out runs/here\n"
        ticket = Ticket.read(re.fullmatch(line, ready)[1])
        assert ticket.secret == secret
        worker = RegistryClient(Token(secret), ticket.address, "a", DESCRIPTION)
        worker.join(at(0), "10.0.0.1:4000")
        assert process.stdout.readline() == "a joined from 10.0.0.1:4000 (version 0, step 0)\n"
        with urllib.request.urlopen(metrics.removeprefix("metrics: "), timeout=10) as page:
            assert "\nthinwire_workers 1.0\n" in page.read().decode()
        process.send_signal(number)
        out, err = process.communicate()
        stuck.cancel()
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_metrics_that_cannot_be_served_are_one_line(capsys, monkeypatch) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters")
    for place, why in (("9100", "is not HOST:PORT"), ("192.0.2.1:0", "an address of this machine")):
        assert main(["lighthouse", "--bind", "127.0.0.1:0", "--metrics", place]) == 1
        out, err = capsys.readouterr()
        assert "ready" not in out
        assert err.startswith("error: cannot ")
        assert why in err
        assert err.count("\n") == 1
