"""Ways to workers that no machine can connect to: each keeps a connection to the relay.

The relay is on the lighthouse's machine. A member that wants a stream to such a worker asks there;
the relay tells the worker, which connects once more, and carries bytes between the two connections.
So one port of one machine has to be reachable, and workers only connect outwards.
"""

import contextlib
import queue
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping

from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.http_server import OpenTunnel
from thinwire.elastic.timeouts import pauses
from thinwire.errors import ThinwireError

_BEAT_S = 2.0
_SILENT_S = 10.0
_ANSWER_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_PIECE, _LOOK_S = 256 << 10, 1.0


class Relay:
    """The relay's side; `tunnels` is what the server of the lighthouse's machine opens.

    Attributes:
        tunnels: relay/ADDRESS is the connection that a worker keeps, worker/ADDRESS a stream to
            it, and stream/ID its answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, queue.SimpleQueue[str]] = {}
        self._asked: dict[str, _AskedStream] = {}
        self.tunnels: Mapping[str, OpenTunnel] = {
            "relay": self._keep,
            "worker": self._ask,
            "stream": self._answer,
        }

    def _keep(self, address: str) -> Callable[[socket.socket], None]:
        def run(stream: socket.socket) -> None:
            asked: queue.SimpleQueue[str] = queue.SimpleQueue()
            with self._lock:
                self._workers[address] = asked
            stream.settimeout(_SILENT_S)
            try:
                while True:
                    # An empty line now and then shows each side that the other is there.
                    line = ""
                    with contextlib.suppress(queue.Empty):
                        line = asked.get(timeout=_BEAT_S)
                    stream.sendall(line.encode() + b"\n")
            except OSError:
                return
            finally:
                with self._lock:
                    if self._workers.get(address) is asked:
                        del self._workers[address]

        return run

    def _ask(self, address: str) -> Callable[[socket.socket], None]:
        key, asked = secrets.token_hex(8), _AskedStream()
        with self._lock:
            worker = self._workers.get(address)
            if worker is None:
                raise OSError(f"no worker at {address} is connected to the relay")
            self._asked[key] = asked
        worker.put(key)
        if not asked.came.wait(_ANSWER_S):
            with self._lock:
                self._asked.pop(key, None)
            raise OSError(f"the worker at {address} did not answer in {_ANSWER_S:g} s")

        def run(stream: socket.socket) -> None:
            assert asked.stream is not None
            asked.began.set()
            try:
                pump(stream, asked.stream)
            finally:
                asked.ended.set()

        return run

    def _answer(self, key: str) -> Callable[[socket.socket], None]:
        with self._lock:
            asked = self._asked.pop(key, None)
        if asked is None:
            raise OSError("no worker waits for this stream any more")

        def run(stream: socket.socket) -> None:
            asked.stream = stream
            asked.came.set()
            # The stream is closed when this returns. Who asked may have given up meanwhile.
            if asked.began.wait(_ANSWER_S):
                asked.ended.wait()

        return run


class _AskedStream:
    def __init__(self) -> None:
        self.came, self.began, self.ended = (threading.Event() for _ in range(3))
        self.stream: socket.socket | None = None


class RelayedServer:
    """A worker's side: keeps a connection to the relay, and serves the streams it is asked for.

    Args:
        dialer: connects.
        relay: HOST:PORT of the lighthouse.
        address: HOST:PORT of this worker's server, by which others ask for it.
        serve: gets every stream.
    """

    def __init__(
        self, dialer: Dialer, relay: str, address: str, serve: Callable[[ssl.SSLSocket], None]
    ) -> None:
        self._dialer, self._relay, self._address, self._serve = dialer, relay, address, serve
        self._closed = threading.Event()
        self._stream: ssl.SSLSocket | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the relay; streams that were begun go on."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stream, socket.SHUT_RDWR)
        self._thread.join(_SILENT_S)

    def _run(self) -> None:
        growing = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._closed.is_set():
            began_s = time.monotonic()
            with contextlib.suppress(OSError, ThinwireError):
                self._keep_connected()
            if time.monotonic() - began_s > _SILENT_S:
                growing = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._closed.wait(next(growing))

    def _keep_connected(self) -> None:
        target = f"relay/{self._address}"
        with open_stream(self._dialer, self._relay, target, timeout_s=_SILENT_S) as stream:
            self._stream = stream
            line = b""
            while not self._closed.is_set():
                piece = stream.recv(1)
                if not piece:
                    return
                if piece != b"\n":
                    line += piece
                elif line:
                    threading.Thread(target=self._come, args=(line.decode(),), daemon=True).start()
                    line = b""

    def _come(self, key: str) -> None:
        with contextlib.suppress(OSError, ThinwireError):
            self._serve(
                open_stream(self._dialer, self._relay, f"stream/{key}", timeout_s=_ANSWER_S)
            )


def loopback_tunnel(port: int) -> OpenTunnel:
    """A tunnel to a program on this machine that checks no token, and so listens on loopback.

    Args:
        port: of the program, on 127.0.0.1.
    """

    def open_tunnel(rest: str) -> Callable[[socket.socket], None]:
        del rest
        there = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S)

        def run(stream: socket.socket) -> None:
            with there:
                pump(stream, there)

        return run

    return open_tunnel


class LoopbackForward:
    """A port on loopback whose connections end at a target of the lighthouse's machine.

    For clients of other libraries, which know no TLS of ours.

    Args:
        dialer: connects.
        address: HOST:PORT of the lighthouse.
        target: what a request CONNECT names there.

    Attributes:
        address: 127.0.0.1:PORT.
    """

    def __init__(self, dialer: Dialer, address: str, target: str) -> None:
        self._dialer, self._there, self._target = dialer, address, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._run, name="thinwire-forward", daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and end those there are."""
        for stream in (self._listener, *list(self._open)):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                here, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(here,), daemon=True).start()

    def _carry(self, here: socket.socket) -> None:
        self._open.add(here)
        try:
            with here, contextlib.suppress(OSError, ThinwireError):
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with open_stream(
                    self._dialer, self._there, self._target, timeout_s=_ANSWER_S
                ) as there:
                    pump(here, there)
        finally:
            self._open.discard(here)


