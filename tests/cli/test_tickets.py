"""Tickets on the command line."""

import os

import pytest

from thinwire.cli import main
from thinwire.cli.tickets import address_in
from thinwire.errors import ConfigurationError
from thinwire.security.ticket import Ticket

TICKET = str(Ticket(address="127.0.0.1:1", secret="0123456789abcdef"))


def test_a_ticket_is_an_address_and_a_token(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "to be restored")
    monkeypatch.delenv("THINWIRE_TOKEN")
    assert address_in("127.0.0.1:1") == "127.0.0.1:1"
    assert "THINWIRE_TOKEN" not in os.environ
    assert address_in(TICKET) == "127.0.0.1:1"
    assert os.environ["THINWIRE_TOKEN"] == "0123456789abcdef"
    assert address_in(TICKET) == "127.0.0.1:1"


def test_a_ticket_of_another_run_than_the_environments_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "the token of another run")
    with pytest.raises(ConfigurationError, match="unset THINWIRE_TOKEN"):
        address_in(TICKET)


@pytest.mark.parametrize("command", [["join"], ["status"], ["doctor"], ["train", "--elastic"]])
def test_every_command_that_asks_where_a_run_is_takes_one(command, monkeypatch, capsys) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "to be restored")
    monkeypatch.delenv("THINWIRE_TOKEN")
    assert main([*command, TICKET[:-1]]) == 1
    told = capsys.readouterr()
    assert "cannot use this ticket" in told.err


def test_where_a_run_is_is_said_once(capsys) -> None:
    assert main(["join", "127.0.0.1:1", "--elastic", "127.0.0.1:2"]) == 1
    assert "leave --elastic out" in capsys.readouterr().err
