"""An asynchronous run over TCP: a server process, and workers that come, go and come again.

Requests and answers travel within TLS of the run's token (`thinwire.elastic.https`). A worker is
its number: one that is started again under the same number goes on from the present theta.
"""

import math
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from thinwire.asynchronous.assignment import Assignment, Receipt, RunFinished, TryLater
from thinwire.asynchronous.server import AsyncServer
from thinwire.asynchronous.worker import AsyncWorker
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.http_server import LARGEST_REQUEST
from thinwire.elastic.https import HttpReply, RunServer, json_answer, send_request
from thinwire.elastic.quorum import read_as
from thinwire.elastic.timeouts import with_retry
from thinwire.errors import CheckpointError, ExchangeError, ThinwireError, check
from thinwire.files import replace_file
from thinwire.rejection import Rejection, RejectReason
from thinwire.security.token import Token

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# What is sent beside theta.
_MARGIN = 64 << 10
_LENGTH_NBYTES = 4
_SENDS_OF_A_DAMAGED_MESSAGE = 3
# A request with a pseudo-gradient may be large and its link slow.
_REQUEST_S = 600.0


class AsyncHttpServer:
    """Lets workers reach a server; it answers in threads of its own until it is closed.

    Args:
        server: of the run. If `checkpoint` exists, it goes on from there.
        token: of the run.
        host: address to listen on.
        port: 0 takes any that is free.
        checkpoint: file to which the server's state is written; None keeps it in memory only.
        checkpoint_arrivals: arrivals between two checkpoints; workers wait while one is written.
        log: called with a line when a worker joins, is refused, or arrives with stale work.

    Attributes:
        port: that it listens on.

    Raises:
        OSError: the port is taken. MismatchError: the checkpoint is of another run.
        CheckpointError: it cannot be read.
        ConfigurationError: the run could wait for a dead worker without a limit.
    """

    def __init__(
        self,
        server: AsyncServer,
        token: Token,
        *,
        host: str,
        port: int = 0,
        checkpoint: Path | None = None,
        checkpoint_arrivals: int = 1,
        log: Callable[[str], object] = lambda _: None,
    ) -> None:
        check(
            server.total_steps is None or not math.isinf(server.options.lost_after_s),
            "serve a run of so many steps without lost_after_s",
            because="steps that a dead worker was given would be waited for without a limit",
            do="pass AsyncOptions(lost_after_s=...), some times what a worker takes at most",
        )
        self._server, self._tell = server, log
        self._checkpoint, self._every = checkpoint, checkpoint_arrivals
        # One lock for the state: workers reach it from threads.
        self._lock, self._finished = threading.Lock(), threading.Event()
        # Workers that asked for work and have not heard that it is done.
        self._uninformed: set[int] = set()
        if checkpoint is not None and checkpoint.exists():
            try:
                state = torch.load(checkpoint)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(
                    f"go on from {checkpoint}",
                    because=f"it cannot be read: {error}",
                    do="restore the file, or remove it to begin anew",
                ) from error
            server.load_state_dict(state, now_s=time.monotonic())
            log(f"going on from {server.version} arrivals")
        if server.is_finished:
            self._finished.set()
        routes = {
            ("POST", "/join"): self._answering(self._join),
            ("POST", "/assign"): self._answering(self._assign),
            ("POST", "/arrive"): self._answering(self._arrive),
        }
        self._listener = RunServer(
            token,
            routes,
            host=host,
            port=port,
            on_refusal=lambda peer, why: log(f"refused {peer}: {why}"),
            largest_request=max(LARGEST_REQUEST, server.message_nbytes + _MARGIN),
            request_s=_REQUEST_S,
        )
        self.port = self._listener.port

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all steps of the run are in theta; returns whether they are."""
        return self._finished.wait(timeout_s)

    def wait_until_told(self, timeout_s: float) -> bool:
        """Wait until all workers have heard that the run is finished; returns whether they have.

        A worker that hears it late would try in vain to reach a server that is gone.

        Args:
            timeout_s: of the wait; a dead worker hears nothing.
        """
        end_s = time.monotonic() + timeout_s
        while self._uninformed and time.monotonic() < end_s:
            time.sleep(0.05)
        return not self._uninformed

    def save(self) -> None:
        """Write a checkpoint now, if there is a file for it."""
        with self._lock:
            self._save()

    def close(self) -> None:
        """Write a checkpoint and stop answering."""
        self._listener.close()
        self.save()

    # -- requests ----------------------------------------------------------------------------------

    def _answering(self, handle: Callable[[bytes], HttpReply]) -> Callable[[bytes], HttpReply]:
        """`handle` with the lock; what it refuses is an answer, and goes no further."""

        def answer(body: bytes) -> HttpReply:
            try:
                with self._lock:
                    return handle(body)
            except ThinwireError as error:
                self._tell(str(error))
                why = {"error": f"it cannot {error.cannot}: {error.because}", "do": error.do}
                return json_answer(why, status=409)

        return answer

    def _join(self, body: bytes) -> HttpReply:
        asked = read_as(_Ask, body)
        self._server.check_worker(asked.worker, asked.description)
        self._tell(f"worker {asked.worker} joined at {self._server.version} arrivals")
        return json_answer({"workers": self._server.workers})

    def _assign(self, body: bytes) -> HttpReply:
        asked = read_as(_Ask, body)
        given = self._server.assign(asked.worker, now_s=time.monotonic(), speed=asked.speed)
        self._uninformed.add(asked.worker)
        match given:
            case RunFinished():
                self._uninformed.discard(asked.worker)
                return json_answer({"finished": True})
            case TryLater(after_s):
                return json_answer({"after_s": after_s})
            case Assignment():
                head = msgspec.json.encode(
                    _Head(given.round, given.anchor.hex(), given.steps, given.steps_done)
                )
                # No JSON object begins with a zero, which the length of a head does.
                length = len(head).to_bytes(_LENGTH_NBYTES, "big")
                return HttpReply(body=length + head, more=(given.message.numpy().data,))

    def _arrive(self, body: bytes) -> HttpReply:
        message = _as_tensor(body)
        receipt = self._server.receive(message, now_s=time.monotonic())
        if receipt.rejection is not None:
            self._tell(f"refused a message: {receipt.rejection}")
        elif not receipt.is_repeated and self._server.version % self._every == 0:
            self._save()
        if self._server.is_finished:
            self._finished.set()
        why = receipt.rejection
        told = None if why is None else {"reason": why.reason.name, "detail": why.detail}
        answer = _Answer(receipt.staleness, receipt.is_repeated, told)
        return HttpReply(body=msgspec.json.encode(answer))

    def _save(self) -> None:
        if self._checkpoint is not None:
            state = self._server.state_dict()
            replace_file(self._checkpoint, lambda path: torch.save(state, path))


class AsyncClient:
    """A worker's connection to the server; it tries again where the server does not answer.

    Args:
        worker: whose assignments and messages it carries.
        token: of the run.
        address: HOST:PORT of the server.
        timeout_s: seconds without a byte from the server after which a try has failed.
        give_up_s: seconds of failed tries after which the error is raised.
    """

    def __init__(
        self,
        worker: AsyncWorker,
        token: Token,
        address: str,
        *,
        timeout_s: float = 30.0,
        give_up_s: float = 300.0,
    ) -> None:
        self._worker, self._dialer, self._address = worker, Dialer(token), address
        self._timeout_s, self._give_up_s = timeout_s, give_up_s

    def work(self, train: Callable[[Assignment], object]) -> None:
        """Train until the run is finished.

        Args:
            train: takes `assignment.steps` inner steps; how long it takes is this worker's speed.

        Raises:
            MismatchError: the server is of another run; names the field that differs.
            ExchangeError: the server did not answer for too long.
        """
        self.join()
        speed = None
        while (assignment := self.fetch(speed=speed)) is not None:
            self._worker.start(assignment)
            started_s = time.perf_counter()
            train(assignment)
            speed = assignment.steps / max(1e-9, time.perf_counter() - started_s)
            self.push(self._worker.finish())

    def join(self) -> None:
        """Ask to take part.

        Raises:
            MismatchError: the server is of another run, or has no worker of this number.
            ExchangeError: the server did not answer for too long.
        """
        asked = {"worker": self._worker.rank, "description": self._worker.describe()}
        self._ask("/join", asked)

    def fetch(self, *, speed: float | None = None) -> Assignment | None:
        """The next assignment, for which it waits if need be; None at the end of the run.

        Args:
            speed: this worker's inner steps a second, if it has taken any.

        Raises:
            ExchangeError: the server did not answer for too long. MismatchError: it refuses.
        """
        asked = {"worker": self._worker.rank, "speed": speed}
        while True:
            answer = self._ask("/assign", asked)
            if answer[:1] == b"{":
                wait = read_as(dict[str, Any], answer)
                if "finished" in wait:
                    return None
                time.sleep(min(wait["after_s"], _LONGEST_PAUSE_S))
                continue
            end = _LENGTH_NBYTES + int.from_bytes(answer[:_LENGTH_NBYTES], "big")
            head = read_as(_Head, answer[_LENGTH_NBYTES:end])
            return Assignment(
                message=_as_tensor(answer[end:]),
                round=head.round,
                anchor=bytes.fromhex(head.anchor),
                steps=head.steps,
                steps_done=head.steps_done,
            )

    def push(self, message: Tensor) -> Receipt:
        """Send a message, again if it was damaged on its way or its answer was lost.

        The worker is told what became of it (`AsyncWorker.settle`).

        Raises:
            ExchangeError: the server did not answer for too long, or it arrived damaged each time.
            NonFiniteError: the server found it not finite.
        """
        body, receipt = message.cpu().contiguous().numpy().data, Receipt()
        for _ in range(_SENDS_OF_A_DAMAGED_MESSAGE):
            answer = read_as(_Answer, self._ask("/arrive", body))
            why = answer.rejection
            rejection = None
            if why is not None:
                rejection = Rejection(reason=RejectReason[why["reason"]], detail=why["detail"])
            receipt = Receipt(
                staleness=answer.staleness, is_repeated=answer.is_repeated, rejection=rejection
            )
            if rejection is None or rejection.reason is not RejectReason.DAMAGED:
                self._worker.settle(receipt)
                return receipt
        raise ExchangeError(
            f"send a message of worker {self._worker.rank}",
            because=f"it was refused each time: {receipt.rejection}",
            do="check the link, and that server and workers run the same thinwire version",
        )

    def _post(self, path: str, body: Any) -> bytes:
        largest = self._worker.anchor_nbytes + _MARGIN
        to, timeout_s = (self._dialer, self._address, path, body), self._timeout_s
        return send_request(*to, largest=largest, timeout_s=timeout_s).body

    def _ask(self, path: str, body: Any) -> bytes:
        return with_retry(
            lambda: self._post(path, body),
            silence=(ExchangeError,),
            give_up_s=self._give_up_s,
            first_s=_FIRST_PAUSE_S,
            longest_s=_LONGEST_PAUSE_S,
        )


# -- what travels ----------------------------------------------------------------------------------


class _Ask(msgspec.Struct):
    """What a worker asks with, to join or for an assignment."""

    worker: int
    description: dict[str, str] = {}
    speed: float | None = None


class _Head(msgspec.Struct):
    """What stands before a message with theta."""

    round: int
    anchor: str
    steps: int
    steps_done: int


class _Answer(msgspec.Struct):
    staleness: int
    is_repeated: bool
    rejection: dict[str, str] | None


def _as_tensor(body: bytes) -> Tensor:
    # frombuffer takes no empty buffer, and a bytes object may not be written to.
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0).byte()
