"""An asynchronous run in an object store: server and workers write objects; nobody listens.

    RUN/about                      what workers must have in common with the server, written once
    RUN/arrival/WORKER/PROCESS-N   request N of a worker's process: a pseudo-gradient, or nothing
    RUN/answer/WORKER/PROCESS-N    the next assignment, or why the pseudo-gradient was refused
    RUN/theta/VERSION              theta, for all workers that start from it
    RUN/status                     progress of the run; replaced at least every 10 s

A request is handled once. The server writes its checkpoint before it answers, and the checkpoint
has each worker's last request and answer. So a restarted server repeats the answers that it had
decided on, and a worker that repeats a request finds its answer.
"""

import asyncio
import logging
import math
import re
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from thinwire.asynchronous.assignment import Assignment, AsyncStats
from thinwire.asynchronous.server import AsyncServer
from thinwire.asynchronous.worker import AsyncWorker
from thinwire.elastic.loop_thread import run_to_end
from thinwire.elastic.run_objects import RunObjects
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError, ThinwireError, check
from thinwire.handshake import check_same
from thinwire.rejection import Rejection, RejectReason
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore, now_s, together
from thinwire.transport.sealed_objects import bytes_tensor

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH, _BEAT_S = 0.02, 1.0, 1.5, 10.0
_STORE_PATIENCE_S = 600.0  # how long the store may fail before the server ends
_TRIES = 3  # to get a message or theta through undamaged
# Precedes a pseudo-gradient: the worker's inner steps per second, 0 if unknown, its mean loss, and
# the seconds that it has waited.
_HEAD = struct.Struct("<ddd")
_REQUEST = re.compile(r".*/arrival/(\d{5})/([0-9a-f]{16})-(\d{8})(\.[0-9a-f]{16})?")
# The worker sends a damaged message again; a message that is not finite ends it.
_WITHOUT_WORK = (RejectReason.DAMAGED, RejectReason.NOT_FINITE)


class _Answer(msgspec.Struct):
    rejection: Rejection | None = None
    next: Assignment | None = None
    is_finished: bool = False
    is_replaced: bool = False


class WorkerState(msgspec.Struct):
    """A worker, as its server knows it.

    Args:
        arrived_s: when its last request was handled, in seconds since 1970 by the server's clock.
        assigned: inner steps that it was given then; 0 if none.
        loss: mean loss of its last assignment; None before the first.
        wait_s: seconds that its process has waited for theta.
        request: name of its newest request, which waits for an answer while all steps are under
            way, or in a grace period.
        rejection: why the message in that request was refused.
        answered: name of the last request that was answered.
        answer: the answer to that request.
    """

    arrived_s: float = 0.0
    assigned: int = 0
    loss: float | None = None
    wait_s: float = 0.0
    request: str = ""
    rejection: Rejection | None = None
    answered: str = ""
    answer: bytes = b""


class AsyncRunStatus(msgspec.Struct):
    """Progress of an asynchronous run.

    Args:
        server: random name of the server that wrote it.
        total_steps: inner steps of all workers after which the run is finished; None for no end.
        stats: arrivals, staleness, refusals and bytes.
        workers: workers that have asked for work, by number.
        written_s: when it was written, in seconds since 1970 by the server's clock.
        is_finished: whether all steps are in theta.
    """

    server: str
    total_steps: int | None
    stats: AsyncStats
    workers: dict[int, WorkerState] = {}
    written_s: float = 0.0
    is_finished: bool = False


def read_status(
    store: str | ObjectStore, *, run: str, token: Token | None
) -> AsyncRunStatus | None:
    """Progress of asynchronous run `run`; None if there is no run of that name.

    Raises:
        MismatchError: it was written with another token. ExchangeError: the store cannot be read.
    """
    return run_to_end(_status(_objects(store, run, token)))


def _objects(
    store: str | ObjectStore, run: str, token: Token | None, patience_s: float = 30.0
) -> RunObjects:
    opened = ObjectStore(store, token=token) if isinstance(store, str) else store
    return RunObjects(opened, run, token, patience_s=patience_s)


async def _status(objects: RunObjects) -> AsyncRunStatus | None:
    return await objects.read(AsyncRunStatus, f"{objects.run}/status", objects.until_s())


async def _time() -> float:
    return now_s()


async def _payload(objects: RunObjects, key: str, nbytes: int) -> Tensor:
    """Payload of an object; empty if it is absent or was not written by this run."""
    opened = await objects.sealed.get(key, objects.until_s(nbytes), nbytes=nbytes)
    return bytes_tensor(b"") if opened is None else opened


def _theta_key(objects: RunObjects, version: int) -> str:
    return f"{objects.run}/theta/{version:012}"


