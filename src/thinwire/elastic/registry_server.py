"""The door of an elastic run: who may come in, who is there, and where their state can be had.

It runs beside torchft's lighthouse, which decides who takes part in a round and asks nobody for a
token. Workers know only the door's address.
"""

import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from thinwire.elastic.address import address_text, split_address
from thinwire.elastic.registry import JoinRefusal, MemberRegistry, Peer
from thinwire.elastic.shared_state import Progress
from thinwire.elastic.signed_http import (
    Handler,
    SignedReply,
    SignedServer,
    call,
    json_answer,
)
from thinwire.elastic.token import Token
from thinwire.errors import ConfigurationError, MismatchError

__all__ = ["HeartbeatReply", "JoinReply", "RegistryClient", "RegistryServer"]

_PROBE_S = 2.0
_PAUSE_S = 0.3
_GRACE_S = 1.0


@final
class RegistryServer:
    """Answers workers until it is closed.

    Args:
        token: of the run.
        host: address to listen on.
        port: 0 takes any that is free.
        lighthouse_port: of torchft's lighthouse on this machine.
        heartbeat_timeout_s: without a beat, after which a worker is gone.
        on_event: is told in a line who came, left or was refused, and why; from any thread.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        token: Token,
        *,
        host: str,
        port: int,
        lighthouse_port: int,
        heartbeat_timeout_s: float,
        on_event: Callable[[str], None],
    ) -> None:
        self._facts = {
            "lighthouse_port": lighthouse_port,
            "heartbeat_timeout_s": heartbeat_timeout_s,
        }
        self._register = MemberRegistry(expiry_s=heartbeat_timeout_s)
        self._on_event = on_event
        self._opened_s = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = SignedServer(
            token, self._routes(), host=host, port=port, on_refusal=self._refused
        )
        self.port: int = self._server.port
        self._watch = threading.Thread(target=self._expire, daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._server.close()
        self._watch.join()

    def _routes(self) -> Mapping[tuple[str, str], Handler]:
        return {
            ("POST", "/join"): _reading(self._join),
            ("POST", "/beat"): _reading(self._beat),
            ("POST", "/leave"): _reading(self._leave),
            ("GET", "/peers"): _reading(self._peers),
            ("GET", "/time"): _reading(_time),
            ("POST", "/probe"): _reading(_probe),
        }

    @contextmanager
    def _open(self) -> Generator[MemberRegistry]:
        with self._lock:
            self._register.expire()
            yield self._register
            news = self._register.take_news()
        # Unlocked: a terminal that does not take its lines must not stop the beats.
        for line in news:
            self._on_event(line)

    def _expire(self) -> None:
        while not self._closed.wait(self._register.expiry_s / 5):
            with self._open():
                pass

    def _refused(self, host: str, reason: str) -> None:
        with self._open() as register:
            register.tell(f"somebody at {host}: {reason}", (host, reason[:20]))

    def _join(self, data: Any) -> SignedReply:
        peer, card = Peer.read(data), {str(k): str(v) for k, v in data["card"].items()}
        with self._open() as register:
            refusal = register.join(peer, card)
            peers = register.others(peer.identity)
        if refusal is not None:
            return _refusal_answer(refusal)
        return self._tell(peers)

    def _beat(self, data: Any) -> SignedReply:
        identity, position = str(data["identity"]), Progress.read(data["position"])
        with self._open() as register:
            known = register.beat(
                identity,
                str(data["nonce"]),
                position=position,
                finished=bool(data["finished"]),
                waiting_s=float(data["waiting_s"]),
            )
            if known is None:
                return json_answer({"error": f"{identity!r} is not in the run"}, status=410)
            peers, refused = register.others(identity), register.take_untold(identity)
        return self._tell(peers, refused=refused)

    def _leave(self, data: Any) -> SignedReply:
        with self._open() as register:
            register.leave(str(data["identity"]), str(data["nonce"]))
        return json_answer({})

    def _peers(self, _: Any) -> SignedReply:
        with self._open() as register:
            peers = register.others()
        return self._tell(peers)

    def _tell(self, peers: Sequence[Peer], **more: Any) -> SignedReply:
        age_s = time.monotonic() - self._opened_s
        described = [peer.describe() for peer in peers]
        return json_answer({**self._facts, "age_s": age_s, "peers": described, **more})


def _reading(answer: Callable[[Any], SignedReply]) -> Handler:
    def handle(body: bytes) -> SignedReply:
        try:
            return answer(json.loads(body or b"null"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = f"this request cannot be read: {error!r}"
            return json_answer({"error": said}, status=400)

    return handle


def _refusal_answer(refusal: JoinRefusal) -> SignedReply:
    said = {"error": refusal.reason, "do": refusal.do, "retry_s": refusal.retry_s}
    return json_answer(said, status=refusal.status)


def _time(_: Any) -> SignedReply:
    return json_answer({"time": time.time()})


def _probe(data: Any) -> SignedReply:
    # An address and not a name: a look-up could take long, and nobody asks for one.
    host, port = str(ipaddress.ip_address(data["host"])), int(data["port"])
    if not 0 < port < 65536:
        raise ValueError(f"port {port}")
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError as error:
        return json_answer({"reached": False, "why": str(error) or type(error).__name__})
    return json_answer({"reached": True, "why": ""})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReply:
    """What a worker learns at the door.

    Args:
        lighthouse: HOST:PORT of torchft's lighthouse.
        heartbeat_timeout_s: how long it may be silent.
        peers: the others that are there.
        age_s: since when the door is open; before one timeout, it may not know of all.
    """

    lighthouse: str
    heartbeat_timeout_s: float
    peers: tuple[Peer, ...]
    age_s: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReply:
    """What a worker learns from a beat.

    Args:
        peers: the others that are there.
        refused: who was refused since the last beat, and why, a line each.
        again: whether the door had forgotten this worker and let it in again.
        age_s: since when the door is open.
    """

    peers: tuple[Peer, ...]
    age_s: float
    refused: tuple[str, ...] = ()
    again: bool = False


@final
class RegistryClient:
    """A worker at the door; `beat` and `leave` may be called from different threads.

    Args:
        token: of the run.
        address: HOST:PORT of the door.
        identity: of this worker, its own in this run.
        card: what has to be the same on all workers, as one text per field.
        timeout_s: without a byte from the door.
        nonce: of this process; default random.
    """

    def __init__(
        self,
        token: Token,
        address: str,
        identity: str,
        card: Mapping[str, str],
        *,
        timeout_s: float = 5.0,
        nonce: str | None = None,
    ) -> None:
        self._host, _ = split_address(address)
        self._token, self._door, self._timeout_s = token, address, timeout_s
        self.identity, self.nonce = identity, nonce or secrets.token_hex(8)
        self._card = dict(card)
        self._address = ""
        self._finished = self._left = False

    def join(self, position: Progress, address: str) -> JoinReply:
        """Come in; waits until a worker that had this identity and is gone has been forgotten.

        Args:
            position: where this worker stands.
            address: HOST:PORT of its healing server, as others reach it.

        Raises:
            ExchangeError: the door cannot be reached.
            MismatchError: it refuses: another token, card or holder of the identity.
        """
        self._address, self._left = address, False
        told = self._ask("/join", {**self._me(position), "address": address, "card": self._card})
        waited_s, first = 0.0, told
        while told.status == 409 and waited_s < json.loads(first.body)["retry_s"] + _GRACE_S:
            time.sleep(_PAUSE_S)
            waited_s += _PAUSE_S
            told = self._ask(
                "/join", {**self._me(position), "address": address, "card": self._card}
            )
        data = self._accepted(told)
        return JoinReply(
            lighthouse=address_text(self._host, int(data["lighthouse_port"])),
            heartbeat_timeout_s=float(data["heartbeat_timeout_s"]),
            peers=_peers_of(data),
            age_s=float(data["age_s"]),
        )

    def finish(self) -> None:
        """Say in all later beats that this worker has taken all its steps."""
        self._finished = True

    def beat(self, position: Progress, *, waiting_s: float = 0.0) -> HeartbeatReply:
        """Say that this worker is there; comes in again if the door has forgotten it.

        Args:
            position: where this worker stands.
            waiting_s: for how long it has been waiting for others to begin a round.

        Raises:
            ConfigurationError: it has not joined.
            ExchangeError: the door cannot be reached.
            MismatchError: it refuses.
        """
        if not self._address:
            raise ConfigurationError(
                "beat at the door", because="this worker has not joined", do="call join first"
            )
        told = self._ask("/beat", {**self._me(position), "waiting_s": waiting_s})
        if told.status == 410 and self._left:
            return HeartbeatReply(peers=(), age_s=0.0)
        if told.status == 410:
            welcome = self.join(position, self._address)
            return HeartbeatReply(peers=welcome.peers, age_s=welcome.age_s, again=True)
        data = self._accepted(told)
        refused = tuple(map(str, data["refused"]))
        return HeartbeatReply(peers=_peers_of(data), age_s=float(data["age_s"]), refused=refused)

    def leave(self) -> None:
        """Go; a beat that comes after it does not bring this worker back.

        Raises:
            ExchangeError: the door cannot be reached; it forgets this worker by itself.
        """
        self._left = True
        self._ask("/leave", {"identity": self.identity, "nonce": self.nonce})

    def _me(self, position: Progress) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "nonce": self.nonce,
            "position": position.describe(),
            "finished": self._finished,
        }

    def _ask(self, path: str, value: Mapping[str, Any]) -> SignedReply:
        body = json.dumps(value).encode()
        reply = call(
            self._token,
            self._door,
            path,
            body=body,
            timeout_s=self._timeout_s,
            accept=(200, 400, 403, 404, 409, 410),
        )
        return SignedReply(status=reply.status, body=reply.content.getvalue())

    def _accepted(self, told: SignedReply) -> Any:
        data = json.loads(told.body)
        if told.status != 200:
            raise MismatchError(
                f"take part as {self.identity!r} in the run at {self._door}",
                because=str(data.get("error", told.status)),
                do=str(data.get("do", "give all of them the same token, version and time of day")),
            )
        return data


def _peers_of(data: Any) -> tuple[Peer, ...]:
    return tuple(map(Peer.read, data["peers"]))
