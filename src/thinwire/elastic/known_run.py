"""What the registry knows of a run for as long as the lighthouse runs, and what carries the run on.

A run is one sequence of outer steps. A worker that was stopped or cut off for a long time still has
an older version of it, and from there it would make a second run. So every round is begun at the
registry, by each of its workers, and the rule is:

    The version that the registry knows may go on, however few workers have it.
    An older one may not, unless a majority of the last round's workers have nothing newer
    (all of them start again from checkpoints), the run is not over, and it is not version 0.

No network here, and no clock: `registry.py` asks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from thinwire.elastic.quorum import identity_of
from thinwire.membership import Progress

_FORK = (
    "to train on from this worker's state all the same, start the lighthouse anew, "
    "with thinwire lighthouse --allow-fork"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRefusal:
    """Why a round does not carry the run on.

    Args:
        reason: for the worker.
        do: what can be done about it.
        is_final: whether waiting does not help.
    """

    reason: str
    do: str
    is_final: bool = False


class KnownRun:
    """The run that workers have told of; it stays when the last of them has left.

    Args:
        allow_fork: whether any version may go on.

    Attributes:
        description: of its model, method and versions.
        position: the highest version that a worker said, with its digest once that is known, all
            shares that were dealt, and whether the run is over.
        team: identities of the workers of the last round that was begun.

    >>> run = KnownRun()
    >>> run.learn(Progress(version=7, step=70, digest="ab", over=True))
    >>> older = Progress(version=3, step=30, digest="cd")
    >>> run.begin_round(older, ["c:1"], there=["c"]).reason
    'the run is over: version 7, digest ab'
    """

    def __init__(self, *, allow_fork: bool = False) -> None:
        self._allow_fork = allow_fork
        self.description: Mapping[str, str] = {}
        self.position = Progress(version=0, step=0, digest="")
        self.team: frozenset[str] = frozenset()
        self._begun: tuple[frozenset[str], int, int] | None = None

    def learn(self, position: Progress) -> None:
        """Note how far a worker says that it has come."""
        known, dealt = self.position, max(self.position.dealt, position.dealt)
        is_more = (position.version, position.digest != "") > (known.version, known.digest != "")
        # Inner steps, too, are those at which it ended: others may have fewer at this version.
        is_its_end = position.over and _same(position, known)
        self.position = replace(position if is_more or is_its_end else known, dealt=dealt)

    def begin_round(
        self, position: Progress, names: Collection[str], *, there: Collection[str]
    ) -> RoundRefusal | None:
        """Note that a round is begun, or say why it must not; each of its workers asks.

        Args:
            position: that it is begun from; the shares from `position.dealt` on are its workers'.
            names: of its workers.
            there: identities of those of them that the registry sees and that have nothing newer.
        """
        round = (frozenset(names), position.version, position.dealt)
        if round == self._begun:
            return None  # another of its workers asked before
        if not self._may_go_on(position, there):
            return self._refusal(position)
        if position.dealt < self.position.dealt:
            return RoundRefusal(
                reason=f"data shares up to {self.position.dealt} were dealt meanwhile",
                do="nothing: the round is begun again",
            )
        self._begun, self.team = round, frozenset(map(identity_of, names))
        self.position = replace(position, dealt=position.dealt + len(names), over=False)
        return None

    def _may_go_on(self, position: Progress, there: Collection[str]) -> bool:
        known = self.position
        has_it = position.version > known.version or _same(position, known)
        # At the beginning of a run no worker has anything to lose.
        if has_it or known.version == 0 or self._allow_fork:
            return True
        is_majority = 2 * len(self.team.intersection(there)) > len(self.team)
        return is_majority and not known.over and position.version > 0

    def _refusal(self, position: Progress) -> RoundRefusal:
        known, had_it = self.position, " ".join(sorted(self.team)) or "other workers"
        run = f"version {known.version}, digest {known.digest}"
        if known.over:
            return RoundRefusal(
                reason=f"the run is over: {run}",
                do=f"take the model that {had_it} wrote; for another run start another lighthouse; "
                f"{_FORK}",
                is_final=True,
            )
        return RoundRefusal(
            reason=f"the run is at {run}, this worker has version {position.version}, digest "
            f"{position.digest}, and no worker that has that of the run is there",
            do=f"start these again, with --resume: {had_it}; {_FORK}",
        )


def _same(a: Progress, b: Progress) -> bool:
    # A worker of several ranks knows no digest of the version that it has just reached.
    return a.version == b.version and (a.digest == b.digest or "" in (a.digest, b.digest))
