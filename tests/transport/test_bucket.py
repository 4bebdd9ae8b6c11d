"""Workers that share an object store: memory, a folder, a real S3 server that makes mistakes."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import bucket_ranks
import thinwire as tw
from forked import Forked
from processes import free_port, rank_environment
from s3_server import Proxy, options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.handshake import announce
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.testing.transports import (
    check_background,
    check_worker,
    gathered,
    payload_of,
    swapped,
)
from thinwire.transport import Bucket, RoundTag, object_store
from thinwire.transport.sealed_objects import name_part
from toy import Team, adamw, build_model, loss

obstore: Any = pytest.importorskip("obstore")

SECRET = "a secret of many characters"
TAG = RoundTag(what="x", round=1)
RANKS = str(Path(__file__).parent.parent / "bucket_ranks.py")


def memory() -> Any:
    return obstore.store.MemoryStore()


def team(store: Any, workers: int, **fields) -> list[Bucket]:
    given = {"run": "a-run", "timeout_s": 20.0, **fields}
    return [Bucket(store, rank=rank, workers=workers, **given) for rank in range(workers)]


def at_once(work: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as threads:
        return [each.result() for each in [threads.submit(one) for one in work]]


def paths(store: Any) -> list[str]:
    return sorted(each["path"] for batch in obstore.list(store) for each in batch)


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_workers_keep_the_contract(workers: int, token: str | None) -> None:
    transports = team(memory(), workers, token=token)
    at_once([lambda t=t: check_worker(t) for t in transports])
    at_once([lambda t=t: check_background(t) for t in transports])


def test_workers_that_share_a_folder_keep_the_contract(tmp_path) -> None:
    at_once([lambda t=t: check_worker(t) for t in team(f"file://{tmp_path}/new", 3)])


def test_workers_of_an_s3_server_keep_the_contract(s3) -> None:
    transports = team("s3://run/contract", 2, options=options_of(s3), token=SECRET)
    at_once([lambda t=t: check_worker(t) for t in transports])
    at_once([lambda t=t: check_background(t) for t in transports])


# -- real processes --------------------------------------------------------------------------------


def environment(url: str, worker: int, workers: int, **more: str) -> dict[str, str]:
    return rank_environment(0, 1, free_port()) | {
        "THINWIRE_BUCKET": url,
        "THINWIRE_RUN": "run",
        "THINWIRE_WORKER": str(worker),
        "THINWIRE_WORKERS": str(workers),
        **more,
    }


def in_aws(endpoint: str) -> dict[str, str]:
    options = options_of(endpoint)
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": options["region"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
    }


def ended(processes: Sequence[Forked], timeout_s: float = 120) -> None:
    try:
        for process in processes:
            process.communicate(timeout=timeout_s)
    finally:
        for process in processes:
            process.kill()


def check_digests(url: str, workers: int, **more: str) -> None:
    processes = [
        Forked((RANKS, "train"), environment(url, worker, workers, **more))
        for worker in range(workers)
    ]
    ended(processes)
    expected = bucket_ranks.in_one_process(workers)
    for worker, process in enumerate(processes):
        assert process.returncode == 0, process.stderr
        told = json.loads(process.stdout)
        assert [each["digest"] for each in told] == [each[worker] for each in expected]
        for method, each in zip(bucket_ranks.METHODS, told, strict=True):
            check_counts(method, workers, worker, each, 28 if "THINWIRE_TOKEN" in more else 0)


def check_counts(
    method: tw.Method, workers: int, worker: int, told: dict[str, Any], added: int
) -> None:
    """Bytes and requests of a run are those of its plan."""
    shape, steps = Shape.of_model(build_model()), bucket_ranks.STEPS
    plan = traffic(method, shape, workers=workers, rank=worker, added_nbytes=added)
    assert told["sent_bytes"] == plan.sent_after(steps)
    assert told["received_bytes"] == plan.received_after(steps)
    assert told["requests"]["puts"] == plan.puts_after(steps)
    assert told["requests"]["gets"] == plan.gets_after(steps)
    assert told["requests"]["deletes"] < told["requests"]["puts"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_processes_that_share_a_folder_reach_the_digests_of_one_process(
    tmp_path, workers: int, token: str | None
) -> None:
    check_digests(f"file://{tmp_path}", workers, **({"THINWIRE_TOKEN": token} if token else {}))
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    # The start of a message's header, and of what a worker says of its run.
    assert [text in written for text in (b"TWIR", b"initial weights")] == [token is None] * 2


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("workers", [2, 4])
def test_processes_that_share_a_bucket_reach_the_digests_of_one_process(s3, workers: int) -> None:
    check_digests(f"s3://run/digests{workers}", workers, THINWIRE_TOKEN=SECRET, **in_aws(s3))


def test_workers_of_two_ddp_ranks_send_everything_once(tmp_path) -> None:
    def start(worker: int, rank: int, port: int) -> Forked:
        own = environment(f"file://{tmp_path}", worker, 2) | rank_environment(rank, 2, port)
        return Forked((RANKS, "train_ddp"), own)

    ports = [free_port(), free_port()]
    processes = [start(worker, rank, ports[worker]) for worker in range(2) for rank in range(2)]
    ended(processes)
    told = [json.loads(process.stdout) for process in processes]
    assert len({each["digest"] for each in told}) == 1, [process.stderr for process in processes]
    plan = traffic(bucket_ranks.METHODS[0], Shape.of_model(build_model()), workers=2)
    # Each rank's part of a message is a message.
    whole, parts = plan.sent_after(9), [each["sent_bytes"] for each in told]
    assert [sum(parts[:2]), sum(parts[2:])] == [whole, whole]
    assert [each["puts"] for each in told] == [plan.puts_after(9)] * 4


# -- a worker that is killed and comes back --------------------------------------------------------


@pytest.mark.slow_cases("5", "8-diloco")
@pytest.mark.parametrize("method", [0, 3], ids=["diloco", "streaming"])
@pytest.mark.parametrize("kill_at", [5, 8])
def test_a_killed_worker_goes_on_from_its_checkpoint_while_the_others_wait(
    tmp_path, method: int, kill_at: int
) -> None:
    def start(worker: int, **more: str) -> Forked:
        own = {"METHOD": str(method), "CHECKPOINT": str(tmp_path / f"{worker}.pt"), **more}
        url = f"file://{tmp_path}/shared"
        return Forked((RANKS, "train_with_checkpoints"), environment(url, worker, 2, **own))

    first, killed = start(0), start(1, KILL_AT=str(kill_at))
    killed.communicate(timeout=60)
    assert killed.returncode < 0
    again = start(1)
    ended([first, again])
    expected = bucket_ranks.in_one_process(2)[method]
    assert [first.stdout.strip(), again.stdout.strip()] == expected, first.stderr + again.stderr


def test_a_worker_that_comes_back_with_other_numbers_is_refused_by_name(tmp_path) -> None:
    def start(worker: int, **more: str) -> Forked:
        own = {"METHOD": "0", "CHECKPOINT": str(tmp_path / f"{worker}.pt"), **more}
        url = f"file://{tmp_path}/shared"
        return Forked((RANKS, "train_with_checkpoints"), environment(url, worker, 2, **own))

    first, killed = start(0, TIMEOUT_S="20"), start(1, KILL_AT="8")
    killed.communicate(timeout=60)
    again = start(1, OTHER="1")
    again.communicate(timeout=60)
    first.kill()
    assert again.returncode == 1
    assert again.stderr.startswith("MismatchError cannot send fragment"), again.stderr
    assert "worker 1 of run 'run'" in again.stderr
    assert "another message of this worker" in again.stderr


@pytest.mark.slow
def test_a_worker_that_comes_back_too_late_is_told(tmp_path) -> None:
    """The others went on without it: their messages since its checkpoint are deleted."""
    transports = team(f"file://{tmp_path}", 2, keep=1, timeout_s=5)

    def rounds(transport: Bucket, count: int) -> None:
        for number in range(1, count + 1):
            tag = RoundTag(what="x", round=number)
            transport.run(gathered(payload_of(transport.rank, 9)), tag).wait()

    at_once([lambda t=t: rounds(t, 6) for t in transports])
    late = Bucket(f"file://{tmp_path}", rank=1, workers=2, run="a-run", timeout_s=0.5)
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"worker 0 of 2 .* older checkpoint"):
        late.run(gathered(payload_of(1, 9)), RoundTag(what="x", round=2)).wait()


# -- what lies there, and what is deleted ----------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_old_messages_are_deleted_and_the_latest_stay(keep: int) -> None:
    store = memory()
    transports = team(store, 3, keep=keep)

    def rounds(transport: Bucket) -> None:
        for number in range(1, 9):
            tag = RoundTag(what="x", round=number)
            transport.run(gathered(payload_of(transport.rank, 9)), tag).wait()

    at_once([lambda t=t: rounds(t) for t in transports])
    left = {path.split("/")[2] for path in paths(store)}
    # What is read in the last round is deleted at the beginning of the next one.
    assert left == {f"{number:08}" for number in range(8 - keep, 9)}
    counts = [t.service_requests for t in transports]
    assert all(c["puts"] == 8 and c["gets"] == 16 for c in counts)
    assert all(c["deletes"] == 8 - keep - 1 for c in counts)


def test_nothing_is_deleted_that_a_worker_may_still_read() -> None:
    """Worker 2 takes part in the first round only; the others swap on without it."""
    store = memory()
    transports = team(store, 3, keep=1)
    one = [t.run(gathered(payload_of(t.rank, 9)), TAG) for t in transports]
    for each in one:
        each.wait()

    def swaps(transport: Bucket) -> None:
        for number in range(2, 8):
            tag = RoundTag(what="x", round=number)
            transport.run(swapped(payload_of(transport.rank, 9), 1 - transport.rank), tag).wait()

    at_once([lambda t=t: swaps(t) for t in transports[:2]])
    assert len([path for path in paths(store) if "/00000001/" in path]) == 3
    assert not [path for path in paths(store) if "/00000003/" in path]


def test_a_folder_keeps_no_empty_folders(tmp_path) -> None:
    transports = team(f"file://{tmp_path}", 2, keep=1)

    def rounds(transport: Bucket) -> None:
        for number in range(1, 31):
            tag = RoundTag(what="x", round=number)
            transport.run(gathered(payload_of(transport.rank, 9)), tag).wait()

    at_once([lambda t=t: rounds(t) for t in transports])
    assert len(list((tmp_path / "a-run" / "x").iterdir())) == 2


def test_a_store_that_may_not_be_deleted_from_ends_no_run(s3) -> None:
    """Its keys may write and read."""

    def fault(count: int, line: str) -> str:
        return "403" if line.startswith("POST") else ""

    proxy = Proxy(s3, fault)
    try:
        transports = team("s3://run/undeleted", 2, keep=1, options=options_of(proxy.endpoint))

        def rounds(transport: Bucket) -> None:
            for number in range(1, 9):
                tag = RoundTag(what="x", round=number)
                transport.run(gathered(payload_of(transport.rank, 9)), tag).wait()

        at_once([lambda t=t: rounds(t) for t in transports])
        assert [t.service_requests["deletes"] for t in transports] == [0, 0]
        assert len(proxy.faults) == 2 * 6
        # What could not be deleted three times is left; no worker remembers ever more of it.
        assert all(len(t._written._messages) < 6 for t in transports)
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_store_that_fails_to_delete_once_is_asked_again(s3) -> None:
    failed: list[str] = []

    def fault(count: int, line: str) -> str:
        if line.startswith("POST") and len(failed) < 2:
            failed.append(line)
            return "503"
        return ""

    proxy = Proxy(s3, fault)
    try:
        transports = team("s3://run/deleted-late", 2, keep=1, options=options_of(proxy.endpoint))

        def rounds(transport: Bucket) -> None:
            for number in range(1, 9):
                tag = RoundTag(what="x", round=number)
                transport.run(gathered(payload_of(transport.rank, 9)), tag).wait()

        at_once([lambda t=t: rounds(t) for t in transports])
        assert [t.service_requests["deletes"] for t in transports] == [6, 6]
    finally:
        proxy.close()


def test_names_of_exchanges_are_names_of_objects() -> None:
    names = ["fragment 0", "fragment-0", "a/b", "a b", "größe", "..", "", "x" * 9]
    made = [name_part(name) for name in names]
    assert len(set(made)) == len(names)
    assert all("/" not in name and name != ".." for name in made)


# -- another run under the same name ---------------------------------------------------------------


BUILDING = threading.Lock()  # torch has one random generator


def loop(transport: Bucket, **fields) -> tw.OuterLoop:
    with BUILDING:
        model = build_model()
    method = tw.presets.diloco(**{"sync_every": 3} | fields)
    return tw.OuterLoop(model, adamw(model), method, transport=transport)


def test_another_run_of_that_name_is_refused() -> None:
    store = memory()
    at_once([lambda t=t: loop(t) for t in team(store, 2)])
    first, _ = team(store, 2, timeout_s=5)
    with pytest.raises(tw.MismatchError, match=r"worker 0 of run 'a-run' .* announced something"):
        loop(first, sync_every=4)
    # The same worker again, and the same run under another name, are welcome.
    at_once([lambda t=t: loop(t) for t in team(store, 2)])
    at_once([lambda t=t: loop(t, sync_every=4) for t in team(store, 2, run="another")])


def test_workers_that_differ_are_all_told() -> None:
    transports = team(memory(), 2)

    def differing(transport: Bucket) -> str:
        with pytest.raises(tw.MismatchError) as found:
            loop(transport, sync_every=4 + transport.rank)
        return str(found.value)

    for said in at_once([lambda t=t: differing(t) for t in transports]):
        assert "method.sync_every" in said
        assert "worker 0 has 4 and worker 1 has 5" in said


def test_another_token_is_refused_by_name() -> None:
    store = memory()
    first = team(store, 2, token=SECRET)[0]
    second = team(store, 2, token="another secret of many")[1]

    def refused(transport: Bucket) -> str:
        with pytest.raises(tw.ExchangeError) as found:
            loop(transport)
        return str(found.value)

    said = at_once([lambda t=t: refused(t) for t in (first, second)])
    assert "what worker 1 sent for the workers' descriptions" in said[0]
    assert "what worker 0 sent for the workers' descriptions" in said[1]


def test_what_is_sealed_opens_in_its_own_place_only() -> None:
    store = memory()
    transports = team(store, 3, token=SECRET)
    for each in [t.run(gathered(payload_of(t.rank, 9)), TAG) for t in transports]:
        each.wait()
    for path in paths(store):
        assert len(bytes(obstore.get(store, path).bytes())) == 9 + 28
    # What worker 1 sent, in the place of worker 2.
    moved = bytes(obstore.get(store, "a-run/x/00000001/0-gather/00001").bytes())
    obstore.put(store, "a-run/x/00000002/0-gather/00002", moved)
    later = RoundTag(what="x", round=2)
    rounds = [t.run(gathered(payload_of(t.rank, 9)), later) for t in transports[:2]]
    with pytest.raises(tw.ExchangeError, match="worker 2 sent for x in round 2"):
        rounds[0].wait()


def test_a_message_of_another_size_is_refused_by_name() -> None:
    transports = team(memory(), 2)
    rounds = [t.run(gathered(payload_of(t.rank, 9 + t.rank)), TAG) for t in transports]
    with pytest.raises(tw.ExchangeError, match=r"worker 1 sent for x .* 10 bytes, and 9"):
        rounds[0].wait()


# -- stores that fail ------------------------------------------------------------------------------


def trained(transports: Sequence[Bucket]) -> list[str]:
    def train(transport: Bucket) -> str:
        with BUILDING:
            model = build_model()
        optimizer = adamw(model)
        method = tw.presets.diloco(sync_every=3, exchange=tw.ReduceScatter())
        outer = tw.OuterLoop(model, optimizer, method, transport=transport)
        for step in range(9):
            loss(model, step, transport.rank, workers=2).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
        return outer.digest()

    return at_once([lambda t=t: train(t) for t in transports])


def expected() -> list[str]:
    method = tw.presets.diloco(sync_every=3, exchange=tw.ReduceScatter())
    return [loop.digest() for loop in Team(method, adamw, 2).train(9).loops]


@pytest.mark.slow_cases("409", "50", "c", "lost")
@pytest.mark.parametrize("fault", ["503", "500", "409", "cut", "lost", "half"])
def test_what_fails_in_passing_changes_nothing(s3, fault: str) -> None:
    """Every third request, of all kinds, by both workers."""
    proxy = Proxy(s3, lambda count, line: fault if count % 3 == 0 else "")
    try:
        url = f"s3://run/fault-{fault}"
        transports = team(url, 2, options=options_of(proxy.endpoint), token=SECRET)
        assert trained(transports) == expected()
        assert len(proxy.faults) > 10
        assert sum(t.service_requests["retries"] for t in transports) > (fault != "409") * 5
        # What was asked again is counted apart.
        assert [t.service_requests["puts"] for t in transports] == [6, 6]
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_slow_store_delays_and_changes_nothing(s3) -> None:
    proxy = Proxy(s3, lambda count, line: "late" if count % 7 == 0 else "")
    try:
        transports = team("s3://run/slow", 2, options=options_of(proxy.endpoint))
        assert trained(transports) == expected()
        assert "late" in proxy.faults
    finally:
        proxy.close()


@pytest.mark.slow
def test_silence_is_broken_off_and_asked_again(s3, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_REQUEST_S", 0.3)
    proxy = Proxy(s3, lambda count, line: "late" if count in (5, 8) else "")
    try:
        transports = team("s3://run/silent", 2, options=options_of(proxy.endpoint))
        assert trained(transports) == expected()
        assert sum(t.service_requests["retries"] for t in transports) >= 2
    finally:
        proxy.close()


def test_a_store_that_is_gone_is_an_error_within_the_timeout(caplog) -> None:
    options = options_of(f"http://127.0.0.1:{free_port()}")
    (transport, _) = team("s3://run/gone", 2, options=options, timeout_s=1.0)
    started_s = time.monotonic()
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"s3://run/gone; because .*; do: see that"):
        loop(transport)
    assert time.monotonic() - started_s < 10
    assert "still trying to write a-run/" in caplog.text


def test_keys_that_may_not_write_are_an_error_at_once(s3) -> None:
    for options in (options_of(s3, key="reader"), options_of(s3, secret="wrong")):
        (transport, _) = team("s3://run/reader", 2, options=options)
        started_s = time.monotonic()
        with pytest.raises(tw.ExchangeError, match=r"403 .* do: pass keys that may put"):
            loop(transport)
        assert time.monotonic() - started_s < 10


@pytest.mark.parametrize("status", ["400", "301"])
def test_a_request_that_is_wrong_is_an_error_at_once(s3, status: str) -> None:
    """As of another region, or of an endpoint that is no store's."""
    proxy = Proxy(s3, lambda count, line: status)
    try:
        (transport, _) = team("s3://run", 2, options=options_of(proxy.endpoint))
        started_s = time.monotonic()
        with pytest.raises(tw.ExchangeError, match="correct the URL, the endpoint, the region"):
            loop(transport)
        assert time.monotonic() - started_s < 10
    finally:
        proxy.close()


