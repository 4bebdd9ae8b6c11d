"""Addresses of runs: every form, every slip, and the connection that follows."""

import pytest

import thinwire as tw
from processes import promptly
from thinwire.address import Address, connect
from thinwire.security.sealing import SEAL_NBYTES
from thinwire.security.token import Token
from thinwire.transport import Distributed, Elastic, Rendezvous, RoundTag, Sealed, in_process
from thinwire.transport.address import split_address

FORMS = {
    "s3://bucket/first": ("s3://bucket", "first"),
    "gs://bucket/a/b/first.2": ("gs://bucket/a/b", "first.2"),
    "az://account/container/first": ("az://account/container", "first"),
    "file:///shared/runs/first": ("file:///shared/runs", "first"),
    "memory:///first": ("memory://", "first"),
    "hub://a-secret-of-many@10.9.0.1:29600/first": ("hub://10.9.0.1:29600", "first"),
    "hub://[::1]:29600/first": ("hub://[::1]:29600", "first"),
}


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("numbers", ["", "?workers=3&worker=2"])
def test_an_address_is_read_and_written(text: str, numbers: str) -> None:
    address, secret = Address.read(f" {text}{numbers}\n"), "a-secret-of-many"
    assert (address.place, address.run) == FORMS[text]
    assert (address.workers, address.worker) == ((3, 2) if numbers else (None, None))
    assert address.secret == (secret if secret in text else "")
    assert Address.read(str(address)) == Address.read(f"{text}{numbers}".replace(f"{secret}@", ""))
    assert "a-secret" not in f"{address}{address!r}"


def test_a_process_group_has_an_address_without_a_run() -> None:
    address = Address("[::1]:29400", "", 2, 0)
    assert Address.read("tcp://[::1]:29400?worker=0&workers=2") == Address.read(str(address))
    assert Address.read(str(address)) == address


REFUSED = {
    "": "THINWIRE_AT is not set",
    "node0:29400": "it has no scheme.*tcp://HOST:PORT",
    "./runs/first": "it has no scheme.*file:///FOLDER/RUN",
    "s4://bucket/first": "'s4' is no scheme.*s3://BUCKET/RUN",
    "S3://bucket/first": "'S3' is no scheme.*s3://BUCKET/RUN",
    "http://host/first": "'http' is no scheme",
    "hubs://host:1/first": "'hubs' is no scheme.*hub://TOKEN",
    "s3://bucket": "the name of a run is missing",
    "s3://bucket/": "the name of a run is missing",
    "s3:///first": "the name of a run is missing",
    "file:///first": "the name of a run is missing",
    "file://shared/first": "does not begin at the root.*file:///FOLDER/RUN, with three slashes",
    "memory://": "the name of a run is missing",
    "hub://t@host:29600": "the name of a run is missing.*hub://TOKEN",
    "hub://host/first": "connect to 'hub://host/first'.*not HOST:PORT.*hub://TOKEN@HOST:PORT/RUN",
    "hub://x": "connect to 'hub://x'.*not HOST:PORT.*hub://TOKEN@HOST:PORT/RUN",
    "hub://a b@c": "connect to 'hub://c'.*pass hub://TOKEN@HOST:PORT/RUN",
    "s3://bucket/a run": "'a run' cannot name a run",
    f"s3://bucket/{'r' * 101}": "cannot name a run",
    "s3://bucket/.first": "cannot name a run",
    "tcp://node0:29400": "no number of workers",
    "tcp://node0?workers=2&worker=0": "not HOST:PORT.*pass tcp://HOST:PORT",
    "tcp://node0:29400?workers=2": "it has no worker",
    "s3://bucket/first?worker=2": "it has no workers.*or neither",
    "s3://bucket/first?workers=2&worker=2": "worker 2 is none of 2.*worker=0 to worker=1",
    "s3://bucket/first?workers=0&worker=0": "worker 0 is none of 0",
    "hub://a-secret@host:29600/first?workers=two&worker=0": "workers is 'two'",
    "s3://bucket/first?workers=&worker=0": "workers is ''",
    "s3://bucket/first?workers=2&worker=-1": "worker is '-1'",
    "s3://bucket/first?wrkers=2&worker=0": "'wrkers' is no setting.*pass workers=NUMBER",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_slip_in_an_address_names_the_right_form(text: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=REFUSED[text]) as refused:
        Address.read(text)
    assert "a-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        *("", "node", ":1", "node:", "node:x", "node:65536", "::1:5", "..:1"),
        *("node:" + "0" * 5000, "a" * 64 + ":1", "a" * 5000 + ":1"),
    ],
    ids=lambda address: address[:9],
)
def test_what_is_no_host_and_port_is_refused_and_not_printed_whole(address: str) -> None:
    with pytest.raises(tw.ConfigurationError, match="not HOST:PORT") as caught:
        split_address(address)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("scheme", ["hubs://", "Hub://", "hub:/", "hub//", "hub:", "", "hub://"])
