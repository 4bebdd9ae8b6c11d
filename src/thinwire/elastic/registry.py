"""Who is in the run: whom the door lets in, who is still there, and what it tells of it.

No network here: `door.py` carries requests to this and answers back.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

from thinwire.elastic.address import split_address
from thinwire.elastic.shared_state import Progress
from thinwire.handshake import first_difference

__all__ = ["JoinRefusal", "MemberRegistry", "Peer"]

_LONGEST = 200
_UNTOLD = 20
# A worker that is refused asks again and again; the others hear of it once in this time.
_TOLD_S = 60.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A worker as the others see it.

    Args:
        identity: its name in this run.
        nonce: of its process; a restarted worker has another one.
        address: HOST:PORT of its healing server.
        position: where it stood at its last beat.
        finished: whether it has taken all its steps.
        waiting_s: for how long it had been waiting then, longer than it is ready to, for others to
            begin a round.
    """

    identity: str
    nonce: str
    address: str
    position: Progress
    finished: bool = False
    waiting_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "identity": self.identity,
            "nonce": self.nonce,
            "address": self.address,
            "position": self.position.describe(),
            "finished": self.finished,
            "waiting_s": self.waiting_s,
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """From what `describe` returned elsewhere.

        Raises:
            ValueError: a field has another form; `KeyError` or `TypeError` if it is missing.
        """
        address = _text(data, "address")
        split_address(address)
        return cls(
            identity=_text(data, "identity"),
            nonce=_text(data, "nonce"),
            address=address,
            position=Progress.read(data["position"]),
            finished=bool(data.get("finished", False)),
            waiting_s=float(data.get("waiting_s", 0.0)),
        )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or not value.isprintable():
        raise ValueError(f"{name} is not a printable text of 1 to {_LONGEST} characters")
    return value


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRefusal:
    """Why a worker may not take part.

    Args:
        status: of HTTP; 409 passes once the other one is gone.
        reason: for the worker.
        told: the same for everybody else.
        do: what the worker can do about it.
        retry_s: after how long it is worth asking again.
    """

    status: int
    reason: str
    told: str
    do: str
    retry_s: float = 0.0


@final
@dataclass  # state: it is heard of again and again
class _MemberEntry:
    peer: Peer
    card: Mapping[str, str]
    heard_s: float
    untold: deque[str] = field(default_factory=lambda: deque(maxlen=_UNTOLD))


