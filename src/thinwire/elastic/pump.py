"""Carrying bytes between two streams, both ways, in one thread: TLS allows no more for a stream."""

import contextlib
import select
import socket
import ssl

_PIECE = 256 << 10
_LOOK_S = 1.0


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
            reads = [way.wants_read for way in ways if way.wants_read is not None]
            writes = [way.wants_write for way in ways if way.wants_write is not None]
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
            return self._read() if stream is self._source else self._write()
        except (ssl.SSLWantReadError, BlockingIOError):
            # A plain stream says the same whether it cannot be read or cannot be written.
            if stream is self._source or isinstance(stream, ssl.SSLSocket):
                self.wants_read = stream
            else:
                self.wants_write = stream
        except ssl.SSLWantWriteError:
            self.wants_write = stream
        return False

    def _read(self) -> bool:
        count = self._source.recv_into(self._held)
        self._begin, self._end = 0, count
        if not count:
            self.ended = True
            # Within TLS a stream cannot be ended in one direction alone.
            if isinstance(self._target, ssl.SSLSocket):
                raise ConnectionError("the other end has hung up")
            self._target.shutdown(socket.SHUT_WR)
        return True

    def _write(self) -> bool:
        self._begin += self._target.send(self._held[self._begin : self._end])
        return True
