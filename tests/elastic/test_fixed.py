"""Workers that share an object store: memory, a folder, a real S3 server that makes mistakes."""

import asyncio
import gc
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meeting_ranks
import thinwire as tw
from bucket_workers import SECRET, memory, names_in, read, write
from forked import Forked
from meeting_ranks import STEPS
from processes import ended, fork_worker, promptly, run_workers, until
from s3_server import Proxy, in_aws, options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.elastic import fixed
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.transport import Elastic
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.security.sealing import SEAL_NBYTES
from thinwire.testing.transports import (
    check_worker,
    gathered,
    payload_of,
    swapped,
)
from thinwire.transport import RoundTag, object_store
from thinwire.transport.base import Round
from thinwire.transport.sealed_objects import name_part
from toy import adamw, build_model
from transport_checks import check_background


def team(store: Any, workers: int, *, timeout_s: float = 20.0, **fields) -> list[Elastic]:
    given = {"run": "a-run", "options": ElasticOptions(timeout_s=timeout_s), **fields}
    return [Elastic(store, worker=rank, workers=workers, **given) for rank in range(workers)]


def on_s3(name: str, endpoint: str, **fields) -> list[Elastic]:
    return team(f"s3://{name}", 2, store_options=options_of(endpoint), **fields)


def exchange(transport: Elastic, round: int = 1, nbytes: int = 9, to: int | None = None) -> Round:
    """A gather, or a swap with worker `to`."""
    rank, workers = transport.rank, transport.world_size
    payload = payload_of(rank, nbytes)
    posts = gathered(payload, rank, workers) if to is None else swapped(payload, rank, to)
    return transport.run(posts, RoundTag(what="x", round=round))


def at_once(work: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(work, given))


def rounds(transports: Sequence[Elastic], last: int) -> None:
    """Rounds 1 to `last`, every worker in a thread of its own."""
    at_once(lambda t: [exchange(t, n).wait() for n in range(1, last + 1)], transports)


@pytest.mark.parametrize(
    ("workers", "token", "store"),
    [(1, SECRET, "memory"), (2, SECRET, "s3"), (3, SECRET, "memory"), (3, None, "folder")],
)
def test_workers_keep_the_contract(tmp_path, request, workers: int, token, store: str) -> None:
    if store == "s3":
        transports = on_s3("run/contract", request.getfixturevalue("s3"), token=token)
    else:
        place = memory() if store == "memory" else f"file://{tmp_path}/new"
        transports = team(place, workers, token=token)
    at_once(check_worker, transports)
    at_once(check_background, transports)


@pytest.mark.slow_cases(but=("2-folder",))
@pytest.mark.parametrize(
    ("workers", "store", "token"),
    [(2, "folder", SECRET), (4, "folder", None), (2, "s3", SECRET), (4, "s3", SECRET)],
)
def test_processes_that_share_a_store_reach_the_digests_of_one_process(
    tmp_path, request, workers: int, store: str, token: str | None
) -> None:
    """Their bytes and requests are those of the plan."""
    place = {"THINWIRE_AT": f"file://{tmp_path}/run", "THINWIRE_TOKEN": token or ""}
    if store == "s3":
        place |= in_aws(request.getfixturevalue("s3"))
        place["THINWIRE_AT"] = f"s3://run/digests{workers}/run"
    processes = run_workers("meeting_ranks.py", "train", workers, **place)
    expected = meeting_ranks.in_one_process(workers)
    shape, added = Shape.of_model(build_model()), 0 if token is None else SEAL_NBYTES
    for worker, process in enumerate(processes):
        assert process.returncode == 0, process.stderr
        for number, told in enumerate(json.loads(process.stdout)):
            assert told["digest"] == expected[number][worker]
            method = meeting_ranks.METHODS[number]
            plan = traffic(method, shape, workers=workers, rank=worker, added_nbytes=added)
            assert told["sent_bytes"] == plan.sent_nbytes(STEPS)
            assert told["received_bytes"] == plan.received_nbytes(STEPS)
            assert told["requests"]["puts"] == plan.puts(STEPS)
            assert told["requests"]["gets"] == plan.gets(STEPS)
            assert told["requests"]["deletes"] < told["requests"]["puts"]
    if store == "folder":
        written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        # The start of a message's header, and of what a worker says of its run.
        assert [text in written for text in (b"TWIR", b"initial weights")] == [token is None] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io counts bytes of a process")
