"""An asynchronous run over TCP: the same bits, and what dies costs the others nothing."""

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from asynchronous_team import AsyncTeam, method, with_number
from forked import Forked
from processes import free_port
from thinwire.asynchronous import Assignment, AsyncOptions, AsyncServer, AsyncWorker
from thinwire.asynchronous.http import AsyncClient, AsyncHttpServer
from thinwire.elastic.dialer import Dialer
from thinwire.security.token import Token
from toy import adamw, build_model, loss

TOKEN = Token("a token for the tests")
OPTIONS = AsyncOptions(lost_after_s=60.0)
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "asynchronous.py"


@contextmanager
def serving(server: AsyncServer, **settings) -> Iterator[AsyncHttpServer]:
    with closing(AsyncHttpServer(server, TOKEN, host="127.0.0.1", **settings)) as http:
        yield http


def server_of(settings: tw.Method, *, workers: int = 1, total_steps: int = 30) -> AsyncServer:
    known = {"workers": workers, "total_steps": total_steps, "options": OPTIONS}
    return AsyncServer(build_model(), settings, **known)


class Peer:
    """A worker with its client, in this process."""

    def __init__(self, settings: tw.Method, port: int, *, rank: int = 0, **client) -> None:
        self.model = build_model(seed=5)  # theta comes from the server
        self.optimizer = adamw(self.model)
        self.worker = AsyncWorker(self.model, self.optimizer, settings, rank=rank)
        self.client = AsyncClient(
            self.worker, TOKEN, f"127.0.0.1:{port}", **{"give_up_s": 10.0, **client}
        )
        self.taken = 0

    def train(self, assignment: Assignment) -> None:
        for _ in range(assignment.steps):
            loss(self.model, self.taken, 0).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.taken += 1


COMPRESSED = {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback()}


@pytest.mark.parametrize("slots", [{}, COMPRESSED], ids=["fp32", "2 bits"])
def test_one_worker_over_http_has_the_bits_of_a_simulation(slots) -> None:
    settings = method(**slots)
    server = server_of(settings)
    with serving(server) as http:
        peer = Peer(settings, http.port)
        peer.client.work(peer.train)
        assert http.wait(0)
    expected = AsyncTeam(settings, (1.0,), total_steps=30).run().server
    assert (server.digest(), server.stats) == (expected.digest(), expected.stats)
    assert peer.worker.sent_bytes == server.stats.received_bytes


def test_three_workers_at_once_finish_the_run() -> None:
    settings, told = method(), []
    server = server_of(settings, workers=3, total_steps=120)
    with serving(server, log=told.append) as http:
        peers = [Peer(settings, http.port, rank=rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda p: p.client.work(p.train), peers))
        assert http.wait(0)
    assert sum(peer.taken for peer in peers) == server.stats.steps_done == 120
    assert sorted(told) == sorted(set(told))
    assert [line for line in told if "refused" in line] == []


def test_the_server_waits_until_workers_have_heard_that_it_is_over() -> None:
    settings = method()
    with serving(server_of(settings, workers=2, total_steps=6)) as http:
        first, second = (Peer(settings, http.port, rank=rank) for rank in (0, 1))
        assert http.wait_until_told(0.0)  # no worker has asked
        first.client.join()
        assignment = first.client.fetch()
        second.client.join()
        asking = threading.Thread(target=lambda: second.client.work(second.train))
        asking.start()
        first.worker.start(assignment)
        first.train(assignment)
        first.client.push(first.worker.finish())
        asking.join(20)
        assert second.taken == 0
        assert not http.wait_until_told(0.1)
        assert first.client.fetch() is None
        assert http.wait_until_told(0.0)


def test_another_run_is_refused_by_the_field_that_differs() -> None:
    told: list[str] = []
    with serving(server_of(method()), log=told.append) as http:
        stranger = Peer(method(), http.port)
        stranger.client._dialer = Dialer(Token("another token, long enough"))
        for peer, field in (
            (Peer(method(lr=0.6), http.port), r"method\.outer\.lr differs: the server has 0.7"),
            (Peer(method(sync_every=7), http.port), r"method\.sync_every differs"),
            (Peer(method(), http.port, rank=4), r"the run has 1 workers"),
            (stranger, "token"),
        ):
            with pytest.raises(tw.MismatchError, match=field):
                peer.client.join()
    assert len(told) == 4


def meddled(monkeypatch, peer: Peer, *, damages: bool) -> None:
    """Twice, what `peer` sends is damaged on its way, or the answer to it is lost."""
    original, sent = peer.client._post, []

    def post(path, body):
        if path != "/arrive" or len(sent) == 2:
            return original(path, body)
        sent.append(path)
        if damages:
            return original(path, b"%b%c%b" % (body[:200], body[200] ^ 1, body[201:]))
        original(path, body)
        raise tw.ExchangeError("hear the answer", because="it was lost", do="try again")

    monkeypatch.setattr(peer.client, "_post", post)


@pytest.mark.parametrize("damages", [True, False], ids=["damaged", "answer lost"])
def test_a_message_that_was_damaged_or_not_answered_is_sent_again(monkeypatch, damages) -> None:
    settings, told = method(), []
    server = server_of(settings)
    with serving(server, log=told.append) as http:
        peer = Peer(settings, http.port)
        meddled(monkeypatch, peer, damages=damages)
        peer.client.work(peer.train)
    refused, repeated = (2, 0) if damages else (0, 2)
    assert server.stats.refused.get("DAMAGED", 0) == refused
    assert (sum(server.stats.refused.values()), server.stats.repeated) == (refused, repeated)
    assert server.digest() == AsyncTeam(settings, (1.0,), total_steps=30).run().server.digest()
    assert len([line for line in told if "checksum" in line]) == refused