def test_a_store_that_says_it_is_there_and_has_none_ends_in_time(s3) -> None:
    proxy = Proxy(s3, lambda count, line: "409" if line.startswith("PUT") else "")
    try:
        (transport, _) = team("s3://run/never", 2, options=options_of(proxy.endpoint), timeout_s=2)
        started_s = time.monotonic()
        with pytest.raises(tw.errors.ExchangeTimeout, match="says that it is there and has none"):
            loop(transport)
        assert time.monotonic() - started_s < 10
    finally:
        proxy.close()


def test_a_bucket_that_does_not_exist_is_an_error_at_once(s3) -> None:
    proxy = Proxy(s3, lambda count, line: "404" if line.startswith("PUT") else "")
    try:
        (transport, _) = team("s3://absent", 2, options=options_of(proxy.endpoint))
        with pytest.raises(tw.ExchangeError, match="create the bucket, or correct its name"):
            loop(transport)
    finally:
        proxy.close()


def test_a_worker_that_does_not_come_is_named() -> None:
    (transport, *_) = team(memory(), 3, timeout_s=0.3)
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"worker 1, 2 of 3 has put nothing"):
        loop(transport)


def test_a_rule_that_deletes_too_early_is_found(tmp_path) -> None:
    (transport, _) = team(f"file://{tmp_path}", 2, timeout_s=1.0)
    under_way = transport.run(gathered(payload_of(0, 9)), TAG)
    mine = tmp_path / "a-run" / "x" / "00000001" / "0-gather" / "00000"
    until_s = time.monotonic() + 5
    while not mine.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    mine.unlink()
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"has put there is gone.* lifecycle rule"):
        under_way.wait()


