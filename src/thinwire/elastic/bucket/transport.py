"""Workers that come and go over an object store, as a transport that says who takes part."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, final

from thinwire.elastic.events import EventLog
from thinwire.elastic.options import ElasticOptions
from thinwire.elastic.quorum import identity_of
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ConfigurationError
from thinwire.membership import (
    Answer,
    Membership,
    Phase,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token
from thinwire.transport.base import (
    Announce,
    FinishedRound,
    Requests,
    Round,
    RoundTag,
    RunningExchange,
    Transport,
)
from thinwire.transport.bucket import check_run_name
from thinwire.transport.object_store import ObjectStore
from thinwire.version import __version__

if TYPE_CHECKING:
    from thinwire.elastic.bucket.session import BucketSession

__all__ = ["ElasticBucket"]

T = TypeVar("T")

_UNMEASURED_ROUND_S = 60.0  # a round is taken to last so long until one was measured
_FORMAT = "1"
_LONGEST_NAME = 200


@final
class ElasticBucket(Transport, Membership):
    """A worker that may come late, be lost, and come back, among others that share a store.

    No worker needs an address, and nothing but the store has to be there all the time. Who takes
    part is written down before each round, once, by whichever worker comes first; a message counts
    if it is there before the others have waited too long for it. So all workers that read the same
    objects conclude the same, and no other worker need be alive: one that was lost, or all of them
    at once, go on from what lies there.

    Args:
        url: s3://, gs:// or az:// of a bucket with a prefix, file:// of a folder that all workers
            see, or a store of obstore's. Keys and endpoints are taken from the environment.
        run: name, the same everywhere; no other run in that place may have it.
        token: what is written is sealed with it; default that of the environment variable
            THINWIRE_TOKEN, and without one the provider can read and change it.
        identity: this worker's own in the run, also after a restart; default random.
        options: how long it waits, and for how many.
        least_wait_s: no worker is taken for lost sooner, however short rounds are.
        snapshot_after: a snapshot of outer parameters and optimizer is written once the messages
            since the last one have so many times its bytes. With more, workers send less (a part of
            1/`snapshot_after` of their messages is snapshots), and a newcomer reads more.
        store_options: of the store, in place of environment variables.

    Raises:
        ConfigurationError: a name that cannot be, obstore is missing, or the URL is unknown.

    >>> ElasticBucket("memory://", run="first", identity="a").is_fixed
    False
    """

    def __init__(
        self,
        url: Any,
        *,
        run: str,
        token: Token | str | None = None,
        identity: str | None = None,
        options: ElasticOptions | None = None,
        least_wait_s: float = 10.0,
        snapshot_after: float = 4.0,
        store_options: Mapping[str, str] | None = None,
    ) -> None:
        check_run_name(run)
        for given, value in {
            "least_wait_s": least_wait_s,
            "snapshot_after": snapshot_after,
        }.items():
            if not value > 0:
                raise ConfigurationError(
                    f"join a run with {given}={value}",
                    because="it must be above 0",
                    do=f"pass {given} > 0",
                )
        if token is None and os.environ.get(TOKEN_VARIABLE):
            token = find_token()
        self.identity = _checked(identity or f"worker-{secrets.token_hex(4)}")
        self.events = EventLog()
        self.url, self.run_name = url, run
        self._token = Token(token) if isinstance(token, str) else token
        self._store = ObjectStore(url, store_options)
        self._options = options or ElasticOptions()
        self._timeouts = Timeouts(
            floor_s=least_wait_s,
            patience=self._options.patience,
            unmeasured_s=max(_UNMEASURED_ROUND_S, least_wait_s),
            fixed_s=self._options.timeout_s,
        )
        self._description = {"thinwire": __version__, "objects": _FORMAT}
        self._snapshot_after = snapshot_after
        self._session: BucketSession | None = None
        self._asked_to_leave: Callable[[], bool] = lambda: False
        from thinwire.elastic.bucket.run_objects import RunObjects

        self._objects = RunObjects(self._store, run, self._token)

    # -- the transport -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among those of the round."""
        return 0 if self._session is None else self._session.rank

    @property
    def world_size(self) -> int:
        """The workers of the round."""
        return 1 if self._session is None else len(self._session.names)

    @property
    def ranks(self) -> int:
        """The ranks of this worker: one."""
        return 1

    @property
    def added_nbytes(self) -> int:
        """What sealing adds; nothing without a token."""
        return self._objects.sealed.added_nbytes

    @property
    def gives_all_the_same(self) -> bool:
        """True: all workers read the same objects."""
        return True

    @property
    def service_requests(self) -> Mapping[str, int]:
        """What the store was asked for since this was built."""
        return asdict(self._store.requests)

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Run it among the workers of the round; what stops it discards the round."""
        if self._session is not None and self._session.group is not None:
            return self._session.group.run(requests, tag)
        # Before it joins: descriptions add up, and are compared with the run's.
        running = RunningExchange(requests)
        while isinstance(running.request, Announce):
            self._description |= json.loads(running.request.payload)
            running.answer({0: running.request.payload})
        if running.travels:
            raise ConfigurationError(
                f"exchange {tag}",
                because="this worker has not joined the others",
                do="call join() first, or use the transport through OuterLoop, which does",
            )
        return FinishedRound(running)

    def close(self) -> None:
        """`leave`."""
        self.leave()

    # -- the membership ----------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """False: workers come and go."""
        return False

    def join(self, state: SharedState) -> None:
        """See that the store can be used, and that this worker runs what the others do.

        Raises:
            ExchangeError: the store cannot be used. MismatchError: this worker runs something else.
        """
        if self._session is not None:
            return  # it joined before, and the first round failed
        # Here, because it brings along what a description of the worker does not need.
        from thinwire.elastic.bucket.session import BucketSession

        # In the order of their starts, by this machine's clock, and no two alike.
        process = f"{time.time_ns() // 10**6:012x}{secrets.token_hex(2)}"
        session = BucketSession(
            self._objects,
            f"{self.identity}:{process}",
            self._options,
            self._timeouts,
            state=state,
            events=self.events,
            asked_to_leave=lambda: self._asked_to_leave(),
            snapshot_after=self._snapshot_after,
        )
        try:
            session.join(self._description)
        except BaseException:
            session.close()
            raise
        self._session = session

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Have waits for the others end with `RunStopped` once asked to.

        Args:
            asked: says so; called about once a second while waiting.
        """
        self._asked_to_leave = asked

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Meet the others, and catch up with them if this worker is behind."""
        return self._open_session().begin_round(phase)

    def may_end(self) -> bool:
        """Whether the run ended where this worker is, as far as it knows."""
        return self._session is None or self._session.may_end

    def member(self, rank: int) -> str:
        """The identity of worker `rank` of the round."""
        return identity_of(self._open_session().names[rank])

    def log_round(self, record: RoundRecord) -> None:
        """Note by which messages the run came to its version."""
        self._open_session().log_round(record)

    def report(self, metrics: WorkerMetrics) -> None:
        """Say it before the next round, once this worker has joined."""
        if self._session is not None:
            self._session.report(metrics)

    def leave(self) -> None:
        """Leave the run; what was written stays for the others."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _open_session(self) -> BucketSession:
        if self._session is None:
            raise ConfigurationError(
                "begin a round with the others",
                because="this worker has not joined them",
                do="call join() first, or use the transport through OuterLoop, which does",
            )
        return self._session


def _checked(identity: str) -> str:
    if not identity.isprintable() or len(identity) > _LONGEST_NAME:
        raise ConfigurationError(
            f"call a worker {identity[:50]!r}",
            because="its name is part of the names of objects",
            do=f"pass up to {_LONGEST_NAME} printable characters",
        )
    return identity
