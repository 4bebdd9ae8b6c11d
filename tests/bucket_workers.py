"""Workers that come and go over a store in memory, as threads of one process."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import obstore
import torch

import elastic_hub
import thinwire as tw
from elastic_twin import ElasticHub
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.transport import Elastic
from toy import Team, adamw, build_model, descend, loss

H = 2
LONG = 12 * H
SECRET = "a secret of many characters"
NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
UP_S = 12.0
SNAPSHOT_AFTER = 2.0  # for every worker, in multiples of its bytes
_BUILDING = threading.Lock()  # building a model uses a generator that all threads share


def memory() -> Any:
    return obstore.store.MemoryStore()


def method(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": H, "outer": NESTEROV, **fields})


def names_in(store: Any, prefix: str = "") -> list[str]:
    return sorted(each["path"] for batch in obstore.list(store, prefix) for each in batch)


def read(store: Any, key: str) -> bytes:
    return bytes(obstore.get(store, key).bytes())


def write(store: Any, key: str, payload: bytes) -> None:
    obstore.put(store, key, payload)


class Worker:
    """A worker that trains a model in a thread of its own.

    It has the data of `number` among `of` workers. `least_wait_s` is so long that no thread of a
    busy machine is late by accident; `options` are further ones of `ElasticOptions`.
    """

    def __init__(
        self,
        store: Any,
        identity: str,
        described: tw.Method | None = None,
        *,
        number: int = 0,
        of: int = 1,
        token: str | None = None,
        model: Callable[[], torch.nn.Module] = build_model,
        least_wait_s: float = 20.0,
        cache: Path | None = None,
        **options: Any,
    ) -> None:
        self.number, self.of, self.identity = number, of, identity
        known = {"run": "a-run", "token": token, "identity": identity}
        known |= {"least_wait_s": least_wait_s, "snapshot_after": SNAPSHOT_AFTER}
        chosen = ElasticOptions(**{"give_up_s": UP_S, **options})
        self.transport = Elastic(store, options=chosen, cache=cache, **known)
        self.objects = self.transport._store
        self.is_stopped = threading.Event()
        self.transport.leave_when(self.is_stopped.is_set)
        with _BUILDING:
            self.model = model()
        self.optimizer = adamw(self.model)
        described = method() if described is None else described
        self.loop = tw.OuterLoop(self.model, self.optimizer, described, transport=self.transport)
        self.state = self.loop._state
        self.digests: dict[int, str] = {}
        self.before_step: dict[int, Callable[[], None]] = {}
        self.shares: list[int] = []
        self._ended: Future[str] = Future()

    def train(self, steps: int) -> str:
        """Train up to inner step `steps` of the schedule; returns the digest in the end."""
        try:
            self.loop.join()
            while (step := self.loop.inner_step) < steps or not self.loop.flush():
                self.before_step.pop(step, lambda: None)()
                if not self.shares or self.shares[-1] != self.loop.share:
                    self.shares.append(self.loop.share)
                descend(loss(self.model, step, self.number, workers=self.of), self.optimizer)
                self.loop.step()
                self._note()
            return self._note()
        finally:
            self.loop.close()

    def _note(self) -> str:
        self.digests[self.state.version] = digest = self.loop.digest()
        return digest

    def start(self, steps: int) -> "Worker":
        def work() -> None:
            try:
                self._ended.set_result(self.train(steps))
            except BaseException as error:
                self._ended.set_exception(error)

        threading.Thread(target=work, name=self.identity, daemon=True).start()
        return self

    def digest(self, timeout_s: float = UP_S) -> str:
        """Wait for the worker to end; returns its digest, or raises what stopped it."""
        return self._ended.result(timeout_s)

    def fails(self, kind: type[Exception], *words: str) -> None:
        """Wait until the worker ends with an error that contains these words."""
        error = self._ended.exception(UP_S)
        assert isinstance(error, kind), error
        assert [word for word in words if word not in str(error)] == []

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    @property
    def version(self) -> int:
        return self.state.version

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.transport.events.events if event.kind == kind]

    def before(
        self, request: str, concerned: Callable[[str], bool], act: Callable[[str], Awaitable[Any]]
    ) -> None:
        """Run `act` before this worker's requests for the objects `concerned`."""
        real = getattr(self.objects, request)

        async def asked(key: str, *args: Any, **kwargs: Any) -> Any:
            if concerned(key):
                await act(key)
            return await real(key, *args, **kwargs)

        setattr(self.objects, request, asked)

    def sends(
        self, concerned: Callable[[str], bool], change: Callable[[bytearray], bytearray]
    ) -> None:
        """Change the objects `concerned` on the way to the store."""
        real = self.objects.put

        async def put(key: str, parts: Any, *args: Any, **kwargs: Any) -> bool:
            if concerned(key) and any(map(len, parts)):
                parts = [memoryview(change(bytearray(b"".join(parts))))]
            return await real(key, parts, *args, **kwargs)

        self.objects.put = put  # type: ignore[method-assign]


class Stopped(Exception):
    """The exception that `stops` raises."""


def stops() -> None:
    raise Stopped


class Hold:
    """Holds a worker's request until it is released, and signals its arrival."""

    def __init__(self) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()

    async def __call__(self, key: str) -> None:
        self.has_come.set()
        while not self.may_go.is_set():
            await asyncio.sleep(0.01)


def workers(store: Any, count: int, described: tw.Method | None = None, **fields) -> list[Worker]:
    """Workers that begin together, each with data of its own."""
    given = {"min_workers": min(count, 2), **fields}
    return [
        Worker(store, f"w{number}", described, number=number, of=count, **given)
        for number in range(count)
    ]


def started(running: Sequence[Worker], steps: int) -> None:
    for worker in running:
        worker.start(steps)


def ended(running: Sequence[Worker]) -> list[str]:
    """The digests of workers, once they have ended."""
    try:
        return [worker.digest() for worker in running]
    finally:
        for worker in running:
            worker.is_stopped.set()


def slowly(*running: Worker, seconds: float = 0.03, steps: int = LONG) -> None:
    """Slow each step of workers down, so that another worker can catch up."""
    for worker in running:
        for step in range(steps):
            worker.before_step.setdefault(step, lambda: time.sleep(seconds))


def train(running: Sequence[Worker], steps: int) -> list[str]:
    """Train all workers to the end; returns their digests."""
    started(running, steps)
    return ended(running)


def fixed_digest(described: tw.Method, count: int, steps: int, *, model=build_model) -> str:
    """The digest of the same number of workers in one process, none of which comes or goes."""
    if count == 1:
        # A worker that stays alone to the end rounds less than one that others may join.
        players = elastic_hub.crew(ElasticHub(), described, 1, of=1, model=model)
        elastic_hub.train(players, steps)
        elastic_hub.flush(players)
        return players[0].loop.digest()
    (digest,) = set(Team(described, adamw, count, model=model).train(steps).flush().digests())
    return digest
