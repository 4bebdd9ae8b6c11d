"""Checks of a store, against a folder and a real S3 server."""

import pytest

from s3_server import options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.doctor.store import store_findings
from thinwire.security.token import Token
from thinwire.transport.address import HubAddress
from thinwire.transport.object_store import ObjectStore

MemoryStore = pytest.importorskip("obstore.store").MemoryStore


def found(url: str, **options) -> dict[str, tuple[str, str]]:
    return {f.name: (f.status, f"{f.found} -> {f.do}") for f in store_findings(url, **options)}


def aws(monkeypatch, endpoint: str, **keys: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in options_of(endpoint, **keys).items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)


def test_a_folder_is_fit_and_nothing_is_left_in_it(tmp_path) -> None:
    said = found(f"file://{tmp_path}/new")
    statuses = {name: status for name, (status, _) in said.items()}
    assert statuses == {"store": "ok", "clock": "ok", "rate": "ok", "method": "ok"}
    assert "--topology star" in said["method"][1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_hub_is_opened_with_the_token_of_the_run(monkeypatch) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    token, memory = Token("a secret of many characters"), MemoryStore()
    monkeypatch.setattr(HubAddress, "open", lambda _, given: memory if given is token else None)
    assert found("hub://localhost:1", token=token)["method"][0] == "ok"


def test_an_s3_server_is_fit_and_keys_that_may_only_read_are_named(monkeypatch, s3) -> None:
    aws(monkeypatch, s3)
    assert found("s3://run/doctor")["store"][0] == "ok"
    aws(monkeypatch, s3, key="reader")
    said = found("s3://run/doctor")
    assert said["store"][0] == "fail"
    assert "keys that may put, get and delete" in said["store"][1]
    assert set(said) == {"store", "the rest"}


def test_a_store_that_overwrites_is_not_fit_and_one_that_may_not_delete_is_a_warning(
    monkeypatch, tmp_path
) -> None:
    async def heedless(self, key, parts, until_s, is_same) -> bool:
        await self.replace(key, *parts, until_s)
        return True

    async def refused(self, keys) -> bool:
        return False

    for name, instead, status, words in (
        ("put", heedless, "fail", "If-None-Match"),
        ("delete", refused, "warn", "may not delete"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, name, instead)
            said = found(f"file://{tmp_path}/{name}")["store"]
        assert said[0] == status
        assert words in said[1]


def test_a_clock_that_is_wrong_is_named(monkeypatch, tmp_path) -> None:
    stamp = ObjectStore.stamp

    async def elsewhere(self, key, until_s):
        tag, written_s = await stamp(self, key, until_s)
        return tag, written_s + 3600

    monkeypatch.setattr(ObjectStore, "stamp", elsewhere)
    status, told = found(f"file://{tmp_path}")["clock"]
    assert status == "warn"
    assert "1 h behind the store's" in told
    assert "15 min" in told
