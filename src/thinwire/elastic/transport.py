"""The connection of an elastic worker: who is there, and what carries their payloads."""

import importlib.metadata
import json
import secrets
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar, final

from thinwire.elastic.events import EventLog
from thinwire.elastic.options import ElasticOptions, ElasticSettings
from thinwire.elastic.quorum import identity_of
from thinwire.elastic.worker_ranks import AgreedRound, WorkerRanks
from thinwire.errors import ConfigurationError
from thinwire.membership import (
    Answer,
    Membership,
    Phase,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.security.token import Token, find_token
from thinwire.transport import Announce, Requests, Round, RoundTag, Transport
from thinwire.transport.address import local_address, split_address
from thinwire.transport.base import FinishedRound, RunningExchange
from thinwire.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from thinwire.elastic.rank_session import RankSession
    from thinwire.elastic.session import ElasticSession

__all__ = ["Elastic", "ElasticOptions"]

T = TypeVar("T")


@final
class Elastic(Transport, Membership):
    """A worker that may come late, be lost, and come back, among others that may.

    Who takes part is settled when a round begins. Messages are checked by all workers and voted on:
    one that did not reach every worker whole is left out, and a round whose workers were lost is
    discarded; its work is sent again in the next one. A worker that is behind takes over the
    others' state.

    A worker may be several ranks, each with shards of the model (FSDP2, tensor parallelism): all of
    them build this alike, and each exchanges with the same rank of the other workers. The first one
    speaks with the lighthouse, a worker counts once, and with one of its ranks it ends.

    Args:
        lighthouse: HOST:PORT at which `thinwire lighthouse` listens.
        token: of the run; default that of the environment variable THINWIRE_TOKEN.
        identity: this worker's own in the run, also after a restart; default random.
        host: address at which others reach this machine; default that of its way to the lighthouse.
        options: how long it waits, and for how many.
        group: the process group, or one-dimensional mesh, of this worker's ranks; default a worker
            of one rank.

    Raises:
        ConfigurationError: torchft is missing, or there is no token.

    Source: torchft 0.2, `torchft.coordination`.
    """

    def __init__(
        self,
        lighthouse: str,
        *,
        token: Token | None = None,
        identity: str | None = None,
        host: str | None = None,
        options: ElasticOptions | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
    ) -> None:
        split_address(lighthouse)
        self.identity = identity or f"worker-{secrets.token_hex(4)}"
        self.events = EventLog()
        self._settings = ElasticSettings(
            lighthouse=lighthouse,
            token=token or find_token(),
            identity=self.identity,
            host=host or local_address(split_address(lighthouse)[0]),
            options=options or ElasticOptions(),
        )
        self._ranks = WorkerRanks(group)
        self._description = {"thinwire": __version__, "torchft": _torchft_version()}
        self._session: ElasticSession | RankSession | None = None
        self._asked_to_leave: Callable[[], bool] = lambda: False

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
        """The ranks of this worker."""
        return self._ranks.size

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Run it among the workers of the round; what stops it discards the round."""
        if self._session is not None:
            running = self._session.link.run(requests, tag)
            return running if self._ranks.size == 1 else AgreedRound(running, self._ranks)
        # Before it joins: descriptions add up, and the registry compares them with the run's.
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
        """Open what others need to reach this worker, and register it.

        Raises:
            ExchangeError: the lighthouse cannot be reached for too long.
            MismatchError: this worker runs something else, or its identity is taken.
        """
        if self._session is not None:
            return  # it joined before, and the first round failed
        # Here, because it brings servers along that a description of the worker does not need.
        from thinwire.elastic.rank_session import RankSession
        from thinwire.elastic.session import ElasticSession

        here = RankSession(self._settings, state, self._ranks, self.events)
        if self._ranks.is_first:
            self._session = ElasticSession(
                self._settings,
                state,
                self._description,
                self.events,
                here,
                self._ranks,
                asked_to_leave=lambda: self._asked_to_leave(),
            )
        else:
            here.join(self._description)
            self._session = here

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Have waits for the others and for the lighthouse end with `RunStopped` once asked to.

        Args:
            asked: says so; called several times a second while waiting.
        """
        self._asked_to_leave = asked

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Meet the others, and catch up with them if this worker is behind."""
        return self._open_session().begin_round(phase)

    def member(self, rank: int) -> str:
        """The identity of worker `rank` of the round."""
        return identity_of(self._open_session().names[rank])

    def log_round(self, record: RoundRecord) -> None:
        """Keep the round for workers that missed it."""
        self._open_session().log_round(record)

    def report(self, metrics: WorkerMetrics) -> None:
        """Have the next heartbeats say it, once this worker has joined."""
        if self._session is not None:
            self._session.report(metrics)

    def leave(self) -> None:
        """Leave the run; what was kept for others is gone."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _open_session(self) -> "ElasticSession | RankSession":
        if self._session is None:
            raise ConfigurationError(
                "begin a round with the others",
                because="this worker has not joined them",
                do="call join() first, or use the transport through OuterLoop, which does",
            )
        return self._session


def _torchft_version() -> str:
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            "join an elastic run",
            because="torchft is not installed",
            do="pip install 'thinwire[elastic]' (Linux on x86-64)",
        ) from error
