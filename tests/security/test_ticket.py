"""Tickets: read whole or not at all."""

import pytest

from thinwire.errors import ConfigurationError
from thinwire.security.ticket import Ticket, is_ticket

TICKET = Ticket(address="lighthouse.example.org:29400", secret="a-secret-of-many-characters")


@pytest.mark.parametrize("address", ["10.9.0.1:29400", "[2001:db8::1]:29400", "host:1"])
def test_what_was_written_is_read(address: str) -> None:
    ticket = Ticket(address=address, secret="0123456789abcdef")
    assert Ticket.read(f" {ticket}\n") == ticket
    assert is_ticket(str(ticket))


def test_a_ticket_that_is_cut_or_changed_anywhere_is_refused() -> None:
    whole = str(TICKET)
    wrong = [whole[:length] for length in range(len(whole))]
    for place in range(len("thinwire://"), len(whole)):
        wrong.append(whole[:place] + ("x" if whole[place] != "x" else "y") + whole[place + 1 :])
    for text in wrong:
        with pytest.raises(ConfigurationError, match="cannot use this ticket"):
            Ticket.read(text)


def test_its_representation_does_not_tell_the_secret() -> None:
    assert TICKET.secret not in repr(TICKET)
