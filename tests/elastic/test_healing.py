"""The healing server, what it keeps of the last rounds, and fetching from it."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_snapshot import pack_records

from elastic_http import DIALER, OTHER, TOKEN, bits, eventually, record, same, serving, versions
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.healing import (
    HealingServer,
    RoundLog,
    fetch_position,
    fetch_records,
    fetch_snapshot,
)
from thinwire.elastic.https import HttpReply, send_request
from thinwire.errors import ExchangeError, MismatchError
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
    given = (TOKEN, options["capture"], options["position"], worker.round_log)
    server = HealingServer(*given, host="127.0.0.1", on_helped=worker.helped.append)
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        server.close()


def snapshot_of(address: str, *, dialer: Dialer = DIALER, timeout_s: float = 5.0) -> Snapshot:
    return fetch_snapshot(dialer, address, who="new", largest=1 << 20, timeout_s=timeout_s)


def records_of(address: str, after: int, **options: object) -> list[RoundRecord] | None:
    asked = {"largest": 1 << 20, "timeout_s": 5.0, "who": "new", **options}
    return fetch_records(DIALER, address, after, **asked)


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


def test_the_rounds_that_went_by_meanwhile_are_fetched_unless_they_are_gone_or_too_large() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        for _ in range(4):
            worker.step()
        assert records_of(address, 4, who="idle") == []
        assert records_of(address, 0, largest=30) is None
        assert worker.helped == []
        found = records_of(address, 1)
        assert found is not None
        assert all(map(same, found, worker.round_log.after(1) or []))
        assert versions(found) == [2, 3, 4]
        assert eventually(lambda: worker.helped == ["new"])
        worker.round_log.clear()
        assert records_of(address, 4) == []
        assert records_of(address, 3) is None


def test_a_capture_that_waits_or_fails_stops_neither_the_worker_nor_the_next_one() -> None:
    worker, go, began = Worker(), threading.Event(), threading.Event()
    failures = [RuntimeError("out of memory")]

    def capture() -> Snapshot:
        began.set()
        assert go.wait(5)
        if failures:
            raise failures.pop()
        return worker.capture()

    with healing(worker, capture=capture) as (server, address), ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(snapshot_of, address)
        assert began.wait(5)
        server.release()
        assert fetch_position(DIALER, address).version == 0
        go.set()
        with pytest.raises(ExchangeError, match="RuntimeError: out of memory"):
            newcomer.result(5)
        assert snapshot_of(address).facts == {"version": 0}


def test_a_log_gives_what_is_missing_and_drops_the_oldest_first() -> None:
    log = RoundLog(10)
    assert log.after(0) is None
    for version in (1, 2, 3):
        log.append(record(version, 2, 3))
    found = [versions(log.after(version)) for version in (0, 1, 2, 3, 9)]
    assert found == [None, [2, 3], [3], [], []]
    log.append(record(4, 11))
    assert [versions(log.after(version)) for version in (3, 4)] == [None, []]
    log.append(record(5, 10))
    assert versions(log.after(4)) == [5]
    log.clear()
    assert (log.after(0), log.after(4)) == (None, None)
    for version in range(8, 1037):  # a log of small rounds is bounded, too
        log.append(record(version))
    assert len(log.after(12) or []) == 1024
    assert log.after(11) is None


def test_several_newcomers_get_position_and_state_and_cost_one_copy() -> None:
    worker, digest = Worker(), ["a"]
    worker.step()
    position = lambda: replace(worker.position(), digest=digest[0])  # noqa: E731
    with healing(worker, position=position) as (server, address):
        assert fetch_position(DIALER, address) == position()
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: snapshot_of(address), range(3)))
        for snapshot in found:
            assert snapshot.facts == {"version": 1}
            assert {n: bits(t) for n, t in snapshot.tensors.items()} == {
                n: bits(t) for n, t in worker.tensors.items()
            }
        assert eventually(lambda: worker.helped == ["new"] * 3)
        server.release()  # still there
        snapshot_of(address)
        assert worker.captures == 1
        digest[0] = "b"  # of the same version
        snapshot_of(address)
        assert worker.captures == 2
        worker.step()
        assert snapshot_of(address).facts == {"version": 2}
        assert worker.captures == 3
        for call in (snapshot_of, lambda address, dialer: fetch_position(dialer, address)):
            with pytest.raises(MismatchError):
                call(address, dialer=Dialer(OTHER))


def test_a_log_keeps_copies() -> None:
    buffer, facts, log = torch.arange(10, dtype=torch.uint8), {"who": ["a"]}, RoundLog(100)
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
    log, stop, seen = RoundLog(50), threading.Event(), [0]

    def read() -> None:
        while not stop.is_set():
            found = log.after(0)
            found = log.after(seen[-1]) if found is None else found
            steps = versions(found) or [1]
            assert steps == list(range(steps[0], steps[0] + len(steps)))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for version in range(1, 500):
            log.append(record(version, 7))
            seen.append(max(0, version - 3))
        stop.set()
        assert [reader.result(5) for reader in readers] == [None, None]


@pytest.mark.parametrize("next_version", [2, 3, 5, 1])
def test_a_log_starts_again_where_the_sequence_breaks(next_version: int) -> None:
    log = RoundLog(100)
    for version in (2, 3, next_version):
        log.append(record(version, 1))
    assert versions(log.after(next_version - 1)) == [next_version]
    assert versions(log.after(next_version - 2)) is None


def test_requests_of_another_form_are_refused() -> None:
    worker = Worker()
    bodies = [b"", b"\xff", b"[]", b"{}", b'{"who": ""}', b'{"who": 3}', b"[" * 100_000]
    bodies += [json.dumps({"who": "x" * 201}).encode()]
    records = [{"after": "1", "largest": 1}, {"after": True, "largest": 1}, {"after": 1}]
    records = [json.dumps({"who": "new", **asked}).encode() for asked in records]
    with healing(worker) as (_, address):
        paths = [("/records", body) for body in bodies + records] + [("/state", b) for b in bodies]
        for path, body in paths:
            with pytest.raises(MismatchError, match="has no identity"):
                send_request(DIALER, address, path, body=body)
    assert worker.captures == 0


def test_answers_that_are_no_position_or_no_rounds_that_follow_are_refused() -> None:
    said: list[bytes] = []
    answers = {
        ("POST", path): lambda _: HttpReply(body=said[-1]) for path in ("/position", "/records")
    }
    wrong = [b'{"version": %s, "step": 1, "digest": ""}' % each for each in (b'"x"', b"Infinity")]
    with serving(answers) as port:
        for body in (b"[]", b"3", b"{}", b"null", *wrong):
            said.append(body)
            with pytest.raises(MismatchError, match="its position is"):
                fetch_position(DIALER, f"127.0.0.1:{port}")
        for found in ([2, 3], [1, 3], [1, 1], [0]):
            said.append(pack_records([record(version, 1) for version in found]))
            with pytest.raises(MismatchError, match="its rounds after 0"):
                records_of(f"127.0.0.1:{port}", 0)