class AsyncStoreServer:
    """Serves an asynchronous run in an object store, until all of its steps are in theta.

    Args:
        server: the run's server state.
        store: URL of the store, as `ObjectStore` takes it, or the store itself.
        run: name of the run there.
        token: the run's token; None seals nothing.
        log: called with a line when a worker joins or is refused.

    Attributes:
        status: progress of the run.

    Raises:
        ConfigurationError: the run could wait for a dead worker without a limit, or its name is
            invalid.
    """

    def __init__(
        self,
        server: AsyncServer,
        store: str | ObjectStore,
        *,
        run: str,
        token: Token | None,
        log: Callable[[str], object] = lambda _: None,
    ) -> None:
        check(
            server.total_steps is None or not math.isinf(server.options.lost_after_s),
            "serve a run of so many steps without lost_after_s",
            because="the server would wait without limit for the steps of a dead worker",
            do="pass AsyncOptions(lost_after_s=...), several times what the slowest worker takes",
        )
        self._server, self._log = server, log
        self._objects = _objects(store, run, token, _STORE_PATIENCE_S)
        self.status = AsyncRunStatus(secrets.token_hex(8), server.total_steps, server.stats)

    def run(self, save: Callable[[], object]) -> None:
        """Serve until all steps of the run are in theta.

        Args:
            save: writes a checkpoint of `state_dict()`; called before each answer.

        Raises:
            MismatchError: the objects in the store belong to another run.
            ExchangeError: the store refuses a request, or failed for too long.
        """
        run_to_end(self._run(save))

    async def _run(self, save: Callable[[], object]) -> None:
        objects, server, pause_s = self._objects, self._server, _PAUSE_S
        self._writing = asyncio.Lock()  # made here, for this event loop: a server may run again
        save()  # before `about`, which names what only the checkpoint knows
        own = {"workers": str(server.workers), "writer": self.status.server}
        await objects.check_description(server.describe() | own, "server", objects.until_s())
        await self._put_status()
        beating = asyncio.ensure_future(self._beat())
        try:
            await self._put_again()
            while True:
                is_busy = await self._handle_requests(save)
                self.status.is_finished = server.is_finished
                if is_busy or server.is_finished:
                    await self._put_status()
                if server.is_finished:
                    return
                pause_s = _PAUSE_S if is_busy else min(_LONGEST_PAUSE_S, _GROWTH * pause_s)
                await asyncio.sleep(pause_s)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Write the status regularly, however long a request or theta takes over the link."""
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await self._put_status()
            except ThinwireError as error:
                _LOG.info("workers may take this server for lost: %s", error)

    async def _put_again(self) -> None:
        """Write theta and the answers that a killed server may have left unwritten."""
        objects = self._objects
        listed = await objects.store.sizes(f"{objects.run}/theta/", objects.until_s())
        self._thetas = {int(key.rpartition("/")[2]) for key in listed}
        await self._put_theta()
        last = [(w.answered, w.answer) for w in self.status.workers.values() if w.answered]
        await together(*(self._put_answer(*item) for item in last))

    # -- a pass over the requests ------------------------------------------------------------------

    async def _handle_requests(self, save: Callable[[], object]) -> bool:
        """Receive messages, assign work, write the checkpoint, then the answers."""
        objects, server, before = self._objects, self._server, self._server.version
        answers, unwanted = await self._read_requests()
        for worker, state in self.status.workers.items():
            if state.request != state.answered and (answer := self._answer(worker, state)):
                unwanted += [_answer_key(state.answered)] if state.answered else []
                state.answered, state.answer = state.request, msgspec.json.encode(answer)
                answers[state.request] = state.answer
        is_busy = bool(answers) or server.version > before
        if is_busy:
            save()
        if server.version in server.versions_in_use - self._thetas:
            await self._put_theta()
        await together(*(self._put_answer(*item) for item in answers.items()))
        old = self._thetas - server.versions_in_use - {server.version}
        self._thetas -= old
        unwanted += [*answers, *(_theta_key(objects, n) for n in old)]
        if unwanted:
            await objects.store.delete(unwanted)
        return is_busy

    async def _read_requests(self) -> tuple[dict[str, bytes], list[str]]:
        """Receive new messages.

        Returns:
            Answers that need no new assignment, by request, and keys of objects to delete.
        """
        objects, server, workers = self._objects, self._server, self.status.workers
        answers, unwanted = dict[str, bytes](), list[str]()
        replaced = msgspec.json.encode(_Answer(is_replaced=True))
        listed = await objects.store.sizes(f"{objects.run}/arrival/", objects.until_s())
        for key, nbytes in listed.items():
            found = _REQUEST.fullmatch(key)
            if found is None or (worker := int(found[1])) >= server.workers:
                self._log(f"{key} is no request of a worker of this run")
                unwanted.append(key)
                continue
            state, is_new = workers.setdefault(worker, WorkerState()), int(found[3]) == 1
            if found[4]:  # a large object beside the request
                unwanted += [key] if key.removesuffix(found[4]) == state.answered else []
            elif key == state.answered:
                answers[key] = state.answer  # its worker was restarted
            elif state.request and not is_new and f"/{found[2]}-" not in state.request:
                self._log(f"another process has taken the place of a process of worker {worker}")
                answers[key] = replaced
            elif key != state.request:
                answers |= {state.request: replaced} if state.request != state.answered else {}
                await self._receive(worker, key, nbytes, is_new=is_new)
        return answers, unwanted

    async def _receive(self, worker: int, key: str, nbytes: int, *, is_new: bool) -> None:
        server, objects, rejection = self._server, self._objects, None
        if is_new:
            self._log(f"worker {worker} joined at {server.version} arrivals")
        state = self.status.workers[worker]
        state.arrived_s, largest = time.time(), _HEAD.size + server.message_nbytes
        is_small = nbytes <= largest + objects.sealed.added_nbytes
        payload = await _payload(objects, key, largest) if is_small else bytes_tensor(b"")
        if payload.numel() >= _HEAD.size:
            speed, loss, wait_s = _HEAD.unpack(payload[: _HEAD.size].numpy().tobytes())
            if 0 < speed < math.inf and math.isfinite(loss) and math.isfinite(wait_s):
                server.speeds[worker], state.loss, state.wait_s = speed, loss, wait_s
        if payload.numel() != _HEAD.size:  # else it sends nothing and only asks for work
            rejection = server.receive(payload[_HEAD.size :], now_s=now_s())
        if rejection is not None:
            self._log(f"refused a message of worker {worker}: {rejection}")
        state.request, state.rejection = key, rejection

    def _answer(self, worker: int, state: WorkerState) -> _Answer | None:
        """The answer to a worker's request; None if there is no work for it yet."""
        rejection = state.rejection
        if rejection is not None and rejection.reason in _WITHOUT_WORK:
            return _Answer(rejection)
        given = self._server.assign(worker, now_s=now_s())
        if given is None and not self._server.is_finished:
            return None
        state.assigned = 0 if given is None else given.steps
        return _Answer(rejection, given, is_finished=given is None)

    async def _put_answer(self, key: str, answer: bytes) -> None:
        to, objects = _answer_key(key), self._objects
        await objects.put_decided(to, answer, objects.until_s())

    async def _put_theta(self) -> None:
        server, objects = self._server, self._objects
        self._thetas.add(server.version)
        key = _theta_key(objects, server.version)
        # Overwrites, so that a restart of the server repairs a damaged theta.
        until_s = objects.until_s(server.theta_message.nbytes)
        await objects.sealed.replace(key, server.theta_message, until_s)

    async def _put_status(self) -> None:
        objects = self._objects
        async with self._writing:  # else an older status may replace a newer one
            self.status.written_s = time.time()
            status = msgspec.json.encode(self.status)
            await objects.replace(f"{objects.run}/status", status, objects.until_s())

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The server's state, and each worker's last request and answer."""
        return {"server": self._server.state_dict(), "status": msgspec.json.encode(self.status)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in another process or on another machine.

        Raises:
            MismatchError: `state` is from another run.
        """
        self._server.load_state_dict(state["server"], now_s=run_to_end(_time()))
        self.status = msgspec.json.decode(state["status"], type=AsyncRunStatus)
        self.status.stats = self._server.stats


