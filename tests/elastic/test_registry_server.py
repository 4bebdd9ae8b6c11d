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
from thinwire.security.token import Token


def test_workers_see_each_other_in_the_registry() -> None:
    lines: list[str] = []
    with registry_server(lines=lines) as server:
        a, b = client(server.port, "a"), client(server.port, "b")
        joined = a.join(at(0), "10.0.0.1:4000")
        assert joined.peers == ()
        assert joined.heartbeat_timeout_s == EXPIRY_S
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
    assert lines[0] == "a joined from 10.0.0.1:4000 (version 0, step 0)"
    assert lines[-1] == "a left (version 7, step 35)"
    assert sum(line.startswith("refused 'c'") for line in lines) == 1


def test_a_silent_worker_is_gone_without_a_request() -> None:
    lines: list[str] = []
    with registry_server(expiry_s=0.2, lines=lines) as server:
        client(server.port, "a").join(at(0), "10.0.0.1:4000")
        assert eventually(lambda: any(line.startswith("a is gone") for line in lines))


def test_a_restarted_worker_waits_until_its_earlier_process_is_forgotten() -> None:
    with registry_server(expiry_s=0.5) as server:
        client(server.port, "a").join(at(0), "10.0.0.1:4000")
        assert client(server.port, "a").join(at(0), "10.0.0.1:4001").peers == ()


def test_a_second_worker_of_one_identity_is_refused(monkeypatch) -> None:
    with registry_server(expiry_s=0.4) as server:
        holder, second = client(server.port, "a"), client(server.port, "a")
        holder.join(at(0), "10.0.0.1:4000")
        # In the place of its pause: the holder goes on beating.
        monkeypatch.setattr(
            "thinwire.elastic.registry_server.time.sleep", lambda _: holder.heartbeat(at(0))
        )
        with pytest.raises(
            MismatchError, match=r"identity 'a' is taken .* 10\.0\.0\.1:4000, whose last"
        ):
            second.join(at(0), "10.0.0.1:4001")
        assert len(holder.heartbeat(at(0)).refused) == 0  # reported with an earlier heartbeat


def test_all_workers_join_a_restarted_registry_again() -> None:
    with registry_server() as server:
        port = server.port
        a = client(port, "a")
        a.join(at(0), "10.0.0.1:4000")
        assert not a.heartbeat(at(1)).rejoined
    with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}"):
        a.heartbeat(at(2))
    with registry_server(port=port):
        wrong = client(port, "w", OTHER)
        wrong.join(at(0), "10.0.0.9:4000")
        reply = a.heartbeat(at(2))  # it took outer steps: the one that came first has to go
        assert (reply.rejoined, reply.peers) == (True, ())
        assert not a.heartbeat(at(2)).rejoined
        with pytest.raises(MismatchError, match="sync_every is 10 here and 5 in the run"):
            wrong.heartbeat(at(0))


def test_a_round_is_begun_at_the_registry_also_at_a_restarted_one() -> None:
    with registry_server() as server:
        port = server.port
        a, b = client(port, "a"), client(port, "b")
        a.join(at(0), "10.0.0.1:4000")
        b.join(at(3), "10.0.0.2:4000")
        assert b.begin_round(at(3), [f"b:{b.nonce}"]) is None
        refusal = a.begin_round(at(0), [f"a:{a.nonce}"])
        assert refusal is not None
        assert "the run is at version 3" in refusal.reason
        assert a.heartbeat(at(0)).run == dataclasses.replace(at(3), dealt=1)
    with registry_server(port=port):
        assert a.begin_round(at(2), [f"a:{a.nonce}"]) is None
        reply = b.heartbeat(at(3))
        assert reply.rejoined
        assert reply.run == dataclasses.replace(at(3), dealt=1)


def test_it_tells_the_description_of_the_run_also_when_no_worker_is_left() -> None:
    def told(port: int) -> object:
        return send_request(DIALER, f"127.0.0.1:{port}", "/description").json()

    with registry_server() as server:
        assert told(server.port) == {"description": {}}
        a = client(server.port, "a")
        a.join(at(2), "10.0.0.1:4000")
        assert told(server.port) == {"description": DESCRIPTION}
        a.leave()
        assert told(server.port) == {"description": DESCRIPTION}


def test_a_heartbeat_after_leaving_does_not_bring_a_worker_back() -> None:
    with registry_server() as server:
        a = client(server.port, "a")
        a.join(at(0), "10.0.0.1:4000")
        a.leave()
        assert a.heartbeat(at(1)).peers == ()
        assert send_request(DIALER, f"127.0.0.1:{server.port}", "/peers").json()["peers"] == []


def test_another_token_is_refused_and_reported_once() -> None:
    lines: list[str] = []
    stranger = Token("another secret of many characters")
    with registry_server(lines=lines) as server:
        member = client(server.port, "a")
        member.join(at(0), "10.0.0.1:4000")
        for _ in range(3):
            with pytest.raises(MismatchError, match="another token than this run's") as raised:
                client(server.port, "b", token=stranger).join(at(0), "10.0.0.2:4000")
            assert not isinstance(raised.value, RefusedError)
        (line,) = member.heartbeat(at(0)).refused
    assert line.startswith("a connection from 127.0.0.1: ")
    assert "token" in line
    assert lines.count(f"refused {line}") == 1


