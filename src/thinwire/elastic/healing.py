"""The healing transfer: a worker's shared state, fetched by another while both may train."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from thinwire.elastic.round_log import RoundLog
from thinwire.elastic.shared_state import Progress, RoundRecord, Snapshot
from thinwire.elastic.signed_http import (
    Handler,
    SignedReply,
    SignedServer,
    ask_json,
    call,
    json_answer,
)
from thinwire.elastic.snapshot import record_parts, snapshot_parts, unpack, unpack_records
from thinwire.elastic.token import Token
from thinwire.errors import MismatchError

__all__ = ["HealingServer", "fetch_position", "fetch_records", "fetch_snapshot"]

_GONE = 410
_LONGEST_NAME = 200


@final
class HealingServer:
    """Gives a worker's position, state and last rounds to whoever knows the token.

    The packed state is kept for as long as the worker stays where it is, so that several
    newcomers cost one copy; the first request after it moved on lets go of it, as does `release`.

    Args:
        token: of the run.
        capture: a copy of the shared state; called from any thread, once at a time.
        position: where the worker stands; called from any thread.
        journal: of the last rounds.
        host: address to listen on.
        card: what the worker runs, for GET /card.
        on_helped: told the identity of each worker that a state, or records, went to in full.

    Raises:
        OSError: the host is none of this machine's.
    """

    def __init__(
        self,
        token: Token,
        capture: Callable[[], Snapshot],
        position: Callable[[], Progress],
        journal: RoundLog,
        *,
        host: str,
        card: Callable[[], bytes],
        on_helped: Callable[[str], None],
    ) -> None:
        self._position, self._journal, self._on_helped = position, journal, on_helped
        self._shelf = SnapshotCache(capture, position)
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/position"): self._answer_position,
            ("POST", "/state"): self._answer_state,
            ("POST", "/records"): self._answer_records,
            ("GET", "/card"): lambda _: SignedReply(body=card()),
        }
        self._server = SignedServer(token, routes, host=host)
        self.port: int = self._server.port

    def release(self) -> None:
        """Let go of the packed state unless it is still that of this worker's position."""
        self._shelf.release()

    def close(self) -> None:
        """Stop answering; what is being sent goes on."""
        self._server.close()

    def _answer_position(self, body: bytes) -> SignedReply:
        del body  # who asks is of no use yet
        self.release()
        return json_answer(self._position().describe())

    def _answer_state(self, body: bytes) -> SignedReply:
        who = _who(_read(body))
        if who is None:
            return json_answer({"error": "it does not say who asks"}, status=400)
        return self._parts(self._shelf.take(), who)

    def _answer_records(self, body: bytes) -> SignedReply:
        asked = _read(body)
        who, after, largest = _who(asked), asked.get("after"), asked.get("largest")
        if who is None or type(after) is not int or type(largest) is not int:
            return json_answer({"error": "it does not say who asks for what"}, status=400)
        self.release()
        records = self._journal.after(after)
        # A worker that has just been healed has no journal, but those where it stands miss nothing.
        if records is None and after == self._position().version:
            records = []
        if records is None:
            return json_answer({"error": f"rounds after {after} are gone"}, status=_GONE)
        parts = record_parts(records)
        if sum(map(len, parts)) > largest:
            return json_answer({"error": f"rounds after {after} are too large"}, status=_GONE)
        return self._parts(parts, who) if records else SignedReply(more=parts)

    def _parts(self, parts: list[memoryview], who: str) -> SignedReply:
        return SignedReply(more=parts, on_sent=lambda: self._on_helped(who))


@final
class SnapshotCache:
    """A captured state, ready to be sent, and where the worker stood then."""

    def __init__(self, capture: Callable[[], Snapshot], position: Callable[[], Progress]) -> None:
        self._capture, self._position = capture, position
        self._where: tuple[int, str] | None = None
        self._parts: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> list[memoryview]:
        with self._lock:
            here = self._here()
            if self._where != here:
                self._where, self._parts = None, []
                # A state newer than `here` does no harm: the worker never comes back there.
                self._parts = snapshot_parts(self._capture())
                self._where = here
            return self._parts

    def release(self) -> None:
        # Never wait: whoever holds the lock may capture, which may wait for the caller.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._where is not None and self._where != self._here():
                self._where, self._parts = None, []
        finally:
            self._lock.release()

    def _here(self) -> tuple[int, str]:
        position = self._position()
        return position.version, position.digest


def fetch_position(
    token: Token, address: str, *, who: str = "", timeout_s: float = 10.0
) -> Progress:
    """Where the worker at `address` stands.

    Args:
        token: of the run.
        address: HOST:PORT of its healing server.
        who: identity of this worker.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: nobody answers, or not in full.
        MismatchError: the other side refuses, or answers something else.
    """
    told = ask_json(token, address, "/position", {"who": who}, timeout_s=timeout_s)
    try:
        return Progress.read(told)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _other(address, f"its position is {str(told)[:100]}") from error


def fetch_snapshot(
    token: Token, address: str, *, who: str, largest: int, timeout_s: float
) -> Snapshot:
    """The shared state of the worker at `address`.

    Args:
        token: of the run.
        address: HOST:PORT of its healing server.
        who: identity of this worker.
        largest: bytes that are taken; a longer answer is refused unread.
        timeout_s: without a byte from the other side, which copies its state before it sends.

    Raises:
        ExchangeError: nobody answers, or not in full, or it is damaged.
        MismatchError: the other side refuses, or sends something else.
    """
    body = json.dumps({"who": who}).encode()
    reply = call(token, address, "/state", body=body, largest=largest, timeout_s=timeout_s)
    return unpack(reply.content.getbuffer())


def fetch_records(
    token: Token, address: str, after: int, *, who: str, largest: int, timeout_s: float
) -> list[RoundRecord] | None:
    """What the rounds since version `after` left at `address`; None if only a snapshot helps.

    Args:
        token: of the run.
        address: HOST:PORT of its healing server.
        after: version of this worker's shared state.
        who: identity of this worker.
        largest: bytes that are taken; if the records are more, None is returned.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: nobody answers, or not in full, or it is damaged.
        MismatchError: the other side refuses, or sends something else.
    """
    body = json.dumps({"who": who, "after": after, "largest": largest}).encode()
    # Room for a refusal, however little is asked for.
    room, accept = max(largest, 1 << 16), (200, _GONE)
    reply = call(
        token, address, "/records", body=body, largest=room, timeout_s=timeout_s, accept=accept
    )
    if reply.status == _GONE:
        return None
    records = unpack_records(reply.content.getbuffer())
    versions = [record.version for record in records]
    if versions != list(range(after + 1, after + 1 + len(records))):
        raise _other(address, f"its rounds after {after} are {str(versions)[:100]}")
    return records


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    return told if isinstance(told, dict) else {}


def _who(asked: Mapping[str, Any]) -> str | None:
    who = asked.get("who")
    return who if isinstance(who, str) and 0 < len(who) <= _LONGEST_NAME else None


def _other(address: str, because: str) -> MismatchError:
    return MismatchError(
        f"use what {address} answered",
        because=because,
        do="run the same thinwire version on all workers",
    )
