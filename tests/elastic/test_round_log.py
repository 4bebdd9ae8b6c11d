"""What is kept of the last rounds."""

import threading

import pytest
import torch

from elastic_http import record, versions
from thinwire.elastic.healing import RoundLog
from thinwire.membership import RoundRecord


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
