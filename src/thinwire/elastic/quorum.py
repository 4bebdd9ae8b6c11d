"""Who takes part in a round: what every worker says of itself, and what all conclude from it."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec

from thinwire.membership import Phase, Progress
from thinwire.security.token import Token
from thinwire.transport.address import split_address

JOIN, ROUND, LAST = (phase.value for phase in (Phase.JOIN, Phase.ROUND, Phase.LAST))
_LONGEST_TEXT = 200
T = TypeVar("T")


def read_as(kind: type[T], text: str | bytes) -> T:
    """JSON as a typed message.

    Raises:
        ValueError: it is something else.

    >>> read_as(list[int], "[1, 2]")
    [1, 2]
    """
    try:
        # Not `msgspec.json.decode`: earlier versions wrote NaN, which that refuses.
        return msgspec.convert(json.loads(text), kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class Member(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One worker as the others know it, from its heartbeats and when a round begins.

    The fields from `description` on are said only when a round begins.

    Args:
        identity: its name in the run, the same after a restart.
        nonce: of its process; a restarted worker has another one.
        address: HOST:PORT of its healing server, or that of its first rank.
        further: HOST:PORT of the healing servers of its other ranks, in rank order.
        position: how far it has come.
        finished: whether it has taken all its steps.
        waiting_s: for how long it has been waiting for others to begin a round, beyond what it
            allows them.
        description: digest of what must be the same on all workers.
        phase: "join", "round" or "last".
        generation: number of process groups lost so far; part of the next group's key, so that a
            broken group is never used again.
        oldest: version from which it can bring others up to its own by replaying rounds.
        group: key of the group that it has; "" without one that can be used.
        awaits: names of members without which it begins no round.
        rounds: number of rounds that its process has begun.
        unreachable: names of members that it does not reach.
        known: digest that the registry knows of the run at this worker's version; "" if it knows
            of another version.
        caught_up: whether it took its present version over from another worker.

    >>> token = Token("a secret of many characters")
    >>> start = Progress(version=0, step=0, digest="")
    >>> mine = Member(identity="a", nonce="1", address="h:1", position=start, phase="join")
    >>> Member.verified(mine.signed(token), token) == mine
    True
    >>> Member.verified(mine.signed(Token("another secret, also long")), token) is None
    True
    """

    identity: str
    nonce: str
    address: str
    position: Progress
    finished: bool = False
    waiting_s: float = 0.0
    description: str = ""
    phase: str = ROUND
    generation: int = 0
    oldest: int = 0
    group: str = ""
    awaits: tuple[str, ...] = ()
    rounds: int = 0
    unreachable: tuple[str, ...] = ()
    known: str = ""
    further: tuple[str, ...] = ()
    caught_up: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of the healing servers of its ranks."""
        return self.address, *self.further

    @property
    def name(self) -> str:
        """Identity and nonce: names this process in a group."""
        return f"{self.identity}:{self.nonce}"

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON-able data, without those that have their defaults."""
        return msgspec.to_builtins(self)

    @classmethod
    def read(cls, data: Any) -> Self:
        """From what `describe` returned elsewhere.

        Raises:
            ValueError: a field has another form; `KeyError` or `TypeError` if one is missing.
        """
        member = msgspec.convert(data, cls)
        Progress.read(data["position"])  # which has no default for `dealt`
        for text in (member.identity, member.nonce, member.address):
            if not 0 < len(text) <= _LONGEST_TEXT or not text.isprintable():
                raise ValueError(f"not a printable text of 1 to {_LONGEST_TEXT} characters")
        for address in member.addresses:
            split_address(address)
        return member

    def signed(self, token: Token) -> dict[str, str]:
        """Return signed data for a request for a quorum: the lighthouse passes it on unchecked."""
        text = json.dumps(self.describe(), sort_keys=True)
        return {"member": text, "signature": token.sign("member", text)}

    @classmethod
    def verified(cls, data: Any, token: Token) -> Self | None:
        """From what `signed` returned elsewhere; None if made without the token or unreadable."""
        try:
            text, signature = str(data["member"]), str(data["signature"])
            return cls.read(json.loads(text)) if token.signed(signature, "member", text) else None
        except (KeyError, TypeError, ValueError, RecursionError):  # the last: nested too deeply
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum:
    """The workers of a round, and what the round is.

    Args:
        members: in the order of their names, which is that of ranks.
        leader: the member that the others get the state of the run from.
        behind: workers that must be healed before they can take part.
        refused: workers with another description.
        cut_off: workers that have to leave, so that all others reach each other.
        phase: that of the members with something to contribute; "join" if none has.
        position: of the run.
    """

    members: tuple[Member, ...]
    leader: Member
    behind: tuple[Member, ...]
    refused: tuple[Member, ...]
    cut_off: tuple[Member, ...]
    phase: str
    position: Progress

    @property
    def key(self) -> str:
        """Key of the members' group: the one that all have and no other has, or else a new one.

        A worker that was away still has a group that the others have left.
        """
        groups = {member.group for member in self.members}
        names = _short_digest([member.name for member in self.members])
        if len(groups) == 1 and (group := groups.pop()).startswith(names):
            return group
        return names + _short_digest([f"{m.generation} {m.group}" for m in self.members])

    @property
    def has_only_caught_up(self) -> bool:
        """Whether no member came to the position by rounds of its own, or from a checkpoint."""
        version = self.position.version
        return all(m.caught_up for m in self.members if m.position.version == version)


