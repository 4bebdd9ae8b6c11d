"""`thinwire lighthouse`."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from elastic_registry import DESCRIPTION, at
from thinwire.cli import lighthouse as command
from thinwire.cli import main
from thinwire.elastic.registry_server import RegistryClient
from thinwire.security.ticket import Ticket
from thinwire.security.token import Token
from thinwire.transport import address

LIGHTHOUSE = [sys.executable, "-m", "thinwire", "lighthouse", "--bind", "127.0.0.1:0"]


def test_the_printed_address_is_one_that_others_reach(monkeypatch) -> None:
    def no_way_out() -> str:
        raise OSError(101, "Network is unreachable")

    assert command._reachable_host("10.0.0.1") == "10.0.0.1"
    monkeypatch.setattr(address, "local_address", lambda: "10.7.0.1")
    assert command._reachable_host("0.0.0.0") == "10.7.0.1"
    monkeypatch.setattr(address, "local_address", no_way_out)
    monkeypatch.setattr(
        address, "interface_addresses", lambda: {"lo": "127.0.0.1", "wg0": "192.168.0.2"}
    )
    assert command._reachable_host("0.0.0.0") == "192.168.0.2"
    monkeypatch.setattr(address, "interface_addresses", dict)
    assert command._reachable_host("0.0.0.0") == socket.gethostname()


@pytest.mark.slow_cases("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_token_address_and_events_and_ends_on_a_signal(number) -> None:
    pytest.importorskip("torchft")
    environment = {k: v for k, v in os.environ.items() if k not in ("THINWIRE_TOKEN", "RUST_LOG")}
    with subprocess.Popen(
        [*LIGHTHOUSE, "--metrics", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        stuck = threading.Timer(60, process.kill)
        stuck.start()
        assert process.stdout is not None
        export, ready, metrics = (process.stdout.readline() for _ in range(3))
        secret = export.removeprefix("export THINWIRE_TOKEN=").strip()
        assert len(secret) == 32
        told = re.fullmatch(
            r"ready; on every machine: thinwire join '(.*)' --out runs/here\n", ready
        )
        assert told
        ticket = Ticket.read(told[1])
        where = ticket.address
        assert ticket.secret == secret
        RegistryClient(Token(secret), where, "a", DESCRIPTION).join(at(0), "10.0.0.1:4000")
        assert process.stdout.readline() == "a joined from 10.0.0.1:4000 (version 0, step 0)\n"
        with urllib.request.urlopen(metrics.removeprefix("metrics: "), timeout=10) as page:
            assert "\nthinwire_workers 1.0\n" in page.read().decode()
        process.send_signal(number)
        out, err = process.communicate()
        stuck.cancel()
    assert (process.returncode, out, err) == (0, "stopped\n", "")


@pytest.mark.parametrize(
    ("place", "why"),
    [("9100", "is not HOST:PORT"), ("192.0.2.1:0", "an address of this machine")],
)
def test_metrics_that_cannot_be_served_are_one_line_and_no_lighthouse(
    place: str, why: str, capsys, monkeypatch
) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters")
    assert main(["lighthouse", "--bind", "127.0.0.1:0", "--metrics", place]) == 1
    out, err = capsys.readouterr()
    assert "ready" not in out
    assert err.startswith("error: cannot ")
    assert why in err
    assert err.count("\n") == 1
