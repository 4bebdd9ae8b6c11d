"""The connection of an elastic worker: who is there, and what carries their payloads."""

import importlib.metadata
from typing import TYPE_CHECKING

from thinwire.elastic.joined_transport import JoinedTransport, Session
from thinwire.elastic.timeouts import ElasticOptions, ElasticSettings
from thinwire.elastic.worker_ranks import WorkerRanks
from thinwire.errors import ConfigurationError
from thinwire.membership import SharedState
from thinwire.security.token import Token, find_token
from thinwire.transport.address import local_address, split_address

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Elastic(JoinedTransport):
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
        super().__init__(identity, torchft=_torchft_version())
        self._settings = ElasticSettings(
            lighthouse=lighthouse,
            token=token or find_token(),
            identity=self.identity,
            host=host or local_address(split_address(lighthouse)[0]),
            options=options or ElasticOptions(),
        )
        self._ranks = WorkerRanks(group)
        self.ranks = self._ranks.size

    def _open(self, state: SharedState) -> Session:
        # Here, because it brings servers along that a description of the worker does not need.
        from thinwire.elastic.rank_session import RankSession
        from thinwire.elastic.session import ElasticSession

        here = RankSession(self._settings, state, self._ranks, self.events)
        if self._ranks.is_first:
            return ElasticSession(
                here, self._description, asked_to_leave=lambda: self._asked_to_leave()
            )
        here.join(self._description)
        return here


def _torchft_version() -> str:
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            "join an elastic run",
            because="torchft is not installed",
            do="pip install 'thinwire[elastic]' (Linux on x86-64)",
        ) from error
