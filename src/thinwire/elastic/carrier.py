"""How bytes move between the workers of a round: apart from who they are."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.host_copy import HostCopy, lies_on_gpu
from thinwire.transport.backend import Backend, Wait
from thinwire.transport.base import Post, Received


class GroupLink(ABC):
    """A connection between the workers of one round, for as long as none of them is lost."""

    workers: int
    """How many there are."""

    @abstractmethod
    def backend(self, number: int, *, timeout_s: float) -> Backend:
        """What carries exchange `number`, of which each request may take `timeout_s`."""

    @abstractmethod
    def abort(self) -> None:
        """Make everything that is under way fail soon, here and on the other workers."""


# -- streams ---------------------------------------------------------------------------------------

_HEAD = struct.Struct("<QB3sQ")  # number of the exchange, of its post, kind, bytes
_TO_ALL, _TO_EACH = b"all", b"a2a"
_PIECE = 1 << 20
_MOST_WAITING = 8
_UNWANTED_S = 120.0
_Slot: TypeAlias = tuple[int, int, bytes, int]
"""Of a message: number of the exchange and of its post, kind, and the sender's rank."""
_Use: TypeAlias = Callable[[socket.socket], None]
_Unsent: TypeAlias = tuple[bytes, Callable[[], Tensor], threading.Event]


class StreamCarrier:
    """Links over streams: one from every worker to every other one, that carries its messages.

    One of a worker's ranks has one. Its methods may raise RuntimeError or ValueError: a worker
    could not be reached.

    Two streams for a pair, because TLS of Python before 3.13 takes no reading beside writing.

    Args:
        open_stream: connects to a target of the server at an address, within some seconds.
        largest_nbytes: of a message; a longer one ends the link unread.
    """

    def __init__(
        self, open_stream: Callable[[str, str, float], socket.socket], *, largest_nbytes: int
    ) -> None:
        self._open_stream, self._largest_nbytes = open_stream, largest_nbytes
        self._changed = threading.Condition()
        self._links: dict[str, _StreamLink] = {}
        # Streams that arrived, by what a link then does with them in the threads that brought them.
        self._arrived: dict[tuple[str, int], Future[_Use]] = {}
        self._is_closed = False

    def accept(self, target: str) -> _Use:
        """What to do with a stream that another worker opened to payload/KEY/RANK of this one."""
        key, _, rank = target.rpartition("/")
        use: Future[_Use] = Future()
        with self._changed:
            if self._is_closed:
                raise OSError("this worker has left")
            self._arrived[key, int(rank)] = use
            self._changed.notify_all()

        def run(stream: socket.socket) -> None:
            # A link that did not come about never asks.
            with contextlib.suppress(TimeoutError):
                use.result(_UNWANTED_S)(stream)

        return run

    def connect(
        self, addresses: Sequence[str], *, key: str, rank: int, timeout_s: float
    ) -> GroupLink:
        """A link of workers, all of which call this.

        Args:
            addresses: HOST:PORT of every worker's server, in rank order.
            key: of this link: no other has it.
            rank: of this worker.
            timeout_s: for all of them to be there.
        """
        until_s = time.monotonic() + timeout_s
        others = [r for r in range(len(addresses)) if r != rank]
        link = _StreamLink(rank, len(addresses), self._largest_nbytes)
        with self._changed:
            self._links = {k: each for k, each in self._links.items() if not each.broken}
            self._links[key] = link
        try:
            for other in others:
                link.send_through(other, self._dial(addresses[other], f"{key}/{rank}", until_s))
            with self._changed:
                if not self._changed.wait_for(
                    lambda: all((key, other) in self._arrived for other in others),
                    until_s - time.monotonic(),
                ):
                    missing = [o for o in others if (key, o) not in self._arrived]
                    raise RuntimeError(
                        f"workers {missing} did not connect to this one in {timeout_s:g} s"
                    )
                arrived = {other: self._arrived.pop((key, other)) for other in others}
            for other, use in arrived.items():
                use.set_result(partial(link.receive, other))
        except BaseException:
            link.abort()
            with self._changed:
                left = [self._arrived.pop(k) for k in list(self._arrived) if k[0] == key]
            for use in left:
                use.set_result(lambda _: None)
            raise
        return link

    def _dial(self, address: str, target: str, until_s: float) -> socket.socket:
        """A stream to another worker, which may not be there yet."""
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self._open_stream(address, f"payload/{target}", max(0.1, left_s))
            except (OSError, ThinwireError) as error:
                if time.monotonic() + 0.1 > until_s:
                    why = error.because if isinstance(error, ThinwireError) else str(error)
                    raise RuntimeError(f"the worker at {address} was not reached: {why}") from error
                time.sleep(0.1)

    def close(self) -> None:
        """End all links."""
        with self._changed:
            self._is_closed = True
            links, waiting = list(self._links.values()), list(self._arrived.values())
        for link in links:
            link.abort()
        for use in waiting:
            use.set_result(lambda _: None)


