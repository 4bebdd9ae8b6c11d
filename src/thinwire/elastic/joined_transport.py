"""A transport whose workers join: what does not depend on how they then find each other."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Protocol, TypeVar

from thinwire.elastic.events import EventLog
from thinwire.elastic.quorum import identity_of
from thinwire.errors import ConfigurationError
from thinwire.membership import Answer, Membership, Phase, RoundRecord, SharedState, WorkerMetrics
from thinwire.transport import Posts, Round, RoundTag, Transport
from thinwire.version import __version__

T = TypeVar("T")


class Session(Protocol):
    """What a worker keeps open from joining to leaving.

    Attributes:
        names: of the workers of the round, in rank order.
        rank: of this worker among them.
    """

    names: tuple[str, ...]
    rank: int

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange among the workers of the round."""
        ...

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """What to do before a round."""
        ...

    def log_round(self, record: RoundRecord) -> None:
        """Keep a round that counted."""
        ...

    def report(self, metrics: WorkerMetrics) -> None:
        """Say what this worker measured."""
        ...

    def close(self) -> None:
        """Leave the run."""
        ...


class JoinedTransport(Transport, Membership):
    """Workers that come and go: each opens a session with the others when it joins.

    Args:
        identity: this worker's own in the run, also after a restart; default random.
        description: what must be the same on all workers, besides what they announce.
    """

    def __init__(self, identity: str | None, **description: str) -> None:
        self.identity = identity or f"worker-{secrets.token_hex(4)}"
        self.events = EventLog()
        self._description = {"thinwire": __version__, **description}
        self._session: Session | None = None
        self._asked_to_leave: Callable[[], bool] = lambda: False

    @abstractmethod
    def _open(self, state: SharedState) -> Session:
        """A session with the others, opened."""

    # -- the transport -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among those of the round."""
        return 0 if self._session is None else self._session.rank

    @property
    def world_size(self) -> int:
        """The workers of the round."""
        return 1 if self._session is None else len(self._session.names)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Run it among the workers of the round; what stops it discards the round."""
        return self._joined().run(posts, tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Add to this worker's description, which is compared with the run's when it joins."""
        del tag
        self._description |= json.loads(card)
        return {0: card}

    def close(self) -> None:
        """`leave`."""
        self.leave()

    # -- the membership ----------------------------------------------------------------------------

    is_fixed = False

    def join(self, state: SharedState) -> None:
        """Open a session with the others; once.

        Raises:
            ExchangeError: what they meet at cannot be reached for too long.
            MismatchError: this worker runs something else, or its identity is taken.
        """
        # Else it joined before, and the first round failed.
        if self._session is None:
            self._session = self._open(state)

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Have waits for the others, and for what they meet at, end with `RunStopped` once asked.

        Args:
            asked: says so; called about once a second while waiting, or more often.
        """
        self._asked_to_leave = asked

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Meet the others, and catch up with them if this worker is behind."""
        return self._joined().begin_round(phase)

    def member(self, rank: int) -> str:
        """The identity of worker `rank` of the round."""
        return identity_of(self._joined().names[rank])

    def log_round(self, record: RoundRecord) -> None:
        """Keep the round for workers that missed it."""
        self._joined().log_round(record)

    def report(self, metrics: WorkerMetrics) -> None:
        """Have the others know it, once this worker has joined."""
        if self._session is not None:
            self._session.report(metrics)

    def leave(self) -> None:
        """Leave the run."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _joined(self) -> Session:
        if self._session is None:
            raise ConfigurationError(
                "exchange anything with the others",
                because="this worker has not joined them",
                do="call join() first, or use the transport through OuterLoop, which does",
            )
        return self._session