def test_no_error_shows_a_token(scheme: str) -> None:
    for rest in ("@host:29600", "@host:0/first", "@host/first?workers=2"):
        with pytest.raises(tw.ConfigurationError) as refused:
            Address.read(f"{scheme}0123/456789abcdef{rest}")
        assert "0123" not in str(refused.value)


def test_hosts_and_ports_are_split() -> None:
    found = [split_address(each) for each in ("node:0", "10.0.0.1:65535", "[fe80::1]:7")]
    assert found == [("node", 0), ("10.0.0.1", 65535), ("fe80::1", 7)]


def test_the_connection_follows_from_the_address(monkeypatch) -> None:
    for name in ("THINWIRE_AT", "THINWIRE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(connect(), Distributed)
    assert isinstance(connect("tcp://127.0.0.1:29400?workers=1&worker=0"), Rendezvous)
    pytest.importorskip("obstore")
    elastic = connect("memory:///first")
    assert isinstance(elastic, Elastic)
    assert (elastic.run_name, elastic.is_fixed) == ("first", False)
    fixed = connect("memory:///first?workers=3&worker=2")
    assert (fixed.is_fixed, fixed.world_size, fixed.rank) == (True, 3, 2)
    monkeypatch.setenv("THINWIRE_AT", "memory:///second")
    assert connect().run_name == "second"
    assert connect("memory:///third").run_name == "third"


def test_a_token_seals_a_process_group_too_and_an_empty_address_is_none(monkeypatch) -> None:
    monkeypatch.delenv("THINWIRE_AT", raising=False)
    monkeypatch.setattr("thinwire.transport.Distributed", lambda: in_process(2)[0])
    sealed = connect(token=Token("a secret of many characters"))
    assert (type(sealed), sealed.added_nbytes) == (Sealed, SEAL_NBYTES)
    assert not isinstance(connect(), Sealed)
    with pytest.raises(tw.ConfigurationError, match="no address is given"):
        connect("")


@pytest.mark.parametrize("more", ["?workers=2&worker=0", ""])
def test_the_timeout_holds_at_a_store_too(tmp_path, more: str) -> None:
    its = connect(f"file://{tmp_path}/r{more}", timeout_s=0.3)
    if its.is_fixed:
        with pytest.raises(tw.errors.ExchangeTimeout), promptly(20):
            its.announce(b"card", RoundTag(what="card", round=0))
        its.close()
    assert its._timeouts.exchange(1000) == 0.3


def test_a_token_in_an_address_is_that_of_the_environment_or_none_is_used(monkeypatch) -> None:
    text = "hub://a-secret-of-many@10.9.0.1:29600/first"
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters")
    with pytest.raises(tw.ConfigurationError, match="it differs from that of THINWIRE_TOKEN"):
        connect(text)
    for same in ("", "a-secret-of-many"):
        monkeypatch.setenv("THINWIRE_TOKEN", same)
        assert Address.read(text).secret == "a-secret-of-many"