def pump(one: socket.socket, other: socket.socket) -> None:
    """Carry what each of two streams says to the other one, until both have ended or one failed.

    No more than a quarter of a MiB is held for either: who reads slowly slows down who sends.
    """
    with contextlib.suppress(OSError, ValueError):  # one of them was closed
        for stream in (one, other):
            stream.setblocking(False)
        ways = (_Way(one, other), _Way(other, one))
        while not all(way.ended for way in ways):
            # Both, not the first that moves.
            moved = [way.step() for way in ways]
            if any(moved):
                continue
            reads = [way.wants_read for way in ways if way.wants_read]
            writes = [way.wants_write for way in ways if way.wants_write]
            select.select(reads, writes, [], _LOOK_S)


class _Way:
    """From one stream to the other."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._held = memoryview(bytearray(_PIECE))
        self._begin = self._end = 0
        self.ended = False
        self.wants_read: socket.socket | None = None
        self.wants_write: socket.socket | None = None

    def step(self) -> bool:
        """Read or write once; whether anything moved."""
        self.wants_read = self.wants_write = None
        if self.ended:
            return False
        stream = self._source if self._begin == self._end else self._target
        try:
            if stream is self._target:
                self._begin += stream.send(self._held[self._begin : self._end])
            else:
                self._read()
            return True
        except (ssl.SSLWantReadError, BlockingIOError):
            # A plain stream says the same whether it cannot be read or cannot be written.
            if stream is self._source or isinstance(stream, ssl.SSLSocket):
                self.wants_read = stream
            else:
                self.wants_write = stream
        except ssl.SSLWantWriteError:
            self.wants_write = stream
        return False

    def _read(self) -> None:
        self._begin, self._end = 0, self._source.recv_into(self._held)
        if not self._end:
            self.ended = True
            # Within TLS a stream cannot be ended in one direction alone.
            if isinstance(self._target, ssl.SSLSocket):
                raise ConnectionError("the other end has hung up")
            self._target.shutdown(socket.SHUT_WR)
