"""Who makes up a round: what every worker says of itself, and what all conclude from it alike."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from thinwire.elastic.shared_state import Progress
from thinwire.elastic.token import Token

__all__ = ["Member", "Quorum", "elect"]

ENTER, ROUND, LAST = "enter", "round", "last"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What a worker says of itself when workers convene.

    Args:
        identity: its own in the run, over restarts.
        nonce: of this process.
        card: digest of what must be the same on all workers.
        address: HOST:PORT of its healing server.
        store: HOST:PORT of the store at which a group can meet.
        position: where it stands.
        occasion: "enter", "round" or "last".
        generation: how many groups it has lost; a group is not formed again with its ruins.
        oldest: version from which it can bring others up to its own by records.
        group: key of the team whose group it has; "" without one that can be used.
        awaits: names of those without whom it begins no round.

    >>> token = Token("a secret of many characters")
    >>> start = Progress(version=0, step=0, digest="")
    >>> mine = Member(identity="a", nonce="1", card="c", address="h:1", store="h:2",
    ...     position=start, occasion="enter", generation=0, oldest=0)
    >>> Member.read(mine.signed(token), token) == mine
    True
    >>> Member.read(mine.signed(Token("another secret, also long")), token) is None
    True
    """

    identity: str
    nonce: str
    card: str
    address: str
    store: str
    position: Progress
    occasion: str
    generation: int
    oldest: int
    group: str = ""
    awaits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """By which this process is known in a group."""
        return f"{self.identity}:{self.nonce}"

    def signed(self, token: Token) -> dict[str, str]:
        """As data that travels with a request for a quorum, which anybody could make."""
        text = json.dumps(asdict(self), sort_keys=True)
        return {"standing": text, "signature": token.sign("standing", text)}

    @classmethod
    def read(cls, data: Any, token: Token) -> Self | None:
        """From what `signed` returned; None if somebody without the token made it."""
        try:
            text, signature = str(data["standing"]), str(data["signature"])
            if not token.signed(signature, "standing", text):
                return None
            fields: dict[str, Any] = json.loads(text)
            position = Progress.read(fields.pop("position"))
            return cls(position=position, awaits=tuple(fields.pop("awaits")), **fields)
        except (KeyError, TypeError, ValueError):
            return None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum:
    """Who takes part in a round.

    Args:
        members: in the order of their names, which is that of ranks.
        leader: from whom the others can have the state of the run.
        behind: who must be healed before it can take part.
        refused: whose card is another one.
        occasion: why those with something to contribute are here; "enter" if there are none.
        position: of the run.
    """

    members: tuple[Member, ...]
    leader: Member
    behind: tuple[Member, ...]
    refused: tuple[Member, ...]
    occasion: str
    position: Progress

    @property
    def key(self) -> str:
        """That of the group that all members have, as long as they are all of it; else a new one.

        A worker that was away still has a group that the others have left.
        """
        groups = {member.group for member in self.members}
        names = _digest([member.name for member in self.members])
        if len(groups) == 1 and (group := groups.pop()).startswith(names):
            return group
        return names + _digest([f"{m.generation} {m.group}" for m in self.members])

    def what_differs(self, member: Member) -> str:
        """Between where `member` stands and where the team does, for people."""
        behind = self.position.version - member.position.version
        return f"{behind} outer steps behind" if behind else "its outer parameters were others"


def elect(standings: Iterable[Member]) -> Quorum:
    """The team that all of `standings` conclude.

    The state that has come furthest is that of the run; among those that came equally far, the one
    most workers have. Who is behind by rounds that the leader can replay to it takes part.
    """
    everyone = sorted(standings, key=lambda s: s.name)
    furthest = max(s.position.version for s in everyone)
    ahead = [s for s in everyone if s.position.version == furthest]
    card, digest = _most(ahead)
    refused = tuple(s for s in everyone if s.card != card)
    fit = [s for s in everyone if s.card == card]
    leaders = [s for s in fit if (s.position.version, s.position.digest) == (furthest, digest)]
    leader = min(leaders, key=lambda s: s.oldest)
    members = [s for s in fit if s in leaders or leader.oldest <= s.position.version < furthest]
    occasion, concerned = _occasion(members)
    return Quorum(
        members=tuple(members),
        leader=leader,
        behind=tuple(s for s in fit if s not in members),
        refused=refused,
        occasion=occasion,
        position=Progress(
            version=furthest,
            digest=digest,
            step=max(s.position.step for s in concerned),
            # Those who must be healed were dealt theirs, too.
            dealt=max(s.position.dealt for s in fit),
        ),
    )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _most(ahead: Sequence[Member]) -> tuple[str, str]:
    """Card and digest of most; of equally many, those of the first."""
    counts: Mapping[tuple[str, str], int] = Counter((s.card, s.position.digest) for s in ahead)
    return max(counts, key=lambda kind: counts[kind])


def _occasion(members: Sequence[Member]) -> tuple[str, Sequence[Member]]:
    """The occasion, and those it is one for."""
    for occasion in (LAST, ROUND):
        concerned = [s for s in members if s.occasion == occasion]
        if concerned:
            return occasion, concerned
    return ENTER, members
