"""The healing transfer: a worker's shared state, fetched by another while both may train."""

import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import torch

from thinwire.elastic.dialer import Dialer
from thinwire.elastic.http_server import OpenTunnel
from thinwire.elastic.https import HttpReply, RunServer, json_answer, send_request
from thinwire.elastic.quorum import read_as
from thinwire.elastic.snapshot import (
    memory_file,
    record_parts,
    snapshot_parts,
    unpack,
    unpack_records,
)
from thinwire.errors import MismatchError
from thinwire.membership import Progress, RoundRecord, Snapshot
from thinwire.security.token import Token

_GONE = 410
_LONGEST_NAME = 200
_REFUSAL_NBYTES = 1 << 16
# Facts take memory, too, and the names of all messages of an answer go into one file header.
_MOST_RECORDS = 1024


class RoundLog:
    """Keeps the records of the last rounds, without a gap; safe from any thread.

    Args:
        largest_bytes: of all messages together; the oldest records go first. At most 1024 stay.

    >>> round_log = RoundLog(100)
    >>> for version in (1, 2, 3):
    ...     messages = [torch.zeros(40, dtype=torch.uint8)]
    ...     round_log.append(RoundRecord(version=version, facts={}, messages=messages))
    >>> [record.version for record in round_log.after(1)], round_log.after(0)
    ([2, 3], None)
    """

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._records: deque[RoundRecord] = deque()
        self._last: int | None = None
        self._lock = threading.Lock()

    def append(self, record: RoundRecord) -> None:
        """Keep a copy of `record`; if it does not follow the last one, forget all before it."""
        kept = RoundRecord(
            version=record.version,
            facts=copy.deepcopy(dict(record.facts)),
            messages=[
                message.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for message in record.messages
            ],
        )
        with self._lock:
            if self._last is None or record.version != self._last + 1:
                self._records.clear()
            self._records.append(kept)
            self._last = record.version
            while self._nbytes() > self._largest_bytes or len(self._records) > _MOST_RECORDS:
                self._records.popleft()

    def after(self, version: int) -> list[RoundRecord] | None:
        """The records of all rounds since `version`, oldest first; None if not all are here.

        They are shared: do not change them.
        """
        with self._lock:
            if self._last is None:
                return None
            missed, kept = self._last - version, len(self._records)
            return None if missed > kept else list(self._records)[kept - missed :]

    def oldest(self, version: int) -> int:
        """The lowest version from which the records here lead to `version`.

        >>> RoundLog(100).oldest(7)
        7
        """
        with self._lock:
            return version - (len(self._records) if self._last == version else 0)

    def clear(self) -> None:
        """Forget all records, as after taking over another worker's state."""
        with self._lock:
            self._records.clear()
            self._last = None

    def _nbytes(self) -> int:
        return sum(message.nbytes for record in self._records for message in record.messages)


class _Request(msgspec.Struct):
    who: Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_NAME)]


class _RecordsRequest(_Request):
    after: int
    largest: int


class HealingServer:
    """Gives a worker's position, state and last rounds to workers that know the token.

    The packed state is kept for as long as the worker stays where it is, so that several
    newcomers cost one copy; the first request after it moved on frees it, as does `release`.

    Args:
        token: of the run.
        capture: returns a copy of the shared state; called from any thread, once at a time.
        position: returns how far the worker has come; called from any thread.
        round_log: of the last rounds.
        host: address to listen on.
        on_helped: called with the identity of each worker that got a state, or records, in full.
        tunnels: what else others may open streams to here.

    Attributes:
        port: that it listens on.
        serve: answers the request that comes by a stream.
        close: stop answering; transfers that have begun go on.
        release: free the packed state unless it is still that of the worker's position.

    Raises:
        OSError: this machine does not have the address.
    """

    def __init__(
        self,
        token: Token,
        capture: Callable[[], Snapshot],
        position: Callable[[], Progress],
        round_log: RoundLog,
        *,
        host: str,
        on_helped: Callable[[str], None],
        tunnels: Mapping[str, OpenTunnel] | None = None,
    ) -> None:
        self._position, self._round_log, self._on_helped = position, round_log, on_helped
        self._cache = _SnapshotCache(capture, position)
        routes = {
            ("POST", "/position"): self._answer_position,
            ("POST", "/state"): self._answer_state,
            ("POST", "/records"): self._answer_records,
        }
        self._server = RunServer(token, routes, host=host, tunnels=tunnels)
        self.port, self.serve, self.close = (
            self._server.port,
            self._server.serve,
            self._server.close,
        )
        self.release = self._cache.release

    def _answer_position(self, body: bytes) -> HttpReply:
        del body  # all workers get the same answer
        self.release()
        return json_answer(self._position().describe())

    def _answer_state(self, body: bytes) -> HttpReply:
        try:
            who = read_as(_Request, body).who
        except ValueError as error:
            return json_answer({"error": f"the request has no identity: {error}"}, status=400)
        return self._reply(self._cache.take(), who)

    def _answer_records(self, body: bytes) -> HttpReply:
        try:
            request = read_as(_RecordsRequest, body)
        except ValueError as error:
            why = f"the request has no identity, version and largest size: {error}"
            return json_answer({"error": why}, status=400)
        self.release()
        after, largest = request.after, request.largest
        records = self._round_log.after(after)
        # A worker that has just been healed has an empty log, and lacks no record of its version.
        if records is None and after == self._position().version:
            records = []
        if records is None:
            return json_answer({"error": f"rounds after {after} are gone"}, status=_GONE)
        parts = record_parts(records)
        if sum(map(len, parts)) > largest:
            return json_answer({"error": f"rounds after {after} are too large"}, status=_GONE)
        return self._reply(parts, request.who) if records else HttpReply(more=parts)

    def _reply(self, parts: list[memoryview], who: str) -> HttpReply:
        return HttpReply(more=parts, on_sent=lambda: self._on_helped(who))