class AsyncStoreWorker:
    """A worker of an asynchronous run in an object store.

    Args:
        worker: the worker state, whose assignments and messages it carries.
        store: URL of the store, as `ObjectStore` takes it, or the store itself.
        run: name of the run there.
        token: the run's token; None seals nothing.
        patience_s: seconds without a sign of life from the server before an error is raised.

    Attributes:
        number: number of the request that awaits an answer, from 1.
    """

    def __init__(
        self,
        worker: AsyncWorker,
        store: str | ObjectStore,
        *,
        run: str,
        token: Token | None,
        patience_s: float = 300.0,
    ) -> None:
        self._worker, self._objects = worker, _objects(store, run, token, patience_s)
        self._process, self.number = secrets.token_hex(8), 1
        self._request = bytes_tensor(bytes(_HEAD.size))

    def run(
        self, train: Callable[[Assignment], float], save: Callable[[], object] = lambda: None
    ) -> None:
        """Train until the run is finished.

        Args:
            train: takes `assignment.steps` inner steps; returns their mean loss.
            save: writes a checkpoint of model, optimizer, data, the worker and this object; called
                before each message is sent.

        Raises:
            MismatchError: the server runs something else; the error names the field that differs.
            ExchangeError: the server is silent for too long, or another process has taken this
                worker's place. NonFiniteError: the server refused a message that is not finite.
        """
        run_to_end(self._run(train, save))

    async def _run(self, train: Callable[[Assignment], float], save: Callable[[], object]) -> None:
        await self._check_about()
        wait_s, asked_s = 0.0, time.perf_counter()
        while (given := await self._exchange()) is not None:
            began_s = time.perf_counter()
            wait_s += began_s - asked_s
            self._worker.start(*given)
            loss = train(given[0])
            speed = given[0].steps / max(1e-9, time.perf_counter() - began_s)
            head = bytes_tensor(_HEAD.pack(speed, loss, wait_s))
            self._request = torch.cat([head, self._worker.finish().cpu()])
            save()
            asked_s = time.perf_counter()

    async def _check_about(self) -> None:
        objects, rank = self._objects, self._worker.rank
        about = await self._wait_for(dict[str, str], f"{objects.run}/about")
        if about is None:
            return
        own = {name: about.get(name, "0") for name in ("workers", "writer")}
        check_same(
            about,
            self._worker.describe() | own,
            cannot=f"take part in run {objects.run!r} as worker {rank}",
            whose="the server",
            do="start server and workers from the same script, arguments and thinwire version",
        )
        check(
            0 <= rank < int(own["workers"]),
            f"take part as worker {rank}",
            because=f"the run has {own['workers']} workers, counted from 0",
            do="pass the number of one of them",
            kind=MismatchError,
        )

    async def _exchange(self) -> tuple[Assignment, Tensor] | None:
        """Send the request and read its answer and theta; None at the end of the run."""
        objects, worker, why = self._objects, self._worker, ""
        for _ in range(_TRIES):
            process = f"{worker.rank:05}/{self._process}"
            key = f"{objects.run}/arrival/{process}-{self.number:08}"
            await objects.sealed.put(key, self._request, objects.until_s(self._request.nbytes))
            answer = await self._wait_for(_Answer, _answer_key(key))
            if answer is None or answer.is_finished:
                return None
            if answer.is_replaced and self.number == 1:
                # The server read a dead process's request after this one.
                self._process, why = secrets.token_hex(8), "another process asked for work"
                continue
            check(
                not answer.is_replaced,
                f"go on as worker {worker.rank}",
                because="another process of this number has joined since",
                do="give each worker another number; end that process before this one is resumed",
                kind=ExchangeError,
            )
            self.number += 1
            why = f"its message was refused: {answer.rejection}"
            if answer.rejection and answer.rejection.reason is RejectReason.DAMAGED:
                continue
            worker.settle(answer.rejection)
            if (given := answer.next) is not None:
                version, nbytes = given.round - 1, worker.anchor_nbytes
                theta = await _payload(objects, _theta_key(objects, version), nbytes)
                if theta.numel() == nbytes:
                    return given, theta
                why = f"theta of version {version} was damaged or gone"
            self._request = self._request[: _HEAD.size].clone()
        raise ExchangeError(
            f"go on as worker {worker.rank}",
            because=f"{_TRIES} times in a row {why}",
            do="check the store, and that server and workers run the same thinwire version",
        )

    async def _wait_for(self, kind: type[T], key: str) -> T | None:
        """Wait for object `key`; None at the end of the run."""
        objects, pause_s, written_s = self._objects, _PAUSE_S, 0.0
        until_s = objects.until_s()
        while (found := await objects.read(kind, key, objects.until_s())) is None:
            if pause_s >= _LONGEST_PAUSE_S:
                status = await _status(objects)
                if status is not None and status.is_finished:
                    return None
                if status is not None and status.written_s != written_s:
                    written_s, until_s = status.written_s, objects.until_s()
            check(
                now_s() + pause_s <= until_s,
                f"go on as worker {self._worker.rank}",
                because=f"the server of run {objects.run!r} in {objects.store.url} was silent for "
                f"{objects.patience_s:g} s",
                do="start the server again, then this worker",
                kind=ExchangeTimeout,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * _GROWTH)
        return found

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The request that awaits an answer."""
        return {"process": self._process, "number": self.number, "request": self._request}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with the worker as it was."""
        self._process, self.number = state["process"], state["number"]
        self._request = state["request"]


def _answer_key(request: str) -> str:
    return request.replace("/arrival/", "/answer/")