class _StreamLink(GroupLink):
    """Messages by their slots, as they come."""

    def __init__(self, rank: int, workers: int, largest_nbytes: int) -> None:
        self.rank, self.workers, self._largest_nbytes = rank, workers, largest_nbytes
        self.broken = ""
        self._changed = threading.Condition()
        self._messages: dict[_Slot, Tensor] = {}
        self._unsent: dict[int, queue.SimpleQueue[_Unsent | None]] = {}
        self._streams: list[socket.socket] = []

    def backend(self, number: int, *, timeout_s: float) -> Backend:
        return _StreamBackend(self, number, timeout_s)

    def send_through(self, other: int, stream: socket.socket) -> None:
        self._own(stream)
        # A stalled receiver is noticed by its missing messages, not here.
        stream.settimeout(None)
        self._unsent[other] = queue.SimpleQueue()
        sending = threading.Thread(target=self._send, args=(other, stream), daemon=True)
        sending.start()

    def send(self, other: int, head: bytes, read: Callable[[], Tensor]) -> threading.Event:
        left = threading.Event()
        self._unsent[other].put((head, read, left))
        return left

    def _send(self, other: int, stream: socket.socket) -> None:
        """Send messages to one worker, one after the other, until the link breaks."""
        try:
            while (item := self._unsent[other].get()) is not None:
                head, read, left = item
                stream.sendall(head)
                raw = read().numpy().data
                for start in range(0, len(raw), _PIECE):
                    stream.sendall(raw[start : start + _PIECE])
                del item, read, raw
                left.set()
                with self._changed:
                    self._changed.notify_all()
        except (OSError, ValueError, RuntimeError) as error:  # the last of a GPU's copy
            self._break(other, str(error) or type(error).__name__)
        finally:
            stream.close()

    def receive(self, other: int, stream: socket.socket) -> None:
        """Take messages until the stream ends."""
        self._own(stream)
        try:
            while True:
                number, step, kind, nbytes = _HEAD.unpack(_read(stream, _HEAD.size))
                if nbytes > self._largest_nbytes:
                    raise ValueError(
                        f"it announces {nbytes} bytes, and at most {self._largest_nbytes} are taken"
                    )
                raw = _read(stream, nbytes)
                payload = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
                with self._changed:
                    self._messages[number, step, kind, other] = payload
                    waiting_nbytes = sum(m.numel() for m in self._messages.values())
                    if waiting_nbytes > _MOST_WAITING * self._largest_nbytes:
                        raise ValueError("it sends more than this worker asked for")
                    self._changed.notify_all()
        except (OSError, ValueError) as error:
            self._break(other, str(error) or type(error).__name__)

    def wait_for(
        self, is_ready: Callable[[], bool], until_s: float, late: Callable[[], str]
    ) -> None:
        """Wait for others.

        Raises:
            RuntimeError: a worker is gone, or the time is over, for which `late` has the words.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.broken or is_ready(), max(0.0, until_s - time.monotonic())
            )
            if not is_ready():
                raise RuntimeError(self.broken or late())

    def take(self, slots: Sequence[_Slot], until_s: float) -> list[Tensor]:
        """The messages of `slots`, once all are there."""

        def missing() -> list[int]:
            return [slot[3] for slot in slots if slot not in self._messages]

        self.wait_for(
            lambda: not missing(),
            until_s,
            lambda: f"timed out: workers {missing()} sent nothing in time",
        )
        with self._changed:
            return [self._messages.pop(slot) for slot in slots]

    def abort(self) -> None:
        self._break(None, "the link was given up")

    def _own(self, stream: socket.socket) -> None:
        with self._changed:
            self._streams.append(stream)
            broken = bool(self.broken)
        if broken:
            _hang_up(stream)

    def _break(self, other: int | None, why: str) -> None:
        with self._changed:
            if not self.broken:
                self.broken = why if other is None else f"worker {other} is gone: {why}"
            # What has arrived whole stays: a worker may leave once it has sent its last message.
            self._changed.notify_all()
            streams = list(self._streams)
        for stream in streams:
            _hang_up(stream)
        for unsent in list(self._unsent.values()):
            unsent.put(None)


class _StreamBackend(Backend):
    """One exchange over a link."""

    def __init__(self, link: _StreamLink, number: int, timeout_s: float) -> None:
        self._link, self._number, self._timeout_s = link, number, timeout_s

    def start(self, post: Post, step: int) -> Wait:
        """Send to every worker concerned; each begins with another one."""
        link, number = self._link, self._number
        kind = _TO_ALL if post.is_to_all(link.workers) else _TO_EACH
        after = [(link.rank + distance) % link.workers for distance in range(1, link.workers)]
        reads = {id(payload): _on_host(payload) for payload in post.to.values()}
        left = [
            link.send(to, _HEAD.pack(number, step, kind, payload.numel()), reads[id(payload)])
            for to in after
            if (payload := post.to.get(to)) is not None
        ]

        def wait() -> Received:
            until_s = time.monotonic() + self._timeout_s
            messages = link.take([(number, step, kind, other) for other in post.take], until_s)
            # The caller may change what it sent once this returns.
            link.wait_for(
                lambda: all(each.is_set() for each in left),
                until_s,
                lambda: "timed out: a worker does not take what is sent to it",
            )
            received = dict(zip(post.take, messages, strict=True))
            for other, message in received.items():
                if message.numel() != post.take[other]:
                    raise RuntimeError(
                        f"worker {other} sent {message.numel()} bytes where {post.take[other]} "
                        "were expected"
                    )
            return received

        return wait

    def abort(self) -> None:
        """End the link."""
        self._link.abort()


def _on_host(payload: Tensor) -> Callable[[], Tensor]:
    """Returns what reads `payload` in the host's memory, in whatever thread."""
    if lies_on_gpu(payload):
        return HostCopy(payload).read
    host = payload.cpu().contiguous()
    return lambda: host


def _read(stream: socket.socket, nbytes: int) -> bytearray:
    """Memory grows with what arrives."""
    if not nbytes:
        return bytearray()
    raw = bytearray(min(nbytes, _PIECE))
    received = 0
    while received < nbytes:
        if received == len(raw):
            raw.extend(bytes(min(len(raw), nbytes - len(raw))))
        with memoryview(raw) as view:
            count = stream.recv_into(view[received:])
        if not count:
            raise ConnectionError("it has hung up")
        received += count
    return raw


def _hang_up(stream: socket.socket) -> None:
    # Not SSLSocket's own, which takes the stream from under a thread that reads it.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(stream, socket.SHUT_RDWR)
