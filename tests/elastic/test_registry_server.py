"""The registry over the network."""

import dataclasses
import socket

import pytest

from elastic_http import DIALER, eventually
from elastic_registry import DESCRIPTION, EXPIRY_S, OTHER, TOKEN, at, client, registry_server
from thinwire.elastic.https import send_request
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry_server import RefusedError, ask_registry
from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership import WorkerMetrics


def test_workers_see_each_other_in_the_registry_which_tells_what_the_run_is() -> None:
    lines: list[str] = []
    with registry_server(lines=lines) as server:

        def asked(path: str) -> dict:
            return send_request(DIALER, f"127.0.0.1:{server.port}", path).json()

        assert asked("/description") == {"description": {}}
        a, b = client(server.port, "a"), client(server.port, "b")
        joined = a.join(at(0), "10.0.0.1:4000")
        assert (joined.peers, joined.heartbeat_timeout_s) == ((), EXPIRY_S)
        b.finished = True
        (seen,) = b.join(at(2), "10.0.0.2:4000").peers
        expected = Member(identity="a", nonce=a.nonce, address="10.0.0.1:4000", position=at(0))
        assert seen == expected
        (seen,) = a.heartbeat(at(7)).peers
        assert (seen.identity, seen.finished, seen.position) == ("b", True, at(2))
        assert b.heartbeat(at(2)).peers[0].position == at(7)
        with pytest.raises(RefusedError, match="sync_every is 10 here and 5 in the run"):
            client(server.port, "c", OTHER).join(at(0), "10.0.0.3:4000")
        (line,) = a.heartbeat(at(7)).refused
        assert "sync_every is 10 there and 5 in the run" in line
        a.leave()
        assert b.heartbeat(at(2)).peers == ()
        b.leave()
        assert b.heartbeat(at(3)).peers == ()  # too late: it does not bring the worker back
        assert asked("/peers")["peers"] == []
        assert asked("/description") == {"description": DESCRIPTION}
    assert lines[0] == "a joined from 10.0.0.1:4000 (version 0, step 0)"
    assert "a left (version 7, step 35)" in lines
    assert sum(line.startswith("refused 'c'") for line in lines) == 1


def test_a_restarted_worker_waits_until_its_earlier_process_is_forgotten() -> None:
    lines: list[str] = []
    with registry_server(expiry_s=0.3, lines=lines) as server:
        client(server.port, "a").join(at(0), "10.0.0.1:4000")
        assert client(server.port, "a").join(at(0), "10.0.0.1:4001").peers == ()
        # Nobody asks: it is gone all the same.
        assert eventually(lambda: sum(line.startswith("a is gone") for line in lines) == 2)


def test_all_workers_join_a_restarted_registry_again() -> None:
    with registry_server() as server:
        port = server.port
        a = client(port, "a")
        a.join(at(0), "10.0.0.1:4000")
        assert not a.heartbeat(at(1)).rejoined
        assert a.begin_round(at(3), [f"a:{a.nonce}"]) is None
        refusal = a.begin_round(at(0), [f"a:{a.nonce}"])
        assert refusal is not None
        assert "the run is at version 3" in refusal.reason
    with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}"):
        a.heartbeat(at(2))
    with registry_server(port=port):
        wrong = client(port, "w", OTHER)
        wrong.join(at(0), "10.0.0.9:4000")
        reply = a.heartbeat(at(2))  # it took outer steps: the one that came first has to go
        assert (reply.rejoined, reply.peers) == (True, ())
        assert a.begin_round(at(2), [f"a:{a.nonce}"]) is None
        assert a.heartbeat(at(2)).run == dataclasses.replace(at(2), dealt=1)
        assert not a.heartbeat(at(2)).rejoined
        with pytest.raises(MismatchError, match="sync_every is 10 here and 5 in the run"):
            wrong.heartbeat(at(0))


PLAIN = {"identity": "a", "nonce": "n", "address": "h:1"}
AT = {"position": {"version": 0, "step": 0, "digest": "", "dealt": 0}}
WRONG = [
    *({"identity": wrong} for wrong in ("", "a\x1b[2J", "x" * 201, 3)),
    *({"position": wrong} for wrong in (3, {"version": 0, "step": 0, "digest": ""})),
    {"position": AT["position"] | {"version": float("inf")}},
    *({key: 3} for key in ("address", "awaits", "unknown")),
    {"address": "h"},
    {"finished": 1},
    {"waiting_s": "long"},
    {"generation": True},
]


@pytest.mark.parametrize("path", ["/join", "/heartbeat", "/leave", "/probe"])
def test_a_body_of_another_form_is_refused(path: str) -> None:
    data = [b"", b"{", b"null", b"[" * 200_000, [], {"identity": "a"}, {"member": PLAIN}]
    data += [{"member": {**PLAIN, **AT, **wrong}, "description": {}} for wrong in WRONG]
    data += [{"member": {**PLAIN, **AT}, "description": []}]
    with registry_server() as server:
        address = f"127.0.0.1:{server.port}"
        for each in data:
            status = send_request(DIALER, address, path, each, accept=(200, 400, 410)).status
            assert status in ((400, 200) if path == "/leave" else (400, 410)), each
            assert send_request(DIALER, address, "/peers").json()["peers"] == [], each


def test_the_registry_probes_a_port_once_and_looks_no_names_up() -> None:
    with registry_server() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def probe(host: str, port: int) -> dict:
            asked = {"host": host, "port": port}
            return send_request(DIALER, f"127.0.0.1:{server.port}", "/probe", asked).json()

        assert probe("127.0.0.1", port) == {"reached": True, "why": ""}
        listener.accept()[0].close()
        listener.close()
        missed = probe("127.0.0.1", port)
        assert not missed["reached"]
        assert "refused" in missed["why"]
        for odd in (("localhost", port), ("127.0.0.1", 0)):
            with pytest.raises(MismatchError, match="cannot be read"):
                probe(*odd)


def test_heartbeats_carry_what_a_worker_measured_and_saw_to_those_that_watch() -> None:
    measured = WorkerMetrics(loss=2.5, tokens_per_s=100.0, sent_bytes=7, received_bytes=9, wait_s=1)
    with registry_server() as server:
        a, b = client(server.port, "a"), client(server.port, "b")
        a.report(measured)
        for worker in (a, b):
            worker.join(at(1), "10.0.0.1:4000")
            for step in range(100):
                worker.note_contribution(step, "b", "clipped")
            for _ in range(2):  # the answer to the first may have been lost
                reply = worker.heartbeat(at(1))
        # Other workers do nothing with it: it stays off their wires.
        assert (reply.metrics, reply.contributions) == ({}, {})
        seen = ask_registry(TOKEN, f"127.0.0.1:{server.port}")
        assert seen.metrics == {"a": measured, "b": WorkerMetrics()}
        assert [peer.identity for peer in seen.peers] == ["a", "b"]
        assert server.status().workers[0].metrics == measured
        # As many as a heartbeat has room for: 64.
        assert seen.contributions == server.status().contributions == {"b": {"clipped": 64}}
