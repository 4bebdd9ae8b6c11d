"""The healing server, what it keeps of the last rounds, and fetching from it."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_snapshot import pack_records

from elastic_http import (
    DIALER,
    OK,
    OTHER,
    TOKEN,
    bits,
    eventually,
    other_program,
    record,
    same,
    serving,
    versions,
)
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.healing import (
    HealingServer,
    RoundLog,
    fetch_position,
    fetch_records,
    fetch_snapshot,
)
from thinwire.elastic.https import HttpReply, send_request
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError
from thinwire.membership import Progress, RoundRecord, Snapshot


class Worker:
    """A state of which every tensor and fact is one number, changed by a thread or by hand."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = 0
        self.tensors = {"a": torch.zeros(50_000), "b": torch.zeros(7, dtype=torch.bfloat16)}
        self.captures = 0
        self.helped: list[str] = []
        self.round_log = RoundLog(1 << 20)

    def step(self) -> None:
        with self.lock:
            self.version += 1
            for tensor in self.tensors.values():
                tensor.fill_(self.version % 128)
            self.round_log.append(record(self.version, 3, 5))

    def capture(self) -> Snapshot:
        with self.lock:
            self.captures += 1
            tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
            return Snapshot(facts={"version": self.version}, tensors=tensors)

    def position(self) -> Progress:
        return Progress(version=self.version, step=10 * self.version, digest=f"{self.version:x}")


@contextmanager
def healing(worker: Worker, **changes: object) -> Iterator[tuple[HealingServer, str]]:
    options = {"capture": worker.capture, "position": worker.position, **changes}
    server = HealingServer(
        TOKEN,
        options["capture"],
        options["position"],
        worker.round_log,
        host="127.0.0.1",
        on_helped=worker.helped.append,
    )
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        server.close()


def snapshot_of(address: str, who: str = "new", **options: object) -> Snapshot:
    asked = {"largest": 1 << 20, "timeout_s": 5.0, **options}
    return fetch_snapshot(DIALER, address, who=who, **asked)


def records_of(address: str, after: int, **options: object) -> list[RoundRecord] | None:
    asked = {"largest": 1 << 20, "timeout_s": 5.0, "who": "new", **options}
    return fetch_records(DIALER, address, after, **asked)


def test_a_newcomer_gets_position_and_state() -> None:
    worker = Worker()
    worker.step()
    with healing(worker) as (_, address):
        assert fetch_position(DIALER, address) == worker.position()
        found = snapshot_of(address)
        assert found.facts == {"version": 1}
        assert {n: bits(t) for n, t in found.tensors.items()} == {
            n: bits(t) for n, t in worker.tensors.items()
        }
        assert eventually(lambda: worker.helped == ["new"])


