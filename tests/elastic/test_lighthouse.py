"""The registry, and torchft's lighthouse behind its port."""

import socket
import sys
from datetime import timedelta

import pytest

from elastic_registry import TOKEN
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.lighthouse import LighthouseServer
from thinwire.elastic.relay import LoopbackForward
from thinwire.errors import ConfigurationError


def lighthouse_at(port: int = 0, **settings) -> LighthouseServer:
    pytest.importorskip("torchft")
    defaults = {"heartbeat_timeout_s": 1.0, "join_timeout_s": 1.0, "on_event": lambda _: None}
    return LighthouseServer(TOKEN, host="127.0.0.1", port=port, **defaults | settings)


def test_a_lighthouse_forms_quorums_behind_the_port_of_the_registry() -> None:
    with lighthouse_at() as lighthouse:
        address = f"127.0.0.1:{lighthouse.port}"
        forward = LoopbackForward(Dialer(TOKEN), address, "lighthouse")
        from torchft.coordination import LighthouseClient

        member = LighthouseClient(
            addr=f"http://{forward.address}", connect_timeout=timedelta(seconds=5)
        )
        quorum = member.quorum(
            replica_id="a", timeout=timedelta(seconds=5), address="", store_address=""
        )
        assert [p.replica_id for p in quorum.participants] == ["a"]
        forward.close()
    with lighthouse_at(lighthouse.port) as again:  # its ports are free once it is closed
        assert again.port == lighthouse.port


def test_a_port_that_is_taken_is_named() -> None:
    with lighthouse_at() as lighthouse:
        port = lighthouse.port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port};") as e,
    ):
        lighthouse_at(port)
    with lighthouse_at(port):  # what was started before the error does not stay
        assert e.value.__traceback__ is not None  # though the error holds on to it


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65536},
        {"port": -1},
        {"min_workers": 0},
        {"heartbeat_timeout_s": 0.0},
        {"heartbeat_timeout_s": float("nan")},
        {"join_timeout_s": -1.0},
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(
        ConfigurationError, match=f"cannot start a lighthouse with {next(iter(wrong))}="
    ):
        lighthouse_at(**wrong)


def test_without_torchft_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[elastic\]'"):
        LighthouseServer(TOKEN, host="127.0.0.1", port=0, on_event=lambda _: None)
