"""Flags that several commands have, and tickets among them."""

import dataclasses
import os
from typing import Any

import pytest

import thinwire as tw
from thinwire.cli import main
from thinwire.cli.flags import RunFlags, address_in, apply_flags, changes_of
from thinwire.handshake import flatten_description
from thinwire.security.ticket import Ticket
from thinwire.train.recipes import laptop

TICKET = str(Ticket(address="127.0.0.1:1", secret="0123456789abcdef"))


def test_every_flag_sets_a_field_that_there_is() -> None:
    names = [f.name for f in dataclasses.fields(RunFlags) if f.name != "recipe"]
    given: dict[str, Any] = dict.fromkeys(names, 1)
    changes = changes_of(RunFlags(**given))
    assert len(changes) == len(names)
    assert set(changes) <= set(flatten_description(laptop("ddp").describe()))


@pytest.mark.parametrize(("flag", "compiles"), [("yes", True), ("no", False), (None, False)])
def test_compile_is_a_bool_that_is_written_as_the_flag_has_it(flag, compiles: bool) -> None:
    """Folders of runs from before it was one are resumed, and compared field by field."""
    config = apply_flags(RunFlags(compile=flag), "ddp", 0)
    assert config.machine.compile is compiles
    assert config.describe()["machine"]["compile"] == ("yes" if compiles else "no")


# -- where a run is --------------------------------------------------------------------------------


def test_a_ticket_is_an_address_and_a_token(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "the token of another run")
    with pytest.raises(tw.ConfigurationError, match="unset THINWIRE_TOKEN"):
        address_in(TICKET)
    monkeypatch.delenv("THINWIRE_TOKEN")
    assert address_in("127.0.0.1:1") == "127.0.0.1:1"
    assert "THINWIRE_TOKEN" not in os.environ
    assert address_in(TICKET) == address_in(TICKET) == "127.0.0.1:1"
    assert os.environ["THINWIRE_TOKEN"] == "0123456789abcdef"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["join", TICKET[:-1]], "cannot use this ticket"),
        (["status", TICKET[:-1]], "cannot use this ticket"),
        (["doctor", TICKET[:-1]], "cannot use this ticket"),
        (["train", "--elastic", TICKET[:-1]], "cannot use this ticket"),
        (["join", "127.0.0.1:1", "--elastic", "127.0.0.1:2"], "leave --elastic out"),
        (["status", "127.0.0.1:1", "--run-name", "r"], "a lighthouse has one run"),
    ],
)
def test_where_a_run_is_is_said_once_and_whole(monkeypatch, capsys, command, why) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "to be restored")
    monkeypatch.delenv("THINWIRE_TOKEN")
    assert main(command) == 1
    assert why in capsys.readouterr().err