class _SnapshotCache:
    """A packed state, and the position that it is of."""

    def __init__(self, capture: Callable[[], Snapshot], position: Callable[[], Progress]) -> None:
        self._capture, self._position = capture, position
        self._key: tuple[int, str] | None = None
        self._parts: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> list[memoryview]:
        with self._lock:
            key = self._current_key()
            if self._key != key:
                self._key, self._parts = None, []
                # A state newer than `key` does no harm: the worker never returns to that position.
                self._parts = snapshot_parts(self._capture())
                self._key = key
            return self._parts

    def release(self) -> None:
        # Never wait: the holder of the lock may capture, which may wait for the caller.
        if self._lock.acquire(blocking=False):
            try:
                if self._key is not None and self._key != self._current_key():
                    self._key, self._parts = None, []
            finally:
                self._lock.release()

    def _current_key(self) -> tuple[int, str]:
        position = self._position()
        return position.version, position.digest


def fetch_position(
    dialer: Dialer, address: str, *, who: str = "", timeout_s: float = 10.0
) -> Progress:
    """How far the worker at `address` has come.

    Args:
        dialer: connects, with the run's token.
        address: HOST:PORT of its healing server.
        who: identity of this worker.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: there is no answer, or an incomplete one.
        MismatchError: the other side refuses, or answers something else.
    """
    reply = send_request(dialer, address, "/position", {"who": who}, timeout_s=timeout_s)
    described = reply.json()
    try:
        return Progress.read(described)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _unusable(address, f"its position is {str(described)[:100]}") from error


def fetch_snapshot(
    dialer: Dialer, address: str, *, who: str, largest: int, timeout_s: float
) -> Snapshot:
    """The shared state of the worker at `address`.

    Args:
        dialer: connects, with the run's token.
        address: HOST:PORT of its healing server.
        who: identity of this worker.
        largest: bytes that are taken; a longer answer is refused unread.
        timeout_s: without a byte from the other side, which copies its state before it sends.

    Raises:
        ExchangeError: there is no answer, or an incomplete or damaged one.
        MismatchError: the other side refuses, or sends something else.
    """
    with memory_file() as file:
        send_request(
            dialer, address, "/state", {"who": who}, largest=largest, timeout_s=timeout_s, into=file
        )
        return unpack(file)


def fetch_records(
    dialer: Dialer, address: str, after: int, *, who: str, largest: int, timeout_s: float
) -> list[RoundRecord] | None:
    """The rounds since version `after`, from `address`; None if only a snapshot helps.

    Args:
        dialer: connects, with the run's token.
        address: HOST:PORT of its healing server.
        after: version of this worker's shared state.
        who: identity of this worker.
        largest: bytes that are taken; if the records are more, None is returned.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: there is no answer, or an incomplete or damaged one.
        MismatchError: the other side refuses, or sends something else.
    """
    with memory_file() as file:
        reply = send_request(
            dialer,
            address,
            "/records",
            {"who": who, "after": after, "largest": largest},
            largest=max(largest, _REFUSAL_NBYTES),
            timeout_s=timeout_s,
            accept=(200, _GONE),
            into=file,
        )
        if reply.status == _GONE:
            return None
        records = unpack_records(file)
    versions = [record.version for record in records]
    if versions != list(range(after + 1, after + 1 + len(records))):
        raise _unusable(address, f"its rounds after {after} are {str(versions)[:100]}")
    return records


def _unusable(address: str, because: str) -> MismatchError:
    return MismatchError(
        f"use what {address} answered",
        because=because,
        do="run the same thinwire version on all workers",
    )
