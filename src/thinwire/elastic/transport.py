"""Workers that come and go: torchft's lighthouse says who is there, gloo carries their payloads."""

import importlib.metadata
import json
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from torch import Tensor

from thinwire.elastic.address import local_address, split_address
from thinwire.elastic.events import EventLog
from thinwire.elastic.options import ElasticOptions, ElasticSettings
from thinwire.elastic.shared_state import RoundRecord, SharedState
from thinwire.elastic.token import Token, find_token
from thinwire.errors import ConfigurationError
from thinwire.transport.base import (
    Inspect,
    Label,
    Pending,
    Phase,
    Reduce,
    RoundPlan,
    Transport,
    accept_all,
)
from thinwire.version import __version__

if TYPE_CHECKING:
    from thinwire.elastic.session import ElasticSession

__all__ = ["Elastic", "ElasticOptions"]


@final
class Elastic(Transport):
    """A worker that may come late, be lost, and come back, among others that may.

    Who takes part is settled when a round begins. Payloads are checked by all and voted on: one
    that did not reach everybody whole is left out, and a round whose workers were lost counts on
    nobody; its work is sent again in the next one. Whoever is behind takes over the others' state.

    Args:
        lighthouse: HOST:PORT at which `thinwire lighthouse` listens.
        token: of the run; default that of the environment variable THINWIRE_TOKEN.
        identity: this worker's own in the run, also after a restart; default random.
        host: address at which others reach this machine; default that of its way to the lighthouse.
        terms: for whom and how long it waits.

    Raises:
        ConfigurationError: torchft is missing, or there is no token.

    Source: torchft 0.2, `torchft.coordination` and its reconfigurable process group.
    """

    def __init__(
        self,
        lighthouse: str,
        *,
        token: Token | None = None,
        identity: str | None = None,
        host: str | None = None,
        terms: ElasticOptions | None = None,
    ) -> None:
        split_address(lighthouse)
        self.identity = identity or f"worker-{secrets.token_hex(4)}"
        self.events = EventLog()
        self._settings = ElasticSettings(
            lighthouse=lighthouse,
            token=token or find_token(),
            identity=self.identity,
            host=host or local_address(split_address(lighthouse)[0]),
            terms=terms or ElasticOptions(),
        )
        self._card = {"thinwire": __version__, "torchft": _torchft_version()}
        self._session: ElasticSession | None = None

    @property
    def rank(self) -> int:
        """This worker's place among those of the round."""
        return 0 if self._session is None else self._session.rank

    @property
    def world_size(self) -> int:
        """The workers of the round."""
        return 1 if self._session is None else len(self._session.names)

    @property
    def forgiving(self) -> bool:
        """A worker whose message is bad is left out."""
        return True

    @property
    def norm_limit(self) -> float:
        """A contribution longer than this many times the median is left out."""
        return self._settings.terms.norm_limit

    def introduce(self, card: bytes) -> dict[int, bytes]:
        """Keep the card for the door, where it is compared with the run's; cards add up."""
        self._card |= json.loads(card)
        return {0: card}

    def convene(self, ward: SharedState, occasion: Phase) -> RoundPlan:
        """Meet the others, and catch up with them if this worker is behind.

        Raises:
            ExchangeError: the lighthouse cannot be reached for too long.
            MismatchError: this worker runs something else than the others, or as somebody else.
        """
        if self._session is None:
            # Here, because it brings servers with it that nobody else needs.
            from thinwire.elastic.session import ElasticSession

            self._session = ElasticSession(self._settings, ward, self._card, self.events)
        return self._session.convene(occasion)

    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all) -> Pending:
        """Start a ring of messages and a vote; in a round that is lost already, fail later."""
        return self._open_session().carry(lambda group: group.start(payload, label, inspect), label)

    def start_reduce(
        self,
        payloads: Sequence[Tensor],
        reduce: Reduce,
        label: Label,
        inspect: Inspect = accept_all,
    ) -> Pending:
        """Start messages to all and a vote on the results."""
        session = self._open_session()
        return session.carry(lambda g: g.start_reduce(payloads, reduce, label, inspect), label)

    def remember(self, record: Callable[[], RoundRecord]) -> None:
        """Keep the round for those who missed it."""
        self._open_session().remember(record)

    def leave(self) -> None:
        """Leave the run; what was kept for others is gone."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """`leave`."""
        self.leave()

    def _open_session(self) -> "ElasticSession":
        if self._session is None:
            raise ConfigurationError(
                "exchange with the others",
                because="this worker has not convened with them",
                do="use the transport through OuterLoop, which does",
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
