"""The registry of an elastic run over HTTP, and a worker's connection to it.

It runs beside torchft's lighthouse, which decides who takes part in a round and checks no token.
Workers are given only the registry's address.
"""

import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from thinwire.contributions import ContributionCounts
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.https import (
    Handler,
    HttpAnswer,
    HttpReply,
    RunServer,
    json_answer,
    send_request,
)
from thinwire.elastic.quorum import Member, read_as
from thinwire.elastic.registry import MemberRegistry, MemberStatus, RoundRefusal
from thinwire.elastic.relay import Relay, loopback_tunnel
from thinwire.errors import MismatchError
from thinwire.membership import Progress, WorkerMetrics
from thinwire.security.token import Token
from thinwire.transport.address import split_address

_PROBE_S = 2.0
_PAUSE_S = 0.3
_GRACE_S = 1.0
_NOISE_NBYTES = 1 << 20
_MOST_TOLD = 64
_NO_RUN = Progress(version=0, step=0, digest="")


class RefusedError(MismatchError):
    """The registry has checked a worker and refuses it, for its description or its identity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryStatus:
    """What the registry knows at a moment.

    Args:
        workers: that are there.
        run: how far the run is.
        refusals: since the registry runs; the same one once a minute.
        age_s: since when it runs.
        contributions: how often a member's was rejected or clipped, by identity and kind.
    """

    workers: tuple[MemberStatus, ...]
    run: Progress
    refusals: int
    age_s: float
    contributions: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict[str, Mapping[str, int]]
    )


class RegistryServer:
    """Answers workers until it is closed.

    Args:
        token: of the run.
        host: address to listen on.
        port: 0 takes any that is free.
        lighthouse_port: of torchft's lighthouse on this machine's loopback.
        heartbeat_timeout_s: without a heartbeat, after which a worker is gone.
        allow_fork: whether a round may begin from an older version than the run's.
        on_event: gets a line for each worker that joined, left or was refused, and why; called
            from any thread.

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
        allow_fork: bool = False,
        on_event: Callable[[str], None],
    ) -> None:
        self._registry = MemberRegistry(expiry_s=heartbeat_timeout_s, allow_fork=allow_fork)
        self._on_event = on_event
        self._opened_s = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/join"): _reading(self._join),
            ("POST", "/heartbeat"): _reading(self._heartbeat),
            ("POST", "/round"): _reading(self._round),
            ("POST", "/leave"): _reading(self._leave),
            ("POST", "/probe"): _reading(_probe),
            ("GET", "/peers"): lambda _: self._peers(),
            ("GET", "/description"): lambda _: self._describe(),
            ("GET", "/time"): lambda _: json_answer({"time": time.time()}),
            ("POST", "/discard"): lambda _: json_answer({}),
            ("GET", "/noise"): lambda _: HttpReply(body=os.urandom(_NOISE_NBYTES)),
        }
        self._server = RunServer(
            token,
            routes,
            host=host,
            port=port,
            on_refusal=self._report_refused,
            tunnels={**Relay().tunnels, "lighthouse": loopback_tunnel(lighthouse_port)},
        )
        self.port: int = self._server.port
        self._expiring = threading.Thread(target=self._expire, daemon=True)
        self._expiring.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._server.close()
        self._expiring.join()

    def status(self) -> RegistryStatus:
        """What the registry knows now."""
        with self._locked() as registry:
            return RegistryStatus(
                workers=tuple(registry.statuses()),
                run=registry.run.position,
                refusals=registry.refusals,
                contributions=registry.contributions.counts.describe(),
                age_s=time.monotonic() - self._opened_s,
            )

    @contextmanager
    def _locked(self) -> Generator[MemberRegistry]:
        with self._lock:
            self._registry.expire()
            yield self._registry
            lines = self._registry.take_log()
        # Unlocked: a terminal that does not take its lines must not stop the heartbeats.
        for line in lines:
            self._on_event(line)

    def _expire(self) -> None:
        while not self._closed.wait(self._registry.expiry_s / 5):
            with self._locked():
                pass

    def _report_refused(self, host: str, reason: str) -> None:
        with self._locked() as registry:
            registry.report(f"a connection from {host}: {reason}", (host, reason[:20]))

    def _join(self, request: dict[str, Any]) -> HttpReply:
        member = Member.read(request["member"])
        description = msgspec.convert(request["description"], dict[str, str])
        with self._locked() as registry:
            refusal = registry.join(member, description)
            peers, run = registry.others(member.identity), registry.run.position
        if refusal is None:
            return self._reply(peers, run)
        value = {"error": refusal.reason, "do": refusal.do, "retry_s": refusal.retry_s}
        return json_answer(value, status=refusal.status)

    def _heartbeat(self, request: dict[str, Any]) -> HttpReply:
        member = Member.read(request["member"])
        with self._locked() as registry:
            if not registry.heartbeat(member):
                return _unknown(member)
            # Beside the member: workers and registries of earlier versions do not know it.
            if "metrics" in request:
                registry.note_metrics(member.identity, request["metrics"])
            if "contributions" in request:
                registry.note_contributions(member.identity, request["contributions"])
            peers, run = registry.others(member.identity), registry.run.position
            refused = registry.take_refusals(member.identity)
        return self._reply(peers, run, refused=refused)

    def _round(self, request: dict[str, Any]) -> HttpReply:
        member = Member.read(request["member"])
        names = msgspec.convert(request["names"], list[str])
        with self._locked() as registry:
            if not registry.heartbeat(member):
                return _unknown(member)
            refusal = registry.begin_round(member, names)
        return json_answer({"refusal": None if refusal is None else asdict(refusal)})

    def _leave(self, request: dict[str, Any]) -> HttpReply:
        with self._locked() as registry:
            registry.leave(str(request["identity"]), str(request["nonce"]))
        return json_answer({})

    def _peers(self) -> HttpReply:
        status = self.status()
        return self._reply(
            [w.member for w in status.workers],
            status.run,
            metrics={w.member.identity: w.metrics.describe() for w in status.workers},
            heartbeat_age_s={w.member.identity: w.heartbeat_age_s for w in status.workers},
            contributions=status.contributions,
        )

    def _describe(self) -> HttpReply:
        # Apart from what heartbeats and watchers are told each second: it names every parameter.
        with self._locked() as registry:
            return json_answer({"description": dict(registry.run.description)})

    def _reply(self, peers: Sequence[Member], run: Progress, **more: Any) -> HttpReply:
        known = {
            "heartbeat_timeout_s": self._registry.expiry_s,
            "age_s": time.monotonic() - self._opened_s,
            "peers": [peer.describe() for peer in peers],
            "run": run.describe(),
        }
        return json_answer(known | more)