def test_the_operating_system_counts_as_many_bytes(tmp_path) -> None:
    place = {"THINWIRE_AT": f"file://{tmp_path}/run"}
    for process in run_workers("meeting_ranks.py", "count_bytes", 4, **place):
        assert process.returncode == 0, process.stderr
        sent, received, written, read = json.loads(process.stdout)
        # Five rounds of one bit a weight, and no more than headers and signs of life beside them.
        assert received == 3 * sent > 3 * 5 * (1031 * 1019 / 8)
        assert sent < written < 1.01 * sent, (sent, written)
        assert received < read < 1.01 * received, (received, read)


def test_workers_of_two_ddp_ranks_send_everything_once(tmp_path) -> None:
    place = {"THINWIRE_AT": f"file://{tmp_path}/run", "METHODS": "0"}
    processes = run_workers("meeting_ranks.py", "train_ddp", 2, ranks=2, **place)
    assert {process.returncode for process in processes} == {0}, processes[0].stderr
    told = [json.loads(process.stdout)[0] for process in processes]
    assert len({each["digest"] for each in told}) == 1
    plan = traffic(meeting_ranks.METHODS[0], Shape.of_model(build_model()), workers=2)
    # Each rank's part of a message is a message.
    whole, parts = plan.sent_nbytes(STEPS), [each["sent_bytes"] for each in told]
    assert [sum(parts[:2]), sum(parts[2:])] == [whole, whole]
    assert [each["requests"]["puts"] for each in told] == [plan.puts(STEPS)] * 4


@pytest.mark.slow_cases("5", "8-diloco")
@pytest.mark.parametrize("method", [0, 3], ids=["diloco", "streaming"])
@pytest.mark.parametrize("kill_at", [5, 8])
def test_a_killed_worker_goes_on_from_its_checkpoint_while_the_others_wait(
    tmp_path, method: int, kill_at: int
) -> None:
    def start(worker: int, **more: str) -> Forked:
        own = {"METHODS": str(method), "CHECKPOINT": str(tmp_path / f"{worker}.pt"), **more}
        place = {"THINWIRE_AT": f"file://{tmp_path}/shared/run"}
        case = ("meeting_ranks.py", "train_with_checkpoints")
        (process,) = fork_worker(*case, worker, 2, **place, **own)
        return process

    first, killed = start(0), start(1, KILL_AT=str(kill_at))
    killed.communicate(timeout=60)
    assert killed.returncode < 0
    first, again = ended([first, start(1)])
    told = [first.stdout.strip(), again.stdout.strip()]
    assert told == meeting_ranks.in_one_process(2)[method], first.stderr + again.stderr


@pytest.mark.parametrize("largest", [math.inf, 5], ids=["small", "large"])
def test_old_messages_are_deleted_and_the_latest_stay(largest, tmp_path, monkeypatch) -> None:
    keep, is_large = 3, largest == 5
    monkeypatch.setitem(object_store._LARGEST_NBYTES, "file", largest)
    transports = team(f"file://{tmp_path}", 3, keep=keep)
    rounds(transports, 8)
    # What is read in the last round is deleted at the beginning of the next one; no empty folder
    # is left.
    left = [each.name for each in (tmp_path / "a-run/message/00000000/x").iterdir()]
    assert sorted(left) == [f"{number:08}" for number in range(8 - keep, 9)]
    written = [path for path in tmp_path.rglob("*/x/*/*/*") if path.is_file()]
    assert len(written) == 3 * (keep + 1) * (1 + is_large)
    counts = [t.service_requests for t in transports]
    assert all(c["puts"] == 8 * (1 + is_large) and c["gets"] == 16 for c in counts)
    assert all(c["deletes"] == (8 - keep - 1) * (1 + is_large) for c in counts)