def test_several_newcomers_cost_one_copy() -> None:
    worker = Worker()
    with healing(worker) as (server, address):
        found: list[Snapshot] = []
        threads = [
            threading.Thread(target=lambda: found.append(snapshot_of(address))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert worker.captures == 1
        server.release()  # still there
        snapshot_of(address)
        assert worker.captures == 1
        worker.step()
        assert snapshot_of(address).facts == {"version": 1}
        assert worker.captures == 2


def test_another_digest_of_the_same_version_is_captured_again() -> None:
    worker, digest = Worker(), ["a"]
    position = lambda: Progress(version=0, step=0, digest=digest[0])  # noqa: E731
    with healing(worker, position=position) as (_, address):
        snapshot_of(address)
        digest[0] = "b"
        snapshot_of(address)
        assert worker.captures == 2


@pytest.mark.parametrize("asks", ["release", "position", "records"])
def test_the_copy_is_freed_once_the_worker_moved_on(asks: str) -> None:
    worker = Worker()
    with healing(worker) as (server, address):
        snapshot_of(address)
        assert server._cache._parts
        worker.step()
        match asks:
            case "release":
                server.release()
            case "position":
                fetch_position(DIALER, address)
            case _:
                records_of(address, 0)
        assert not server._cache._parts


def test_a_capture_that_waits_for_the_worker_does_not_make_the_worker_wait() -> None:
    worker, go, began = Worker(), threading.Event(), threading.Event()

    def capture() -> Snapshot:
        began.set()
        assert go.wait(5)
        return worker.capture()

    with healing(worker, capture=capture) as (server, address):
        newcomer = threading.Thread(target=lambda: snapshot_of(address))
        newcomer.start()
        assert began.wait(5)
        server.release()
        assert fetch_position(DIALER, address).version == 0
        go.set()
        newcomer.join()


def test_a_state_is_of_one_version_though_the_worker_trains() -> None:
    worker, stop = Worker(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            worker.step()

    thread = threading.Thread(target=train)
    with healing(worker) as (_, address):
        thread.start()
        try:
            found = [snapshot_of(address) for _ in range(10)]
        finally:
            stop.set()
            thread.join()
    seen = [snapshot.facts["version"] for snapshot in found]
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    for snapshot in found:
        for tensor in snapshot.tensors.values():
            assert tensor.unique().tolist() == [snapshot.facts["version"] % 128]


def test_the_rounds_that_went_by_meanwhile_are_fetched() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        for _ in range(4):
            worker.step()
        assert records_of(address, 4, who="idle") == []
        found = records_of(address, 1)
        assert found is not None
        assert all(map(same, found, worker.round_log.after(1) or []))
        assert versions(found) == [2, 3, 4]
        assert eventually(lambda: worker.helped == ["new"])


def test_rounds_that_are_gone_or_too_large_are_none() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        for _ in range(3):
            worker.step()
        assert records_of(address, 0, largest=30) is None
        worker.round_log.clear()
        assert records_of(address, 1) is None
        assert worker.helped == []


def test_an_empty_log_has_all_records_for_its_own_version() -> None:
    worker = Worker()
    worker.step()
    worker.round_log.clear()
    with healing(worker) as (_, address):
        assert records_of(address, 1) == []
        assert records_of(address, 0) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"who": ""}',
        b'{"who": 3}',
        b'{"who": "new", "after": "1", "largest": 1}',
        b'{"who": "new", "after": true, "largest": 1}',
        b'{"who": "new", "after": 1}',
        b"[" * 100_000,
        json.dumps({"who": "x" * 201}).encode(),
    ],
)
def test_requests_of_another_form_are_refused(body: bytes) -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        with pytest.raises(MismatchError, match="has no identity"):
            send_request(DIALER, address, "/records", body=body)
        if b"new" not in body:
            with pytest.raises(MismatchError, match="has no identity"):
                send_request(DIALER, address, "/state", body=body)
    assert worker.captures == 0


def test_a_capture_that_fails_says_so_and_the_next_one_works() -> None:
    worker, failures = Worker(), [RuntimeError("out of memory")]

    def capture() -> Snapshot:
        if failures:
            raise failures.pop()
        return worker.capture()

    with healing(worker, capture=capture) as (_, address):
        with pytest.raises(ExchangeError, match="RuntimeError: out of memory"):
            snapshot_of(address)
        assert snapshot_of(address).facts == {"version": 0}


def test_another_token_gets_no_state() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        with pytest.raises(MismatchError):
            fetch_snapshot(Dialer(OTHER), address, who="new", largest=1 << 20, timeout_s=5)
        with pytest.raises(MismatchError):
            fetch_position(Dialer(OTHER), address)
    assert worker.captures == 0


def test_a_peer_that_dies_in_the_middle_is_noticed_soon() -> None:
    pieces = [OK, b"Content-Length: 1000000\r\n\r\n", bytes(500_000)]
    began = time.monotonic()
    with (
        other_program(*pieces) as address,
        pytest.raises(ExchangeError, match="it sent 500000 bytes"),
    ):
        snapshot_of(address)
    assert time.monotonic() - began < 2
    with other_program(*pieces, silent_s=10) as address, pytest.raises(ExchangeTimeout):
        snapshot_of(address, timeout_s=0.2)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "body",
    [b"[]", b"3", b"{}", b"null"]
    + [b'{"version": %s, "step": 1, "digest": ""}' % wrong for wrong in (b'"x"', b"Infinity")],
)
def test_an_answer_that_is_not_a_position_is_refused(body: bytes) -> None:
    with (
        serving({("POST", "/position"): lambda _: HttpReply(body=body)}) as port,
        pytest.raises(MismatchError, match="its position is"),
    ):
        fetch_position(DIALER, f"127.0.0.1:{port}")


