"""One line to paste: where a run is, and the token that lets a worker in."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from thinwire.errors import ConfigurationError

_SCHEME = "thinwire://"
_FORM = re.compile(r"thinwire://(?P<secret>[^@/#\s]+)@(?P<address>[^@/#\s]+:\d+)#(?P<check>\w{6})")


def is_ticket(text: str) -> bool:
    """Whether `text` is meant to be a ticket.

    >>> is_ticket("thinwire://"), is_ticket("10.9.0.1:29400")
    (True, False)
    """
    return text.startswith(_SCHEME)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Where the lighthouse of a run is, and its token.

    A ticket is as secret as the token in it: all that read it can take part in the run.

    Args:
        address: HOST:PORT of the lighthouse.
        secret: the token's.

    >>> ticket = Ticket(address="10.9.0.1:29400", secret="a-secret-of-many-characters")
    >>> str(ticket)
    'thinwire://a-secret-of-many-characters@10.9.0.1:29400#216484'
    >>> Ticket.read(str(ticket)) == ticket
    True
    """

    address: str
    secret: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.secret}@{self.address}#{_check(self.address, self.secret)}"

    def __repr__(self) -> str:
        return f"Ticket(address={self.address!r}, secret=...)"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what `str` returned elsewhere.

        Raises:
            ConfigurationError: it is no ticket, or not all of one.
        """
        found = _FORM.fullmatch(text.strip())
        because = "it is not thinwire://TOKEN@HOST:PORT#CHECK"
        if found:
            if found["check"] == _check(found["address"], found["secret"]):
                return cls(address=found["address"], secret=found["secret"])
            because = (
                "its last six characters do not fit the rest: some of it is missing or changed"
            )
        raise ConfigurationError(
            "use this ticket",
            because=because,
            do="copy the whole line that thinwire lighthouse printed, in quotes",
        )


def _check(address: str, secret: str) -> str:
    return hashlib.sha256(f"thinwire ticket {secret}@{address}".encode()).hexdigest()[:6]
