"""An asynchronous run in an object store: the same bits, whoever dies at whichever request."""

import asyncio
import copy
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import obstore
import pytest
import torch
from obstore.store import MemoryStore

import thinwire as tw
from asynchronous_team import AsyncTeam, method
from forked import Forked
from processes import ended, until
from thinwire.asynchronous import Assignment, AsyncOptions, AsyncServer, AsyncWorker, objects
from thinwire.asynchronous.objects import AsyncStoreServer, AsyncStoreWorker, read_status
from thinwire.elastic.loop_thread import _Loop, run_to_end
from thinwire.files import replace_file
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.security.token import TOKEN_VARIABLE, Token
from thinwire.transport import object_store
from thinwire.transport.object_store import ObjectStore
from toy import adamw, build_model, descend, loss

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "asynchronous.py"
TOKEN = Token("a token for the tests")
OPTIONS = AsyncOptions(lost_after_s=60.0)
COMPRESSED = {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback()}


class Crash(BaseException):
    """A process that is killed."""


class Mortal(ObjectStore):
    """A store whose process dies at its n-th request that changes something, or the answer."""

    def __init__(self, store: MemoryStore, dies_at: int, *, after: bool) -> None:
        super().__init__(store)
        self.writes, self.dies_at, self.after = 0, dies_at, after

    async def mortally(self, request):
        self.writes += 1
        if self.writes != self.dies_at:
            return await request
        if self.after:
            await request
        else:
            request.close()
        raise Crash

    async def put(self, *args):
        return await self.mortally(super().put(*args))

    async def replace(self, *args):
        return await self.mortally(super().replace(*args))

    async def delete(self, *args):
        return await self.mortally(super().delete(*args))


class Run:
    """The store of a run, its server and what it takes to start one again."""

    def __init__(self, folder: Path, settings: tw.Method | None = None, **known) -> None:
        self.settings = method() if settings is None else settings
        self.known = {"workers": 1, "total_steps": 30, "options": OPTIONS} | known
        self.store, self.file, self.told = MemoryStore(), folder / "server.pt", list[str]()
        self.dies_waiting = False

    def server(self, **settings) -> AsyncServer:
        return AsyncServer(build_model(), self.settings, **self.known | settings)

    def serve(self, server: AsyncServer, store: ObjectStore | None = None) -> None:
        known = {"run": "a.b", "token": TOKEN, "log": self.told.append}
        serving = AsyncStoreServer(server, store or ObjectStore(self.store), **known)
        if self.file.exists():
            serving.load_state_dict(torch.load(self.file))

        def save() -> None:
            replace_file(self.file, lambda path: torch.save(serving.state_dict(), path))
            waits = [w for w in serving.status.workers.values() if w.request != w.answered]
            if self.dies_waiting and waits:
                self.dies_waiting = False
                raise Crash

        serving.run(save)

    def names(self) -> list[str]:
        return sorted(each["path"] for each in obstore.list(self.store).collect())


class Peer:
    """A worker with its client, in this process."""

    def __init__(
        self, run: Run, *, rank: int = 0, store: ObjectStore | None = None, token=TOKEN, **fields
    ) -> None:
        settings = method(**fields) if fields else run.settings
        self.model = build_model(seed=5)  # theta comes from the server
        self.optimizer = adamw(self.model)
        self.worker = AsyncWorker(self.model, self.optimizer, settings, rank=rank)
        known = {"run": "a.b", "token": token, "patience_s": 10.0}
        self.client = AsyncStoreWorker(self.worker, store or ObjectStore(run.store), **known)
        self.taken, self.saved = 0, None

    def train(self, assignment: Assignment) -> float:
        for _ in range(assignment.steps):
            descend(loss(self.model, self.taken, 0), self.optimizer)
            self.taken += 1
        return 0.5

    def parts(self) -> tuple:
        return self.model, self.optimizer, self.worker, self.client

    def save(self) -> None:
        self.saved = copy.deepcopy(([part.state_dict() for part in self.parts()], self.taken))

    def load(self, saved) -> None:
        if saved is not None:
            states, self.taken = saved
            for part, state in zip(self.parts(), states, strict=True):
                part.load_state_dict(state)

    def work(self) -> "Peer":
        self.client.run(self.train, self.save)
        return self


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def simulated(settings: tw.Method, total_steps: int = 30) -> AsyncServer:
    return AsyncTeam(settings, (1.0,), total_steps=total_steps).run().server