def test_what_is_damaged_each_time_or_not_finite_stops_its_worker() -> None:
    server = server_of(method())
    with serving(server) as http:
        peer = Peer(method(), http.port)
        peer.worker.start(peer.client.fetch())
        with pytest.raises(tw.ExchangeError, match="refused each time"):
            peer.client.push(torch.zeros(100, dtype=torch.uint8))
        with pytest.raises(tw.NonFiniteError, match="go on as worker 0"):
            peer.client.push(with_number(peer.worker.finish(), float("nan")))
    assert server.stats.refused == {"DAMAGED": 3, "NOT_FINITE": 1}


def test_a_server_that_comes_back_from_its_checkpoint_goes_on(tmp_path) -> None:
    """What it had not written is lost, and the worker goes on from what it had."""
    settings, port, told = method(**COMPRESSED), free_port(), []
    file = tmp_path / "server.pt"
    first = server_of(settings, total_steps=60)
    second = server_of(settings, total_steps=60)
    http = AsyncHttpServer(
        first, TOKEN, host="127.0.0.1", port=port, checkpoint=file, checkpoint_arrivals=3
    )
    peer = Peer(settings, port)
    assignments = []

    def train(assignment: Assignment) -> None:
        nonlocal http
        assignments.append(assignment)
        peer.train(assignment)
        if len(assignments) == 5:  # four arrived, three were written
            http._listener.close()  # as a kill would: nothing is written
            http = AsyncHttpServer(
                second, TOKEN, host="127.0.0.1", port=port, checkpoint=file, log=told.append
            )

    try:
        peer.client.work(train)
        assert http.wait(0)
    finally:
        http.close()
    assert told[0] == "going on from 3 arrivals"
    assert second.stats.refused == {"DRIFTED": 1}
    assert second.stats.steps_done == 60
    assert [a.round for a in assignments[:6]] == [1, 2, 3, 4, 5, 4]


def test_a_damaged_checkpoint_and_a_wait_without_a_limit_are_refused(tmp_path) -> None:
    file = tmp_path / "server.pt"
    file.write_bytes(b"no checkpoint")
    with pytest.raises(tw.CheckpointError, match=r"go on from .*server\.pt"):
        AsyncHttpServer(server_of(method()), TOKEN, host="127.0.0.1", checkpoint=file)
    endless = AsyncServer(build_model(), method(), workers=1, total_steps=3)
    with pytest.raises(tw.ConfigurationError, match="without lost_after_s"):
        AsyncHttpServer(endless, TOKEN, host="127.0.0.1")


def test_messages_of_more_than_a_usual_request_travel() -> None:
    """1.2 million numbers: 4.8 MB each way, where other requests have at most 4 MiB."""

    def wide() -> nn.Module:
        return nn.Linear(1200, 1000)

    settings = method(sync_every=1, inner=tw.inner.SGD(lr=0.1))
    server = AsyncServer(wide(), settings, workers=1, total_steps=2, options=OPTIONS)
    with serving(server) as http:
        model = wide()
        worker = AsyncWorker(model, settings.inner.build(model), settings, rank=0)

        def train(assignment: Assignment) -> None:
            with torch.no_grad():
                model.weight += 1.0

        before = server.anchor()["weight"].clone()
        AsyncClient(worker, TOKEN, f"127.0.0.1:{http.port}", give_up_s=5.0).work(train)
    assert server.stats.received_bytes > 2 * (4 << 20)
    assert float((server.anchor()["weight"] - before).mean()) > 0.1


# -- processes -------------------------------------------------------------------------------------


def start(*arguments: str) -> Forked:
    environment = os.environ | {"THINWIRE_TOKEN": "a token for the tests", "OMP_NUM_THREADS": "1"}
    return Forked([str(EXAMPLE), *arguments], environment)


def until(condition, *, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)


def arrivals(file: Path) -> int:
    return int(torch.load(file)["version"]) if file.exists() else 0


@pytest.mark.slow
def test_workers_and_server_may_be_killed_and_come_back(tmp_path) -> None:
    port, file = free_port(), tmp_path / "server.pt"
    serve = ("serve", f"127.0.0.1:{port}", "--checkpoint", str(file), "--steps", "2400")
    server = start(*serve)
    work = [
        ("work", f"127.0.0.1:{port}", "--worker", str(k), "--slow-s", str(slow_s))
        for k, slow_s in enumerate((0.002, 0.002, 0.008))
    ]
    workers = [start(*arguments) for arguments in work[:2]]
    # It dies with an assignment, whose steps go to another worker of its number.
    doomed = start(*work[2][:-1], "1000")
    try:
        until(lambda: file.exists() and 2 in torch.load(file)["given"])
        doomed.kill()
        workers.append(start(*work[2]))
        until(lambda: arrivals(file) > 10)
        workers[1].kill()
        killed_at = arrivals(file)
        # The others go on without it.
        until(lambda: arrivals(file) > killed_at + 6)
        workers[1] = start(*work[1])
        until(lambda: arrivals(file) > killed_at + 15)
        server.kill()
        killed_at = arrivals(file)
        server = start(*serve)
        output, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        for worker in workers:
            told, errors = worker.communicate(timeout=30)
            assert worker.returncode == 0, errors
            assert "finished" in told
    finally:
        for process in (server, doomed, *workers):
            process.kill()
    assert f"going on from {killed_at} arrivals" in output
    assert re.search(r"steps_done=2[45]\d\d, steps_of=\{0: \d+, 1: \d+, 2: \d+\}", output)
    (last,) = re.findall(r"^loss ([\d.]+)", output, re.MULTILINE)
    assert float(last) < 0.5