def test_nothing_is_deleted_that_a_worker_may_still_read(store) -> None:
    """Worker 2 takes part in the first round only; the others swap on without it."""
    transports = team(store, 3, keep=1)
    rounds(transports, 1)

    at_once(
        lambda t: [exchange(t, number, to=1 - t.rank).wait() for number in range(2, 8)],
        transports[:2],
    )
    assert len([path for path in names_in(store) if "/x/00000001/" in path]) == 3
    assert not [path for path in names_in(store) if "/x/00000003/" in path]


def test_a_store_that_may_not_be_deleted_from_ends_no_run(s3) -> None:
    """Its keys may write and read."""
    with closing(Proxy(s3, lambda n, line: "403" if line.startswith("POST") else "")) as proxy:
        transports = on_s3("run/undeleted", proxy.endpoint, keep=1)
        rounds(transports, 8)
        assert [t.service_requests["deletes"] for t in transports] == [0, 0]
        assert len(proxy.faults) == 2 * 6
        # What could not be deleted is left; no worker remembers ever more of it.
        assert all(len(t._fixed._written) < 6 for t in transports)


def test_names_of_exchanges_are_names_of_objects() -> None:
    names = ["fragment 0", "fragment-0", "a/b", "a b", "größe", "..", "", "x" * 9]
    made = [name_part(name) for name in names]
    assert len(set(made)) == len(names)
    assert all("/" not in name and name != ".." for name in made)


def loop(transport: Elastic, **fields) -> tw.OuterLoop:
    model = build_model()
    method = tw.presets.diloco(**{"sync_every": 3} | fields)
    return tw.OuterLoop(model, adamw(model), method, transport=transport)


def test_another_run_of_that_name_is_refused(store) -> None:
    at_once(loop, team(store, 2))
    first, _ = team(store, 2, timeout_s=5)
    with pytest.raises(tw.MismatchError, match=r"worker 0 of run 'a-run'.* holds something else"):
        loop(first, sync_every=4)
    # The same worker again, and the same run under another name, are welcome.
    at_once(loop, team(store, 2))
    at_once(lambda t: loop(t, sync_every=4), team(store, 2, run="another"))


def test_workers_of_two_tokens_are_all_told(store) -> None:
    def refused(transport: Elastic) -> None:
        told = f"what worker {1 - transport.rank} sent for the workers' descriptions"
        with pytest.raises(tw.ExchangeError, match=told):
            loop(transport)

    tokens = (SECRET, "another secret of many")
    at_once(refused, [team(store, 2, token=token)[rank] for rank, token in enumerate(tokens)])


def test_what_is_sealed_opens_in_its_own_place_only(store) -> None:
    transports = team(store, 3, token=SECRET)
    rounds(transports, 1)
    # What worker 1 sent, in the place of worker 2.
    moved = read(store, "a-run/message/00000000/x/00000001/0/00001")
    write(store, "a-run/message/00000000/x/00000002/0/00002", moved)
    under_way = [exchange(t, 2) for t in transports[:2]]
    with pytest.raises(tw.ExchangeError, match="worker 2 sent for x in round 2"):
        under_way[0].wait()


def test_a_message_of_another_size_is_refused_by_name() -> None:
    under_way = [exchange(t, nbytes=9 + t.rank) for t in team(memory(), 2)]
    with pytest.raises(tw.ExchangeError, match=r"worker 1 sent for x .* 10 bytes, and 9"):
        under_way[0].wait()


