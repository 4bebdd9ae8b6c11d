import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from elastic_registry import TOKEN, Clock, at, client, registry_server
from processes import free_port
from thinwire.cli import main
from thinwire.membership import WorkerMetrics

SECRET = "a secret of many characters"


@pytest.fixture(autouse=True)
def with_token(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    monkeypatch.setenv("COLUMNS", "160")


def test_it_shows_who_is_there_and_how_far(capsys) -> None:
    with registry_server() as server:
        address = f"127.0.0.1:{server.port}"
        assert main(["status", address]) == 0
        assert "0 workers; no outer step yet" in capsys.readouterr().out
        a, b, c = (client(server.port, name) for name in ("a[red]", "b", "c"))
        a.join(at(7), "10.0.0.1:4000")
        measured = {"tokens_per_s": 12345.6, "sent_bytes": 106_000_000, "received_bytes": 7500}
        a.report(WorkerMetrics(loss=2.65432, wait_s=99.0, **measured))
        a.heartbeat(at(7))
        b.join(at(5), "10.0.0.2:4000")
        b.report(WorkerMetrics(loss=float("nan"), sent_bytes=0))
        b.heartbeat(at(5), waiting_s=3.2)
        other = dataclasses.replace(at(7), digest="ff")
        c.join(other, "10.0.0.3:4000")
        c.finished = True
        c.heartbeat(other)
        assert main(["status", address]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 workers; the run is under way: outer step 7, inner step 35" in out
    # Names are shown as they are.
    assert "a[red] 10.0.0.1:4000 7 35 2.6543 12.3k 106 MB 7.5 kB 1.65 min trains" in out
    # What is not known is a dash: c is of an earlier version.
    assert "b 10.0.0.2:4000 5 25 - - 0 B - - 2 outer steps behind, waits for others, 3 s" in out
    assert "c 10.0.0.3:4000 7 35 - - - - - finished, another state: digest ff" in out


def test_it_shows_whose_contributions_were_not_used_and_why(capsys, monkeypatch) -> None:
    with registry_server() as server:
        address = f"127.0.0.1:{server.port}"
        a, b = (client(server.port, name) for name in ("a[red]", "b"))
        for worker in (a, b):
            worker.join(at(7), "10.0.0.1:4000")
        assert main(["status", address]) == 0
        assert "rejected" not in capsys.readouterr().out
        for step, kind in ((5, "outlier"), (6, "not finite"), (6, "clipped"), (7, "outlier")):
            a.note_contribution(step, "a[red]", kind)
            b.note_contribution(step, "a[red]", kind)
        a.heartbeat(at(7))
        b.heartbeat(at(7))
        assert main(["status", address]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert main(["status", address, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["status", address]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert "contributions of rejected clipped why" in shown
    assert "a[red] 3 1 not finite 1, outlier 2" in shown
    assert told["contributions"] == {"a[red]": {"not finite": 1, "outlier": 2, "clipped": 1}}
    assert [worker["identity"] for worker in told["workers"]] == ["a[red]", "b"]
    assert (told["run"]["version"], told["workers"][1]["state"]) == (7, "trains")


def test_a_worker_that_is_silent_is_named_before_it_is_gone(capsys) -> None:
    with registry_server() as server:
        clock = server._registry._clock = Clock()
        silent, heard = client(server.port, "a"), client(server.port, "b")
        for worker in (silent, heard):
            worker.join(at(7), "10.0.0.1:4000")
        clock.now_s += 3.2
        heard.heartbeat(at(7))
        assert main(["status", f"127.0.0.1:{server.port}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a 10.0.0.1:4000 7 35 - - - - - no heartbeat for 3 s b" in out
    assert out.endswith("b 10.0.0.1:4000 7 35 - - - - - trains")


def test_a_narrow_terminal_is_told_what_a_wide_one_shows(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with registry_server() as server:
        a = client(server.port, "a worker with a name of 30 let")
        a.join(at(7), "10.0.0.1:4000")
        a.report(WorkerMetrics(loss=-1e18, tokens_per_s=1e18, sent_bytes=10**18, wait_s=1e18))
        a.heartbeat(at(7))
        assert main(["status", f"127.0.0.1:{server.port}"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "10.0.0.1" not in out
    assert "a terminal of 116 columns shows address, sent, received, too" in out
    # Names are cut before numbers are.
    for shown in ("a worker", "-1e+18", "1e+06T", "1.16e+13 d", "trains"):
        assert shown in out


def test_a_run_that_is_over_says_so(capsys) -> None:
    with registry_server() as server:
        a = client(server.port, "a")
        a.join(dataclasses.replace(at(3), over=True), "10.0.0.1:4000")
        a.leave()
        assert main(["status", f"127.0.0.1:{server.port}"]) == 0
    assert "0 workers; the run is over: outer step 3" in capsys.readouterr().out


def test_another_token_and_nobody_there_are_one_line(capsys, monkeypatch) -> None:
    assert main(["status", f"127.0.0.1:{free_port()}"]) == 1
    assert "error: cannot" in capsys.readouterr().err
    monkeypatch.setenv("THINWIRE_TOKEN", "another secret, also long enough")
    with registry_server() as server:
        assert main(["status", f"127.0.0.1:{server.port}"]) == 1
    assert "token" in capsys.readouterr().err


def test_watching_goes_on_until_it_is_interrupted() -> None:
    assert TOKEN is not None
    with registry_server() as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", "status", f"127.0.0.1:{server.port}", "--watch"],
            env=os.environ | {"THINWIRE_TOKEN": SECRET, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert "0 workers" in process.stdout.readline()
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()
            process.communicate()