def test_a_full_disk_is_an_error_at_once_and_leaves_nothing_half_visible(tmp_path) -> None:
    code = (
        "import resource, signal, sys, torch\n"
        "import thinwire as tw\n"
        "from thinwire.testing.transports import gathered\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"t = tw.transport.Bucket('file://{tmp_path}', rank=0, workers=2, run='r', timeout_s=60)\n"
        "tag = tw.transport.RoundTag(what='x', round=1)\n"
        "payload = torch.zeros(70_001, dtype=torch.uint8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try: t.run(gathered(payload), tag).wait()\n"
        "except tw.ExchangeError as error: print(type(error).__name__, error)\n"
    )
    (script := tmp_path.with_suffix(".py")).write_text(code)
    process = Forked((str(script),), dict(os.environ))
    started_s = time.monotonic()
    said, error = process.communicate(timeout=60)
    assert said.startswith("ExchangeError cannot write r/x/00000001/0-gather/00000"), said + error
    assert "File too large" in said
    assert "make room" in said
    assert time.monotonic() - started_s < 30
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_folder_that_may_not_be_written_is_an_error_at_once(tmp_path) -> None:
    if os.getuid() == 0:
        (tmp_path / "a-run").write_text("in the way")
    else:
        tmp_path.chmod(0o500)
    (transport, _) = team(f"file://{tmp_path}", 2)
    started_s = time.monotonic()
    with pytest.raises(tw.ExchangeError, match="cannot write a-run/"):
        loop(transport)
    assert time.monotonic() - started_s < 10


