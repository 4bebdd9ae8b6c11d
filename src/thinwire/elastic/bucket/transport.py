"""Workers that come and go over an object store, as a transport that says who takes part."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from thinwire.elastic.joined_transport import JoinedTransport, Session
from thinwire.elastic.timeouts import ElasticOptions, Timeouts, check_positive
from thinwire.errors import check
from thinwire.membership import SharedState
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token
from thinwire.transport.bucket import check_run_name
from thinwire.transport.object_store import ObjectStore

_UNMEASURED_ROUND_S = 60.0  # a round is taken to last so long until one was measured
_FORMAT = "1"
_LONGEST_NAME = 200


class ElasticBucket(JoinedTransport):
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
        check_positive("join a run", "least_wait_s", least_wait_s)
        check_positive("join a run", "snapshot_after", snapshot_after)
        if token is None and os.environ.get(TOKEN_VARIABLE):
            token = find_token()
        super().__init__(identity, objects=_FORMAT)
        check(
            self.identity.isprintable() and len(self.identity) <= _LONGEST_NAME,
            f"call a worker {self.identity[:50]!r}",
            because="its name is part of the names of objects",
            do=f"pass up to {_LONGEST_NAME} printable characters",
        )
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
        self._snapshot_after = snapshot_after
        from thinwire.elastic.bucket.run_objects import RunObjects

        self._objects = RunObjects(self._store, run, self._token)

    ranks = 1

    @property
    def added_nbytes(self) -> int:
        """What sealing adds; nothing without a token."""
        return self._objects.sealed.added_nbytes

    gives_all_the_same = True

    @property
    def service_requests(self) -> Mapping[str, int]:
        """What the store was asked for since this was built."""
        return asdict(self._store.requests)

    def may_end(self) -> bool:
        """Whether the run ended where this worker is, as far as it knows."""
        return getattr(self._session, "may_end", True)

    def _open(self, state: SharedState) -> Session:
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
        return session