@pytest.mark.parametrize("found", [[2, 3], [1, 3], [1, 1], [0]])
def test_rounds_that_do_not_follow_are_refused(found: list[int]) -> None:
    body = pack_records([record(version, 1) for version in found])
    with (
        serving({("POST", "/records"): lambda _: HttpReply(body=body)}) as port,
        pytest.raises(MismatchError, match="its rounds after 0"),
    ):
        records_of(f"127.0.0.1:{port}", 0)


def test_a_log_gives_what_is_missing() -> None:
    log = RoundLog(1000)
    assert log.after(0) is None
    for version in (4, 5, 6):
        log.append(record(version, 1))
    assert versions(log.after(3)) == [4, 5, 6]
    assert versions(log.after(5)) == [6]
    assert versions(log.after(6)) == []
    assert versions(log.after(9)) == []
    assert versions(log.after(2)) is None


def test_a_log_drops_the_oldest_first() -> None:
    log = RoundLog(10)
    for version in (1, 2, 3):
        log.append(record(version, 2, 3))
    assert versions(log.after(0)) is None
    assert versions(log.after(1)) == [2, 3]
    log.append(record(4, 11))
    assert versions(log.after(3)) is None
    assert versions(log.after(4)) == []
    log.append(record(5, 10))
    assert versions(log.after(4)) == [5]


def test_a_log_of_small_rounds_is_bounded_too() -> None:
    log = RoundLog(10)
    for version in range(1, 1030):
        log.append(record(version))
    assert len(log.after(5) or []) == 1024
    assert log.after(4) is None


@pytest.mark.parametrize("next_version", [2, 3, 5, 1])
def test_a_log_starts_again_where_the_sequence_breaks(next_version: int) -> None:
    log = RoundLog(100)
    for version in (2, 3, next_version):
        log.append(record(version, 1))
    assert versions(log.after(next_version - 1)) == [next_version]
    assert versions(log.after(next_version - 2)) is None


def test_a_cleared_log_is_empty_and_begins_anywhere() -> None:
    log = RoundLog(2)
    log.append(record(1, 2))
    log.clear()
    assert log.after(0) is None
    assert log.after(1) is None
    log.append(record(8, 1))
    log.append(record(9, 1))
    assert versions(log.after(7)) == [8, 9]


def test_a_log_keeps_copies() -> None:
    buffer = torch.arange(10, dtype=torch.uint8)
    facts = {"who": ["a"]}
    log = RoundLog(100)
    messages = [buffer[2:4], buffer[::3], buffer[:0]]
    log.append(RoundRecord(version=1, facts=facts, messages=messages))
    buffer.zero_()
    facts["who"].append("b")
    (kept,) = log.after(0) or []
    assert [message.tolist() for message in kept.messages] == [[2, 3], [0, 3, 6, 9], []]
    assert kept.facts == {"who": ["a"]}
    assert all(message.is_contiguous() for message in kept.messages)
    assert kept.messages[0].untyped_storage().nbytes() == 2


def test_a_log_may_be_read_while_it_is_written() -> None:
    log = RoundLog(50)
    stop = threading.Event()
    broken: list[object] = []

    def read() -> None:
        while not stop.is_set():
            found = log.after(0)
            found = log.after(seen[-1]) if found is None else found
            steps = versions(found) or [1]
            if steps != list(range(steps[0], steps[0] + len(steps))):
                broken.append(steps)

    seen = [0]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for version in range(1, 500):
            log.append(record(version, 7))
            seen.append(max(0, version - 3))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not broken