PLAIN = {"identity": "a", "nonce": "n", "address": "h:1"}
AT = {"position": {"version": 0, "step": 0, "digest": "", "dealt": 0}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        pytest.param(b"[" * 200_000, id="nested"),
        [],
        {"identity": "a"},
        {"member": {"identity": "a"}},
        *[
            {"member": {**PLAIN, **AT, **wrong}, "description": {}}
            for wrong in (
                {"identity": ""},
                {"identity": "a\x1b[2J"},
                {"identity": "x" * 201},
                {"identity": 3},
                {"address": "h"},
                {"position": {"version": 0, "step": 0, "digest": ""}},
                {"position": 3},
                {"position": {"version": float("inf"), "step": 0, "digest": "", "dealt": 0}},
                {"finished": 1},
                {"waiting_s": "long"},
                {"generation": True},
                {"awaits": 3},
                {"unknown": 3},
            )
        ],
        {"member": {**PLAIN, **AT}, "description": []},
    ],
)
@pytest.mark.parametrize("path", ["/join", "/heartbeat", "/leave", "/probe"])
def test_a_body_of_another_form_is_refused(data: object, path: str) -> None:
    with registry_server() as server:
        address = f"127.0.0.1:{server.port}"
        status = send_request(DIALER, address, path, data, accept=(200, 400, 410)).status
        assert status in ((400, 200) if path == "/leave" else (400, 410))
        assert send_request(DIALER, address, "/peers").json()["peers"] == []


def test_the_registry_probes_a_port_once_and_looks_no_names_up() -> None:
    with registry_server() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = f"127.0.0.1:{server.port}", listener.getsockname()[1]
        reached = send_request(
            DIALER, address, "/probe", {"host": "127.0.0.1", "port": port}
        ).json()
        assert reached == {"reached": True, "why": ""}
        listener.accept()[0].close()
        listener.close()
        missed = send_request(DIALER, address, "/probe", {"host": "127.0.0.1", "port": port}).json()
        assert not missed["reached"]
        assert "refused" in missed["why"]
        for odd in ({"host": "localhost", "port": port}, {"host": "127.0.0.1", "port": 0}):
            with pytest.raises(MismatchError, match="cannot be read"):
                send_request(DIALER, address, "/probe", odd).json()


def test_heartbeats_carry_what_a_worker_measured_to_those_that_watch() -> None:
    measured = WorkerMetrics(loss=2.5, tokens_per_s=100.0, sent_bytes=7, received_bytes=9, wait_s=1)
    with registry_server() as server:
        a, b = client(server.port, "a"), client(server.port, "b")
        a.report(measured)
        a.join(at(1), "10.0.0.1:4000")
        b.join(at(1), "10.0.0.2:4000")
        a.heartbeat(at(1))
        # Other workers do nothing with it: it stays off their wires.
        assert b.heartbeat(at(1)).metrics == {}
        seen = ask_registry(TOKEN, f"127.0.0.1:{server.port}")
        assert seen.metrics == {"a": measured, "b": WorkerMetrics()}
        assert [peer.identity for peer in seen.peers] == ["a", "b"]
        assert server.status().workers[0].metrics == measured


@pytest.mark.parametrize("said", [None, 3, "loss", [], {"loss": "2.5"}, {"sent_bytes": -1}])
def test_a_worker_that_says_nonsense_of_itself_takes_part_all_the_same(said: object) -> None:
    lines: list[str] = []
    with registry_server(lines=lines) as server:
        address, a = f"127.0.0.1:{server.port}", client(server.port, "a")
        a.join(at(1), "10.0.0.1:4000")
        member = Member(identity="a", nonce=a.nonce, address="10.0.0.1:4000", position=at(2))
        earlier = {"member": member.describe()}  # as earlier versions send it
        odd = {"metrics": said, "contributions": [[1, "a", "late"]] if said == [] else said}
        for body in (earlier, earlier | odd):
            assert send_request(DIALER, address, "/heartbeat", body).status == 200
        (seen,) = server.status().workers
        assert (seen.member.position, seen.metrics) == (at(2), WorkerMetrics())
        assert server.status().contributions == {}
    assert sum(line.startswith("dropped a metric of a: ") for line in lines) == 1
    assert sum(line.startswith("dropped what a says of contributions: ") for line in lines) == 1


def test_contributions_are_told_in_heartbeats_and_asked_for_without_taking_part() -> None:
    with registry_server() as server:
        a, b = client(server.port, "a"), client(server.port, "b")
        for worker in (a, b):
            worker.join(at(1), "10.0.0.1:4000")
            for step in range(100):
                worker.note_contribution(step, "b", "clipped")
            for _ in range(2):  # the answer to the first may have been lost
                worker.heartbeat(at(1))
        seen = ask_registry(TOKEN, f"127.0.0.1:{server.port}").contributions
        # As many as a heartbeat has room for: 64.
        assert seen == server.status().contributions == {"b": {"clipped": 64}}
        assert b.heartbeat(at(1)).contributions == {}  # other workers do nothing with it
