"""Checks of a store, against a folder and a real S3 server."""

import shlex

import pytest

from s3_server import options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.cli import main
from thinwire.doctor import store_findings
from thinwire.transport.object_store import ObjectStore

pytest.importorskip("obstore")


def found(url: str) -> dict[str, tuple[str, str]]:
    return {f.name: (f.status, f"{f.found} -> {f.do}") for f in store_findings(url)}


def aws(monkeypatch, endpoint: str, **keys: str) -> None:
    chosen = options_of(endpoint, **keys)
    monkeypatch.setenv("AWS_ENDPOINT_URL", chosen["endpoint"])
    monkeypatch.setenv("AWS_REGION", chosen["region"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", chosen["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", chosen["secret_access_key"])


def test_a_folder_is_fit_and_nothing_is_left_in_it(tmp_path) -> None:
    said = found(f"file://{tmp_path}/new")
    assert {name: status for name, (status, _) in said.items()} == {
        "store": "ok",
        "rate": "ok",
        "method": "ok",
    }
    assert "--topology star" in said["method"][1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_s3_server_is_fit(monkeypatch, s3) -> None:
    aws(monkeypatch, s3)
    assert found("s3://run/doctor")["store"][0] == "ok"


def test_keys_that_may_only_read_are_named(monkeypatch, s3) -> None:
    aws(monkeypatch, s3, key="reader")
    said = found("s3://run/doctor")
    assert said["store"][0] == "fail"
    assert "keys that may put, get and delete" in said["store"][1]
    assert set(said) == {"store", "the rest"}


def test_a_store_that_writes_in_place_of_another_object_is_not_fit(monkeypatch, tmp_path) -> None:
    async def heedless(self, key, payload, until_s, is_same) -> bool:
        await self.replace(key, payload, until_s)
        return True

    monkeypatch.setattr(ObjectStore, "put", heedless)
    status, text = found(f"file://{tmp_path}")["store"]
    assert status == "fail"
    assert "If-None-Match" in text


def test_keys_that_may_not_delete_are_a_warning(monkeypatch, tmp_path) -> None:
    async def refused(self, keys) -> bool:
        return False

    monkeypatch.setattr(ObjectStore, "delete", refused)
    status, text = found(f"file://{tmp_path}")["store"]
    assert status == "warn"
    assert "may not delete" in text


def test_the_command_takes_a_place(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters")
    assert main(["doctor", f"file://{tmp_path}", "--step-time", "2s"]) == 0
    told = capsys.readouterr().out
    assert "2 s a step" in " ".join(told.split())
    place = shlex.quote(f"file://{tmp_path}")
    assert f"1  thinwire join {place} --run-name NAME --recipe paper --model 150m --method " in told
    assert main(["doctor", "ftp://nowhere"]) == 1
    assert "store" in capsys.readouterr().err