@final
class MemberRegistry:
    """The workers that are there, by identity; not safe from several threads.

    The card of those who are there is the run's. It is forgotten with the last of them. Whoever
    brings a state that has taken outer steps displaces those who all stand at the beginning: after
    a restart of the door, the first to come may be the wrong one.

    Args:
        expiry_s: without a beat, after which a worker is gone.
        clock: seconds, of any origin.
    """

    def __init__(self, *, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.expiry_s = expiry_s
        self._clock = clock
        self._members: dict[str, _MemberEntry] = {}
        self._told: dict[tuple[str, ...], float] = {}
        self._news: list[str] = []

    def join(self, peer: Peer, card: Mapping[str, str]) -> JoinRefusal | None:
        """Let `peer` in, or say why not.

        Args:
            peer: the worker.
            card: what it says of model, method and versions.
        """
        others = [m for name, m in self._members.items() if name != peer.identity]
        differing = [m for m in others if dict(m.card) != dict(card)]
        displaced = peer.position.version > 0 and all(
            m.peer.position.version == 0 for m in differing
        )
        if differing and not displaced:
            return self._refuse(peer, _of_another_run(card, differing[0].card, self.expiry_s))
        holder = self._members.get(peer.identity)
        if holder is not None and holder.peer.nonce != peer.nonce:
            return self._refuse(peer, self._taken(holder))
        for member in differing:
            self._displace(member, peer, card)
        if holder is None:
            self._news.append(f"{peer.identity} came from {peer.address}{_standing(peer)}")
        self._members[peer.identity] = _MemberEntry(peer, card, self._clock())
        return None

    def beat(self, identity: str, nonce: str, **changes: Any) -> Peer | None:
        """Note that a worker is there, with `changes` of its fields; None if it is not known."""
        member = self._find(identity, nonce)
        if member is None:
            return None
        was = member.peer
        member.peer, member.heard_s = replace(was, **changes), self._clock()
        if member.peer.finished and not was.finished:
            self._news.append(f"{identity} has finished{_standing(member.peer)}")
        return member.peer

    def leave(self, identity: str, nonce: str) -> None:
        """Forget a worker, if it is there."""
        member = self._find(identity, nonce)
        if member is not None:
            del self._members[identity]
            self._news.append(f"{identity} left{_standing(member.peer)}")

    def expire(self) -> None:
        """Forget those who have not been heard for too long."""
        now_s = self._clock()
        for identity, member in list(self._members.items()):
            if now_s - member.heard_s > self.expiry_s:
                del self._members[identity]
                self._news.append(
                    f"{identity} is gone{_standing(member.peer)}: "
                    f"not heard for {now_s - member.heard_s:.1f} s"
                )
        self._told = {who: s for who, s in self._told.items() if now_s - s < _TOLD_S}

    def others(self, identity: str = "") -> list[Peer]:
        """Everybody there but `identity`."""
        return [m.peer for name, m in self._members.items() if name != identity]

    def take_untold(self, identity: str) -> list[str]:
        """Who was refused since the last call for this member, and why."""
        member = self._members[identity]
        untold = list(member.untold)
        member.untold.clear()
        return untold

    def take_news(self) -> list[str]:
        """What happened since the last call, a line each."""
        news, self._news = self._news, []
        return news

    def tell(self, line: str, key: Iterable[str]) -> None:
        """Tell the lighthouse and all members of a refusal, unless they just heard of `key`."""
        if self._told.setdefault(tuple(key), now_s := self._clock()) != now_s:
            return
        self._news.append(f"refused {line}")
        for member in self._members.values():
            member.untold.append(line)

    def _find(self, identity: str, nonce: str) -> _MemberEntry | None:
        member = self._members.get(identity)
        return member if member is not None and member.peer.nonce == nonce else None

    def _refuse(self, peer: Peer, refusal: JoinRefusal) -> JoinRefusal:
        line = f"{peer.identity!r} at {peer.address}: {refusal.told}"
        self.tell(line, (peer.identity, peer.nonce, str(refusal.status)))
        return refusal

    def _taken(self, holder: _MemberEntry) -> JoinRefusal:
        silent_s = self._clock() - holder.heard_s
        reason = (
            f"identity {holder.peer.identity!r} is taken by a worker at {holder.peer.address}, "
            f"last heard {silent_s:.1f} s ago"
        )
        return JoinRefusal(
            status=409,
            reason=reason,
            told=reason,
            do="give every worker an identity of its own",
            retry_s=max(0.0, self.expiry_s - silent_s),
        )

    def _displace(self, member: _MemberEntry, by: Peer, card: Mapping[str, str]) -> None:
        del self._members[member.peer.identity]
        refusal = _of_another_run(member.card, card, self.expiry_s)
        because = f"{refusal.told}, as {by.identity!r} brings it{_standing(by)}"
        self.tell(
            f"{member.peer.identity!r} at {member.peer.address}: {because}",
            (member.peer.identity, member.peer.nonce, "displaced"),
        )


def _of_another_run(
    card: Mapping[str, str], runs: Mapping[str, str], expiry_s: float
) -> JoinRefusal:
    field_ = str(first_difference(card, runs))
    theirs, ours = card.get(field_, "none"), runs.get(field_, "none")
    return JoinRefusal(
        status=403,
        reason=f"{field_} is {theirs} here and {ours} in the run",
        told=f"{field_} is {theirs} there and {ours} in the run",
        do="start all workers from the same script, arguments and thinwire version; "
        f"if the earlier run is over, its workers are forgotten after {expiry_s:g} s",
    )


def _standing(peer: Peer) -> str:
    return f" (version {peer.position.version}, step {peer.position.step})"