# -- descriptions that cannot work -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": 2}, "worker 2 of 2"),
        ({"rank": -1}, "worker -1 of 2"),
        ({"run": ""}, "call a run ''"),
        ({"run": "a/b"}, "call a run 'a/b'"),
        ({"run": ".."}, "call a run"),
        ({"keep": 0}, "keep=0"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"token": "short"}, "5 characters"),
        ({"url": "ftp://nowhere"}, "open the object store ftp://nowhere"),
        ({"url": "s3://b", "options": {"colour": "red"}}, "open the object store s3://b"),
    ],
)
def test_descriptions_that_cannot_work_are_refused(fields: dict[str, Any], match: str) -> None:
    given = {"url": "memory://", "rank": 0, "workers": 2, "run": "r"} | fields
    with pytest.raises(tw.ConfigurationError, match=match):
        Bucket(given.pop("url"), **given)


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(tw.ConfigurationError, match=r"pip install 'thinwire\[bucket\]'"):
        Bucket("memory://", rank=0, workers=2, run="r")


def test_the_environment_says_where(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("THINWIRE_BUCKET", f"file://{tmp_path}")
    with pytest.raises(tw.ConfigurationError, match="THINWIRE_WORKER is not set"):
        tw.transport.default_transport()
    for name, value in (("WORKER", "1"), ("WORKERS", "x"), ("RUN", "r")):
        monkeypatch.setenv(f"THINWIRE_{name}", value)
    with pytest.raises(tw.ConfigurationError, match="are '1' and 'x'"):
        tw.transport.default_transport()
    monkeypatch.setenv("THINWIRE_WORKERS", "2")
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    transport = tw.transport.default_transport()
    assert isinstance(transport, Bucket)
    assert (transport.rank, transport.world_size, transport.added_nbytes) == (1, 2, 28)
    assert transport._run == "r"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert Bucket.from_environment()._run == "r.3of4"
    monkeypatch.setenv("THINWIRE_MEET", "127.0.0.1:1")
    with pytest.raises(tw.ConfigurationError, match="both THINWIRE_BUCKET and THINWIRE_MEET"):
        tw.transport.default_transport()


# -- the end ---------------------------------------------------------------------------------------


def test_closing_ends_what_is_under_way_promptly() -> None:
    (transport, _) = team(memory(), 2, timeout_s=600)
    under_way = transport.run(gathered(payload_of(0, 9)), TAG)
    time.sleep(0.2)
    started_s = time.monotonic()
    transport.close()
    with pytest.raises(tw.ExchangeError, match=r"x in round 1.*closed"):
        under_way.wait()
    assert time.monotonic() - started_s < 2
    with pytest.raises(tw.ExchangeError, match="closed"):
        transport.run(gathered(payload_of(0, 9)), TAG)


def test_an_unused_bucket_ends_its_thread() -> None:
    before = threading.active_count()
    transports = team(memory(), 2)
    for each in [t.run(gathered(payload_of(t.rank, 9)), TAG) for t in transports]:
        each.wait()
    del transports, each
    until_s = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < until_s
        gc.collect()
        time.sleep(0.01)


def test_a_process_that_ends_with_an_exchange_under_way_ends(tmp_path) -> None:
    code = (
        "import torch, thinwire as tw\n"
        "from thinwire.testing.transports import gathered\n"
        f"t = tw.transport.Bucket('file://{tmp_path}', rank=0, workers=2, run='r')\n"
        "tag = tw.transport.RoundTag(what='x', round=1)\n"
        "t.run(gathered(torch.zeros(9, dtype=torch.uint8)), tag)\n"
    )
    (script := tmp_path.with_suffix(".py")).write_text(code)
    process = Forked((str(script),), dict(os.environ))
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_payloads_of_bf16_and_zeros_arrive() -> None:
    transports = team(memory(), 2, token=SECRET)
    for payload in (torch.zeros(0, dtype=torch.uint8), torch.ones(3).bfloat16().view(torch.uint8)):
        tag = RoundTag(what=f"{payload.numel()}", round=1)
        for each in [t.run(gathered(payload), tag) for t in transports]:
            assert all(torch.equal(theirs, payload) for theirs in each.wait())


def test_a_store_that_pays_no_heed_to_conditions_is_refused(monkeypatch) -> None:
    store = memory()
    transports = team(store, 2)
    honest = transports[0]._store._obstore.put_async

    async def heedless(store, key, payload, *, mode="overwrite", **more):
        return await honest(store, key, payload, mode="overwrite", **more)

    monkeypatch.setattr(transports[0]._store._obstore, "put_async", heedless)
    with pytest.raises(tw.ExchangeError, match="in place of another one"):
        transports[0].run(announce(b"card"), TAG).wait()
    assert not [path for path in paths(store) if "check" in path]


@pytest.mark.parametrize("endpoint", ["", "localhost:9000", "https://", "ftp://host"])
def test_an_endpoint_that_is_no_address_is_named(monkeypatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(tw.ConfigurationError, match="AWS_ENDPOINT_URL"):
        team("s3://a/b", 2)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(tw.ConfigurationError, match="endpoint"):
        team("s3://a/b", 2, options={"endpoint": endpoint})
    team("memory://", 2, options={})