def _reading(answer: Callable[[dict[str, Any]], HttpReply]) -> Handler:
    def handle(body: bytes) -> HttpReply:
        try:
            return answer(read_as(dict[str, Any], body))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return json_answer({"error": f"this request cannot be read: {error!r}"}, status=400)

    return handle


def _unknown(member: Member) -> HttpReply:
    return json_answer({"error": f"{member.identity!r} is not in the run"}, status=410)


def _probe(request: dict[str, Any]) -> HttpReply:
    # An address and not a name: a look-up could take long, and no worker asks for one.
    host, port = str(ipaddress.ip_address(request["host"])), int(request["port"])
    if not 0 < port < 65536:
        raise ValueError(f"port {port}")
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError as error:
        return json_answer({"reached": False, "why": str(error) or type(error).__name__})
    return json_answer({"reached": True, "why": ""})


class RegistryReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry answers to joining, and to a heartbeat.

    Args:
        heartbeat_timeout_s: for how long a worker may be silent.
        peers: the other workers that are there.
        age_s: since when the registry runs; before one timeout, it may not know of all workers.
        run: how far the run is, as the registry knows it.
        metrics: what each worker measured, by identity; only for those that ask without taking
            part, like the next two.
        heartbeat_age_s: since each worker's last heartbeat, by identity.
        contributions: how often a member's was rejected or clipped, by identity and kind.
        refused: the refusals of others since the last heartbeat, a line each.
        rejoined: whether the registry had forgotten this worker, which then joined again.
    """

    heartbeat_timeout_s: float
    peers: tuple[Member, ...]
    age_s: float
    run: Progress = _NO_RUN
    metrics: Mapping[str, WorkerMetrics] = {}
    heartbeat_age_s: Mapping[str, float] = {}
    contributions: Mapping[str, Mapping[str, int]] = {}
    refused: tuple[str, ...] = ()
    rejoined: bool = False


class RegistryClient:
    """Connects a worker to the registry; `heartbeat` and `leave` may come from different threads.

    Args:
        token: of the run.
        address: HOST:PORT of the registry.
        identity: of this worker, its own in this run.
        description: what must be the same on all workers, one text per field.
        timeout_s: without a byte from the registry.
        nonce: of this process; default random.

    Attributes:
        finished: say in all later heartbeats that this worker has taken all its steps.
    """

    def __init__(
        self,
        token: Token,
        address: str,
        identity: str,
        description: Mapping[str, str],
        *,
        timeout_s: float = 5.0,
        nonce: str | None = None,
    ) -> None:
        split_address(address)
        self._dialer, self._registry, self._timeout_s = Dialer(token), address, timeout_s
        self.identity, self.nonce = identity, nonce or secrets.token_hex(8)
        self._description = dict(description)
        self._addresses: tuple[str, ...] = ()
        self._metrics = WorkerMetrics()
        self._contributions: tuple[tuple[int, str, str], ...] = ()
        self.finished = self._left = False

    def join(self, position: Progress, *addresses: str) -> RegistryReply:
        """Join the run; waits while the registry still counts an earlier process of this identity.

        Args:
            position: how far this worker has come.
            addresses: HOST:PORT of the healing servers of its ranks, as others reach them.

        Raises:
            ExchangeError: the registry cannot be reached.
            MismatchError: it refuses: another token or description, or the identity is taken.
        """
        self._addresses, self._left = addresses, False
        body = {"member": self._member(position).describe(), "description": self._description}
        first = response = self._post("/join", body)
        waited_s = 0.0
        while response.status == 409 and waited_s < first.json()["retry_s"] + _GRACE_S:
            time.sleep(_PAUSE_S)
            waited_s += _PAUSE_S
            response = self._post("/join", body)
        return _reply_of(self._checked(response))

    def report(self, metrics: WorkerMetrics) -> None:
        """Say in all later heartbeats what this worker measured."""
        self._metrics = metrics

    def note_contribution(self, step: int, member: str, kind: str) -> None:
        """Say in later heartbeats that a contribution was rejected or clipped.

        Args:
            step: the outer step.
            member: identity of the worker that sent it.
            kind: see `thinwire.contributions`.
        """
        # Said again and again: a heartbeat may be lost, and the registry counts each once.
        self._contributions = (*self._contributions, (step, member, kind))[-_MOST_TOLD:]

    def heartbeat(self, position: Progress, *, waiting_s: float = 0.0) -> RegistryReply:
        """Say that this worker is there; joins again if the registry has forgotten it.

        Args:
            position: how far this worker has come.
            waiting_s: for how long it has been waiting for others to begin a round.

        Raises:
            ExchangeError: the registry cannot be reached.
            MismatchError: it refuses.
        """
        member = self._member(position, waiting_s=waiting_s)
        body: dict[str, Any] = {"member": member.describe(), "metrics": self._metrics.describe()}
        if self._contributions:
            body["contributions"] = self._contributions
        response = self._post("/heartbeat", body)
        if response.status == 410 and self._left:
            # A heartbeat that was on its way while this worker left must not bring it back.
            return RegistryReply(heartbeat_timeout_s=0.0, peers=(), age_s=0.0)
        if response.status == 410:
            reply = self.join(position, *self._addresses)
            return msgspec.structs.replace(reply, rejoined=True)
        return _reply_of(self._checked(response))

    def begin_round(self, position: Progress, names: Sequence[str]) -> RoundRefusal | None:
        """Tell the registry that this worker begins a round; returns why it must not.

        Joins again if the registry has forgotten this worker.

        Args:
            position: that the round is begun from.
            names: of its workers.

        Raises:
            ExchangeError: the registry cannot be reached.
            MismatchError: it refuses this worker.
        """
        body = {"member": self._member(position).describe(), "names": list(names)}
        response = self._post("/round", body)
        if response.status == 410:
            self.join(position, *self._addresses)
            response = self._post("/round", body)
        refusal = self._checked(response)["refusal"]
        return None if refusal is None else RoundRefusal(**refusal)

    def leave(self) -> None:
        """Leave the run; a heartbeat that arrives later does not bring this worker back.

        Raises:
            ExchangeError: the registry cannot be reached; it will miss this worker by itself.
        """
        self._left = True
        self._post("/leave", {"identity": self.identity, "nonce": self.nonce})

    def _member(self, position: Progress, *, waiting_s: float = 0.0) -> Member:
        return Member(
            identity=self.identity,
            nonce=self.nonce,
            address=self._addresses[0],
            further=self._addresses[1:],
            position=position,
            finished=self.finished,
            waiting_s=waiting_s,
        )

    def _post(self, path: str, value: Mapping[str, Any]) -> HttpAnswer:
        return send_request(
            self._dialer,
            self._registry,
            path,
            value,
            timeout_s=self._timeout_s,
            accept=(200, 400, 403, 404, 409, 410),
        )

    def _checked(self, response: HttpAnswer) -> Any:
        data = response.json()
        if response.status != 200:
            kind = RefusedError if "retry_s" in data else MismatchError
            raise kind(
                f"take part as {self.identity!r} in the run at {self._registry}",
                because=str(data.get("error", response.status)),
                do=str(data.get("do", "give all of them the same token and version")),
            )
        return data


def ask_registry(token: Token, address: str, *, timeout_s: float = 5.0) -> RegistryReply:
    """What a registry knows of its run, without taking part: all workers are `peers`.

    Args:
        token: of the run.
        address: HOST:PORT of the registry.
        timeout_s: without a byte from it.

    Raises:
        ExchangeError: it does not answer. MismatchError: another token.
    """
    return _reply_of(send_request(Dialer(token), address, "/peers", timeout_s=timeout_s).json())


def _reply_of(data: Any) -> RegistryReply:
    reply = msgspec.convert(data, RegistryReply)
    known = ContributionCounts.read(reply.contributions).describe()
    return msgspec.structs.replace(reply, contributions=known)