def test_a_hub_is_opened_with_the_token_that_is_given(monkeypatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    model = build_model()
    worker = AsyncWorker(model, adamw(model), method(), rank=0)
    with pytest.raises(tw.ConfigurationError, match="no token"):
        AsyncStoreWorker(worker, "hub://127.0.0.1:9", run="r", token=None)
    AsyncStoreWorker(worker, "hub://127.0.0.1:9", run="r", token=TOKEN)


def test_a_notebook_whose_thread_runs_an_event_loop_can_serve_work_and_look(tmp_path) -> None:
    async def cell(work: Callable[[], object]) -> object:
        return work()

    run = Run(tmp_path)
    server = run.server()
    serving = beside(lambda: asyncio.run(cell(lambda: run.serve(server))))
    asyncio.run(cell(Peer(run).work))
    serving.join()
    known = {"run": "a.b", "token": TOKEN}
    found = asyncio.run(cell(lambda: read_status(ObjectStore(run.store), **known)))
    assert found.is_finished
    assert server.digest() == simulated(run.settings).digest()


def test_a_server_that_goes_on_in_a_notebook_after_a_stop_gives_work_at_once(monkeypatch) -> None:
    """A loop of its own has a clock without that stop; time.monotonic() is ahead of it."""
    monkeypatch.setattr(_Loop, "_stopped_s", 3600.0)
    monkeypatch.setattr(_Loop, "_seen_s", 0.0)

    def serving() -> tuple[AsyncServer, AsyncStoreServer]:
        server = AsyncServer(build_model(), method(), workers=1, options=OPTIONS, total_steps=9)
        store = ObjectStore(MemoryStore())
        return server, AsyncStoreServer(server, store, run="r", token=TOKEN)

    async def first_assignment(server: AsyncServer) -> Assignment | None:
        return server.assign(0, now_s=object_store.now_s())

    async def cell() -> Assignment | None:
        (server, resumed), state = serving(), serving()[1].state_dict()
        resumed.load_state_dict(state)
        return run_to_end(first_assignment(server))

    assert asyncio.run(cell()) is not None


@pytest.mark.parametrize("slots", [{}, COMPRESSED], ids=["fp32", "2 bits"])
def test_one_worker_over_a_store_has_the_bits_of_a_simulation(tmp_path, slots) -> None:
    run = Run(tmp_path, method(**slots))
    server, store = run.server(), ObjectStore(run.store)
    serving = beside(lambda: run.serve(server))
    Peer(run, store=store).work()
    serving.join()
    expected = simulated(run.settings)
    assert (server.digest(), server.stats) == (expected.digest(), expected.stats)
    # As planned; and the first request asks for work, and the last answer is the end.
    planned = traffic(run.settings, Shape.of_model(build_model()), workers=1)
    assert planned.sent_nbytes(30) == server.stats.received_bytes
    assert planned.received_nbytes(30) == server.stats.sent_bytes
    assert store.requests.puts == planned.puts(30) + 1
    assert store.requests.gets == planned.gets(30) + 2
    assert (store.requests.puts, store.requests.gets) == (6, 1 + 6 + 5)
    status = read_status(ObjectStore(run.store), run="a.b", token=TOKEN)
    assert (status.is_finished, status.stats) == (True, server.stats)
    live = dict(server.model.named_parameters())
    assert all(torch.equal(live[name], value) for name, value in server.anchor().items())
    (state,) = status.workers.values()
    assert (state.loss, state.assigned) == (0.5, 0)
    # Nothing is left of what was read.
    assert [key.split("/")[1] for key in run.names()] == ["about", "answer", "status"]


def test_messages_that_are_large_for_the_store_are_deleted_like_others(
    tmp_path, monkeypatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setitem(object_store._LARGEST_NBYTES, repr(run.store), 400)
    server = run.server()
    serving = beside(lambda: run.serve(server))
    Peer(run).work()
    serving.join()
    assert server.digest() == simulated(run.settings).digest()
    kinds = [
        key.split("/")[1].partition(".")[0] for key in run.names() if "." in key.rpartition("/")[2]
    ]
    assert kinds == ["about", "arrival"]  # of the last request
    assert not [line for line in run.told if "no request" in line]


def test_three_workers_at_once_finish_the_run(tmp_path) -> None:
    run = Run(tmp_path, workers=3, total_steps=120)
    server = run.server()
    serving = beside(lambda: run.serve(server))
    peers = [Peer(run, rank=rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Peer.work, peers))
    serving.join()
    assert sum(peer.taken for peer in peers) == server.stats.steps_done == 120
    assert [line for line in run.told if "joined" not in line] == []
    assert sum("/theta/" in f"/{key}" for key in run.names()) <= 3


def test_a_server_killed_in_a_grace_applies_no_message_twice(tmp_path) -> None:
    options = AsyncOptions(grace_s=0.3, lost_after_s=60.0)
    run = Run(tmp_path, method(**COMPRESSED), workers=2, total_steps=48, options=options)
    run.dies_waiting, peers = True, [Peer(run, rank=rank) for rank in range(2)]

    def train(assignment: Assignment) -> float:
        until(lambda: not run.dies_waiting)  # so that the other one's message comes alone
        return Peer.train(peers[1], assignment)

    peers[1].train = train
    working = [beside(peer.work) for peer in peers]
    with pytest.raises(Crash):
        run.serve(run.server())
    server = run.server()
    run.serve(server)
    for thread in working:
        thread.join()
    assert server.stats.refused == {}
    assert sum(peer.taken for peer in peers) == server.stats.steps_done == 48


@pytest.mark.parametrize(
    ("who", "after", "deaths_at"),
    [
        pytest.param("server", False, (3, 8, 9), id="server, before"),
        pytest.param("server", True, (7, 10, 12), id="server, answer lost"),
        pytest.param("server", False, range(1, 40), id="server, any", marks=pytest.mark.slow),
        pytest.param("server", True, range(1, 40), id="server, any answer", marks=pytest.mark.slow),
        pytest.param("worker", False, range(1, 6), id="worker, before"),
        pytest.param("worker", True, range(1, 6), id="worker, answer lost"),
    ],
)
def test_who_is_killed_at_a_request_goes_on_bit_for_bit(tmp_path, who, after, deaths_at) -> None:
    settings, deaths = method(**COMPRESSED), 0
    expected = simulated(settings, 18)
    for dies_at in deaths_at:
        run = Run(tmp_path, settings, total_steps=18)
        run.file = tmp_path / str(dies_at)
        servers, peers = [run.server()], [Peer(run)]  # threads have one generator for models

        def serve(store: ObjectStore, run=run, servers=servers) -> None:
            servers.append(run.server())
            run.serve(servers[-1], store)

        def work(store: ObjectStore, run=run, peers=peers) -> None:
            saved = peers[-1].saved
            peers.append(Peer(run, store=store))
            peers[-1].load(saved)
            peers[-1].saved = saved
            peers[-1].work()

        if who == "server":
            mortal, running = serve, beside(peers[0].work)
        else:
            mortal, running = work, beside(partial(run.serve, servers[0]))
        before = deaths
        try:
            mortal(Mortal(run.store, dies_at, after=after))
        except Crash:
            mortal(ObjectStore(run.store))
            deaths += 1
        running.join()
        stats = servers[-1].stats
        assert servers[-1].digest() == expected.digest()
        assert (stats.arrivals, stats.refused) == (3, {})
        assert who == "worker" or stats == expected.stats
        if deaths == before:
            break
    assert deaths == {"server": 3, "worker": 4}[who] or 15 < deaths < 39


@contextmanager
def served(run: Run, server: AsyncServer) -> Iterator[None]:
    """A server beside the test, which ends it by finishing the run."""
    serving = beside(lambda: run.serve(server))
    try:
        yield
    finally:
        Peer(run).work()
        serving.join()


def test_another_run_is_refused_by_the_field_that_differs(tmp_path) -> None:
    run = Run(tmp_path)
    with served(run, run.server()):
        for peer, why in (
            (Peer(run, lr=0.6), r"method\.outer\.lr differs; because the server has 0.7"),
            (Peer(run, sync_every=7), r"method\.sync_every differs"),
            (Peer(run, rank=4), r"the run has 1 workers"),
            (Peer(run, token=Token("another token, long enough")), "another token"),
            (Peer(run, token=None), "another token"),
        ):
            with pytest.raises(tw.MismatchError, match=why):
                peer.work()
    for settings, why in (
        (method(), "writer differs"),
        (method(lr=0.6), r"method\.outer\.lr differs"),
    ):
        other = Run(tmp_path, settings)
        other.store, other.file = run.store, tmp_path / "another"
        with pytest.raises(tw.MismatchError, match=why):
            other.serve(other.server())


@pytest.mark.parametrize("times", [2, 3])
def test_a_message_that_is_damaged_in_the_store_is_sent_again(tmp_path, times) -> None:
    run, sent = Run(tmp_path), []
    server = run.server()
    peer = Peer(run)
    put = peer.client._objects.sealed.put

    async def damaged(key, payload, until_s):
        if payload.numel() > 100 and len(sent) < times:
            sent.append(key)
            payload = payload.clone()
            payload[200] ^= 1
        return await put(key, payload, until_s)

    peer.client._objects.sealed.put = damaged
    with served(run, server):
        if times == 3:
            with pytest.raises(tw.ExchangeError, match="3 times in a row its message was refused"):
                peer.work()
        else:
            peer.work()
    assert server.stats.refused == {"DAMAGED": times}
    assert len([line for line in run.told if "checksum" in line]) == times
    if times == 2:
        assert server.digest() == simulated(run.settings).digest()


def test_an_object_that_is_not_of_the_run_is_refused_unread(tmp_path) -> None:
    run = Run(tmp_path)
    server = run.server()
    for name, nbytes in (("00000/0123456789abcdef-00000001", 10**6), ("00001/x", 3), ("x", 3)):
        obstore.put(run.store, f"a.b/arrival/{name}", bytes(nbytes))
    with served(run, server):
        pass
    assert server.stats.refused == {"DAMAGED": 1}
    assert sum("is no request of a worker" in line for line in run.told) == 2
    assert server.stats.steps_done == 30


def test_of_two_processes_of_one_worker_the_later_one_goes_on(tmp_path) -> None:
    run, taken = Run(tmp_path), threading.Event()
    server, first, second = run.server(), Peer(run), Peer(run)
    errors: list[tw.ExchangeError] = []

    def train(assignment: Assignment) -> float:
        if first.taken == 6:
            second_joins.set()
            taken.wait(20)
        return Peer.train(first, assignment)

    def trained(assignment: Assignment) -> float:
        taken.set()
        return Peer.train(second, assignment)

    def work() -> None:
        try:
            first.client.run(train)
        except tw.ExchangeError as error:
            errors.append(error)

    second_joins, serving = threading.Event(), beside(lambda: run.serve(server))
    working = beside(work)
    assert second_joins.wait(20)
    second.client.run(trained)
    working.join()
    serving.join()
    assert "another process of this number has joined" in str(errors[0])
    assert (first.taken, second.taken, server.stats.steps_done) == (12, 24, 30)
    assert server.stats.refused == {}


def test_a_server_that_cannot_write_its_checkpoint_answers_nothing(tmp_path) -> None:
    run = Run(tmp_path / "absent")
    with pytest.raises(RuntimeError, match="does not exist"):
        run.serve(run.server())
    assert run.names() == []
    with pytest.raises(tw.ConfigurationError, match="without lost_after_s"):
        run.serve(run.server(options=AsyncOptions()))


def test_a_worker_whose_server_is_silent_ends_in_time(tmp_path) -> None:
    run = Run(tmp_path)
    peer = Peer(run)
    peer.client._objects.patience_s = 0.3
    with pytest.raises(
        tw.ExchangeTimeout, match=r"the server of run 'a.b' .* was silent for 0.3 s"
    ):
        peer.work()


def test_a_server_whose_theta_takes_longer_than_the_patience_is_not_silent(
    tmp_path, monkeypatch
) -> None:
    """A link of 1 Mbit/s takes an hour for theta of 124M parameters."""
    monkeypatch.setattr(objects, "_BEAT_S", 0.1)
    monkeypatch.setattr(objects, "_LONGEST_PAUSE_S", 0.1)
    run = Run(tmp_path, total_steps=4)
    store = ObjectStore(run.store)
    replace = store.replace

    async def slow(key: str, payload: memoryview, until_s: float) -> None:
        await asyncio.sleep(2.0 if "/theta/" in key else 0.0)
        await replace(key, payload, until_s)

    monkeypatch.setattr(store, "replace", slow)
    peer = Peer(run)
    peer.client._objects.patience_s = 1.0
    server = run.server()
    serving = beside(partial(run.serve, server, store))
    peer.work()
    serving.join()
    assert server.is_finished
    assert server.stats.arrivals > 0


def test_steps_of_a_lost_worker_go_to_another_one(tmp_path) -> None:
    run = Run(tmp_path, workers=2, options=AsyncOptions(lost_after_s=0.5))
    server, lost = run.server(), Peer(run, rank=1)
    serving = beside(lambda: run.serve(server))

    def die(_: Assignment) -> float:
        raise Crash

    with pytest.raises(Crash):
        lost.client.run(die)
    peer = Peer(run).work()
    serving.join()
    assert peer.taken == server.stats.steps_done == 30
    # It finds out that the run is over, though nobody answers.
    assert Peer(run, rank=1).work().taken == 0


@pytest.mark.slow
def test_a_server_and_workers_of_the_example_finish_a_run(tmp_path) -> None:
    url = f"file://{tmp_path}/store"
    roles = [("serve", url, "--checkpoint", str(tmp_path / "server.pt"), "--steps", "1200")]
    for worker, slow_s in enumerate((0.002, 0.002, 0.008)):
        roles.append(("work", url, "--worker", str(worker), "--slow-s", str(slow_s)))
    environment = os.environ | {"THINWIRE_TOKEN": "a token for the tests", "OMP_NUM_THREADS": "1"}
    started = [Forked([str(EXAMPLE), *role], environment) for role in roles]
    server, *workers = ended(started, timeout_s=90)
    assert [process.returncode for process in started] == [0] * 4, server.stderr
    assert all("finished" in worker.stdout for worker in workers)
    assert re.search(r"steps_done=1[2-3]\d\d, steps_of=\{0: \d+, 1: \d+, 2: \d+\}", server.stdout)
    (last,) = re.findall(r"^loss ([\d.]+)", server.stdout, re.MULTILINE)
    assert float(last) < 0.5