def test_a_worker_that_does_not_come_is_named() -> None:
    (transport, *_) = team(memory(), 3, timeout_s=0.3)
    with pytest.raises(
        tw.errors.ExchangeTimeout, match=r"worker 1, 2 of 3 has put nothing.* older checkpoint"
    ):
        loop(transport)


def test_a_message_that_takes_longer_than_the_timeout_counts(monkeypatch) -> None:
    """500 MB over 5 Mbit/s take 13 minutes, and the timeout is 10."""
    store = memory()
    transports = team(store, 2, timeout_s=0.5)
    obstore = transports[0]._objects.store._obstore

    async def slow(real: Any, store: Any, key: str, *args: Any, **how: Any) -> Any:
        await asyncio.sleep(1.0 if "/x/" in key else 0.0)
        return await real(store, key, *args, **how)

    for name in ("put_async", "get_async"):
        monkeypatch.setattr(obstore, name, partial(slow, getattr(obstore, name)))
    monkeypatch.setattr(fixed, "SLOWEST_BYTES_PER_S", 9 / 2.0)
    for under_way in [exchange(transport) for transport in transports]:
        under_way.wait()
    monkeypatch.setattr(fixed, "SLOWEST_BYTES_PER_S", 1e9)
    with pytest.raises(tw.errors.ExchangeTimeout):
        exchange(transports[0], 2).wait()


def test_a_rule_that_deletes_too_early_is_found(tmp_path) -> None:
    under_way = exchange(team(f"file://{tmp_path}", 2, timeout_s=1.0)[0])
    mine = tmp_path / "a-run" / "message" / "00000000" / "x" / "00000001" / "0" / "00000"
    until(mine.exists)
    mine.unlink()
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"has put there is gone.* lifecycle rule"):
        under_way.wait()


def test_descriptions_that_cannot_work_are_refused_before_a_folder_is_made(tmp_path) -> None:
    for fields, match in (
        ({"worker": 2}, "worker 2 of 2"),
        ({"worker": -1}, "worker -1 of 2"),
        ({"worker": None}, "worker None of 2"),
        ({"identity": "a"}, "call worker 0 'a'"),
        ({"store_options": {"region": "here"}}, "use region for the object store"),
        *(({"run": name}, f"call a run '{name}'") for name in ("", "a/b", "..")),
        ({"token": "short"}, "5 characters"),
    ):
        with pytest.raises(tw.ConfigurationError, match=match):
            Elastic(f"file://{tmp_path}/r", **{"worker": 0, "workers": 2, "run": "r", **fields})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"keep": 3}, r"use keep in a run without workers=K.*do: leave it out, or pass workers=K"),
        *(
            ({"workers": 2, "worker": 0, **given}, rf"use {told} in a run with workers=K")
            for given, told in (
                ({"least_wait_s": 10.0}, "least_wait_s"),
                ({"snapshot_after": 4.0, "cache": Path("here")}, "snapshot_after, cache"),
                ({"options": ElasticOptions(patience=1.0, timeout_s=9.0)}, "patience"),
                ({"options": ElasticOptions(min_workers=2)}, "min_workers"),
            )
        ),
    ],
)
def test_what_a_run_of_this_kind_would_ignore_is_refused(tmp_path, given, told: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=told):
        Elastic(f"file://{tmp_path}/new", run="a-run", **given)
    assert not (tmp_path / "new").exists()


def test_closing_ends_what_is_under_way_promptly() -> None:
    (transport, _) = team(memory(), 2, timeout_s=600)
    under_way = exchange(transport)
    time.sleep(0.2)
    with promptly(60):
        transport.close()
        with pytest.raises(tw.ExchangeError, match=r"x in round 1.*closed"):
            under_way.wait()
    with pytest.raises(tw.ExchangeError, match="closed"):
        exchange(transport).wait()


def test_an_unused_transport_ends_its_thread() -> None:
    before = threading.active_count()
    rounds(team(memory(), 2), 1)
    until(lambda: (gc.collect(), threading.active_count() <= before)[1])
