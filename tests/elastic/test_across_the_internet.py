"""Workers behind routers that nobody can connect to, and what a listener on the way sees."""

import json
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

from elastic_team import TOKEN, Team
from training import corpus  # noqa: F401

OPTIONS = {"steps": 60, "every": 4, "step_s": 0.03, "terms": {"min_workers": 2}}
PRIVATE = "192.168.1.10"
LINK = {"nodes": 3, "rate_bps": 100e6, "delay_s": 0.005, "behind_routers": (1, 2)}


@pytest.mark.slow
def test_two_workers_behind_routers_end_as_two_that_reach_each_other(tmp_path, real) -> None:
    for name in ("near", "apart"):
        (tmp_path / name).mkdir()
    with Team(tmp_path / "near", **OPTIONS) as team:
        near = [team.start(name) for name in "ab"]
        team.finish()
    captured = tmp_path / "captured"
    with (
        real.Link(**LINK, capture=captured) as link,
        Team(
            tmp_path / "apart", host=link.addresses[0], namespaces=link.namespaces, **OPTIONS
        ) as team,
    ):
        apart = [team.start(name, node=n, host=PRIVATE) for n, name in ((1, "a"), (2, "b"))]
        team.finish()
    assert {worker.digest for worker in apart} == {worker.digest for worker in near}
    check_nothing_is_readable(captured.read_bytes(), [*apart])


@pytest.mark.slow
def test_a_worker_behind_a_router_that_was_killed_heals_by_way_of_the_lighthouse(
    tmp_path, real
) -> None:
    options = OPTIONS | {"steps": 120, "terms": {}}
    with (
        real.Link(**LINK) as link,
        Team(tmp_path, host=link.addresses[0], namespaces=link.namespaces, **options) as team,
    ):
        first, second = (team.start(name, node=n, host=PRIVATE) for n, name in ((1, "a"), (2, "b")))
        team.until(lambda: all(team.met(worker, 2) for worker in (first, second)))
        second.kill()
        again = team.start("b", node=2, host=PRIVATE)
        assert set(team.finish()) == {first, again}
        assert again.events("healed"), team.report()


SMALL = [
    "--steps", "24", "--sync-every", "4", "--workers", "2", "--global-batch", "4", "--threads", "1",
    "--sequence-length", "16", "--warmup-steps", "2", "--evaluate-steps", "0",
    "--min-workers", "2", "--method", "muloco:bits=2",
]  # fmt: skip


@pytest.mark.slow
def test_what_the_lighthouse_prints_is_all_that_the_others_type(
    tmp_path,
    real,
    corpus,  # noqa: F811
) -> None:
    unset = {k: v for k, v in os.environ.items() if k != "THINWIRE_TOKEN"}
    text = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # As a user would, and not as a rank of the link.
    thinwire = ["env", "-u", "RANK", "-u", "WORLD_SIZE", sys.executable, "-m", "thinwire"]
    with real.Link(**LINK) as link, mock.patch.dict(os.environ, unset, clear=True):
        lighthouse = link.popen(
            0, [*thinwire, "lighthouse", "--public", link.addresses[0]], **text, bufsize=1
        )
        line = next(said for said in lighthouse.stdout if "thinwire join" in said)
        typed = shlex.split(line.split("every machine: ")[1])
        assert typed[:2] == ["thinwire", "join"]
        more = [*SMALL, "--corpus", str(corpus)]
        outs = [tmp_path / "a", tmp_path / "b"]
        workers = [
            link.popen(n, [*thinwire, *typed[1:-1], str(out), *more], **text)
            for n, out in enumerate(outs, start=1)
        ]
        for worker in workers:
            said, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, said
        lighthouse.terminate()
        lighthouse.communicate(timeout=20)
    summaries = [json.loads((out / "summary.json").read_text()) for out in outs]
    assert len({summary["outer_digest"] for summary in summaries}) == 1
    assert all(summary["workers"] == 2 for summary in summaries), summaries


def check_nothing_is_readable(captured: bytes, workers: list) -> None:
    """No token, header, request, name of a method or address is in the packets, but TLS's own."""
    assert len(captured) > 100_000
    words = b"thinwire CONNECT HTTP/1 Content-Length identity version method digest torchft".split()
    words += [TOKEN.encode(), PRIVATE.encode(), b"PRI * HTTP/2"]  # gRPC's greeting
    words += [end.encode() for worker in workers for end in (worker.digest, worker.digest[:16])]
    assert [word for word in words if word in captured] == []
    assert not re.search(rb"\{\"[a-z_]+\": ", captured)


@pytest.mark.parametrize("words", [b"CONNECT", TOKEN.encode(), b'{"step": 3}'])
def test_what_would_be_readable_is_found(words: bytes) -> None:
    with pytest.raises(AssertionError):
        check_nothing_is_readable(bytes(200_000) + words, [])
