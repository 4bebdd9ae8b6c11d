"""Where a run is, as the command line is told: HOST:PORT, a ticket, or the URL of a store."""

from __future__ import annotations

import os

from thinwire.errors import ConfigurationError
from thinwire.security.ticket import Ticket, is_ticket
from thinwire.security.token import TOKEN_VARIABLE


def is_store(where: str) -> bool:
    """Whether `where` is meant to be the URL of an object store.

    >>> is_store("s3://bucket/prefix"), is_store("10.9.0.1:29400"), is_store("thinwire://")
    (True, False, False)
    """
    return "://" in where and not is_ticket(where)


def address_in(where: str) -> str:
    """HOST:PORT of the lighthouse; the token of a ticket is from now on that of the environment.

    Args:
        where: HOST:PORT, which is returned as it is, or a ticket.

    Raises:
        ConfigurationError: it is half a ticket, or the environment has another token.
    """
    if not is_ticket(where):
        return where
    ticket = Ticket.read(where)
    if os.environ.get(TOKEN_VARIABLE, ticket.secret) != ticket.secret:
        raise ConfigurationError(
            "use this ticket",
            because=f"its token is another one than that of {TOKEN_VARIABLE}",
            do=f"unset {TOKEN_VARIABLE}, or pass HOST:PORT in place of the ticket",
        )
    os.environ[TOKEN_VARIABLE] = ticket.secret
    return ticket.address