def elect(workers: Sequence[Member]) -> Quorum:
    """The quorum that every worker concludes from the same `workers`, in any order.

    The state that has come furthest is that of the run; among states that came equally far, the
    one that most workers have, and of two that equally many have the one that the registry knows.
    A worker that is behind takes part if the leader can replay the rounds that it missed.
    """
    cut_off = _cut_off(sorted(workers, key=lambda w: w.name))
    everyone = sorted((w for w in workers if w not in cut_off), key=lambda w: w.name)
    furthest = max(w.position.version for w in everyone)
    ahead = [w for w in everyone if w.position.version == furthest]
    counts = Counter((w.description, w.position.digest) for w in ahead)
    known = {w.known for w in ahead}
    # Of equally many those that the registry knows, or else those of the first.
    description, digest = max(counts, key=lambda kind: (counts[kind], kind[1] in known))
    refused = tuple(w for w in everyone if w.description != description)
    fit = [w for w in everyone if w.description == description]
    leaders = [w for w in fit if (w.position.version, w.position.digest) == (furthest, digest)]
    leader = min(leaders, key=lambda w: w.oldest)
    members = [w for w in fit if w in leaders or leader.oldest <= w.position.version < furthest]
    phase, concerned = phase_of(members)
    return Quorum(
        members=tuple(members),
        leader=leader,
        behind=tuple(w for w in fit if w not in members),
        refused=refused,
        cut_off=cut_off,
        phase=phase,
        position=Progress(
            version=furthest,
            digest=digest,
            step=max(w.position.step for w in concerned),
            # Workers that must be healed were dealt data shares, too.
            dealt=max(w.position.dealt for w in fit),
        ),
    )


def identity_of(name: str) -> str:
    """The identity in a member's name.

    >>> identity_of("a:b:1")
    'a:b'
    """
    return name.rpartition(":")[0]


def identities_of(names: Iterable[str]) -> tuple[str, ...]:
    """The identities in members' names, sorted."""
    return tuple(sorted(map(identity_of, names)))


def _cut_off(workers: Sequence[Member]) -> tuple[Member, ...]:
    """Of each two that do not reach each other one: that lacks most, or else would lose least."""
    here = {w.name for w in workers}
    pairs = {frozenset((w.name, other)) for w in workers for other in here & {*w.unreachable}}
    out: list[Member] = []
    while pairs:
        lacking = Counter(name for pair in pairs for name in pair)
        in_pairs = (w for w in workers if w.name in lacking)
        out.append(
            max(in_pairs, key=lambda w: (lacking[w.name], -w.position.version, -w.rounds, w.name))
        )
        pairs = {pair for pair in pairs if out[-1].name not in pair}
    return tuple(out)


def _short_digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def phase_of(members: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """The phase of a round, and those of `members` that it is the phase of."""
    for phase in (LAST, ROUND):
        if concerned := [member for member in members if member.phase == phase]:
            return phase, concerned
    return JOIN, members
