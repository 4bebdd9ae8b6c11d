import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from thinwire.elastic import http_server, signed_http
from thinwire.elastic.healing import (
    HealingServer,
    fetch_position,
    fetch_records,
    fetch_snapshot,
)
from thinwire.elastic.http_server import LARGEST_REQUEST
from thinwire.elastic.round_log import RoundLog
from thinwire.elastic.shared_state import Progress, RoundRecord, Snapshot
from thinwire.elastic.signed_http import SignedReply, SignedServer, ask, ask_json, json_answer
from thinwire.elastic.snapshot import pack, pack_records, unpack, unpack_records
from thinwire.elastic.token import Token
from thinwire.errors import (
    ConfigurationError,
    ExchangeError,
    ExchangeTimeout,
    MismatchError,
    ThinwireError,
)

TOKEN = Token("a secret of many characters")
OTHER = Token("another secret of many characters")
TENSORS = {
    "none": torch.empty(0),
    "none of rows": torch.empty(0, 7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "one": torch.ones(1, dtype=torch.int64),
    "prime": torch.randn(13).bfloat16(),
    "strided": torch.arange(30.0).view(5, 6)[:, ::2],
    "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "ü": torch.randn(2, 1, 3).half(),
}
SNAPSHOT = Snapshot(facts={"version": 7, "schedule": [1, 2.5, None, "ü"]}, tensors=TENSORS)


def bits(tensor: Tensor) -> tuple[torch.dtype, list[int], bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, list(tensor.shape), raw


def record(version: int, *sizes: int) -> RoundRecord:
    messages = [torch.full((size,), version % 251, dtype=torch.uint8) for size in sizes]
    return RoundRecord(version=version, facts={"round": version}, messages=messages)


def same(left: RoundRecord, right: RoundRecord) -> bool:
    return (left.version, left.facts, [bits(m) for m in left.messages]) == (
        right.version,
        right.facts,
        [bits(m) for m in right.messages],
    )


# Snapshots and records as bytes


def test_a_snapshot_comes_back_bit_for_bit() -> None:
    found = unpack(pack(SNAPSHOT))
    assert found.facts == SNAPSHOT.facts
    assert {name: bits(found.tensors[name]) for name in found.tensors} == {
        name: bits(tensor) for name, tensor in TENSORS.items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_format_is_that_of_safetensors(seed: int) -> None:
    from safetensors.torch import load, save

    torch.manual_seed(seed)
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    theirs = load(pack(SNAPSHOT))
    assert {name: bits(theirs[name]) for name in theirs} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    texts = {"format": "thinwire snapshot 1", "facts": '{"version": 1}'}
    ours = unpack(save(tensors, metadata=texts)).tensors
    assert {name: bits(ours[name]) for name in ours} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_an_unpacked_snapshot_lies_in_the_bytes_it_came_in() -> None:
    data = bytearray(pack(Snapshot(facts={"version": 0}, tensors={"w": torch.zeros(3)})))
    found = unpack(data).tensors["w"]
    data[-1] = 0x40  # the top byte of the last number, 2.0
    assert found.tolist() == [0, 0, 2]


def test_an_unpacked_snapshot_of_constant_bytes_can_be_written_to() -> None:
    data = pack(Snapshot(facts={"version": 0}, tensors={"w": torch.zeros(3)}))
    unpack(data).tensors["w"].fill_(1)
    assert unpack(data).tensors["w"].tolist() == [0, 0, 0]


def test_a_snapshot_without_tensors_travels() -> None:
    assert unpack(pack(Snapshot(facts={"version": 0}, tensors={}))).tensors == {}


@pytest.mark.parametrize(
    ("facts", "tensors"),
    [
        ({}, {}),
        ({"version": True}, {}),
        ({"version": -1}, {}),
        ({"version": 1, "why": {1, 2}}, {}),
        ({"version": 1}, {"w": torch.zeros(1, dtype=torch.complex64)}),
        ({"version": 1}, {"__metadata__": torch.zeros(1)}),
        ({"version": 1, "long": "x" * (16 << 20)}, {}),
    ],
)
def test_what_cannot_be_packed_is_said(facts: dict, tensors: dict) -> None:
    with pytest.raises(ConfigurationError):
        pack(Snapshot(facts=facts, tensors=tensors))


def test_records_come_back() -> None:
    records = [record(3, 0, 1, 13), record(4), record(5, 7)]
    records[0].messages[2][:] = torch.arange(26, dtype=torch.uint8)[::2]
    found = unpack_records(pack_records(records))
    assert len(found) == 3
    assert all(map(same, found, records))
    assert unpack_records(pack_records([])) == []


@pytest.mark.parametrize("message", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
def test_a_message_is_a_vector_of_bytes(message: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="a message is"):
        pack_records([RoundRecord(version=1, facts={}, messages=[message])])


def file(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def described(**changes: object) -> dict:
    told = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    texts = {"format": "thinwire snapshot 1", "facts": '{"version": 1}'}
    return {"__metadata__": texts, "w": {key: told[key] for key in told if told[key] is not None}}


def with_texts(**texts: object) -> dict:
    texts = {"format": "thinwire snapshot 1", "facts": '{"version": 1}', **texts}
    return {"__metadata__": {key: texts[key] for key in texts if texts[key] is not None}}


def test_the_file_that_is_damaged_below_is_good() -> None:
    assert unpack(file(described(), bytes(8))).tensors["w"].tolist() == [0, 0]


TWO = {**described(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "header is said"),
        (bytes(7), "header is said"),
        (bytes(8), "not JSON"),
        (file(described(), bytes(8), length=2**64 - 1), "header is said"),
        (file(described(), bytes(8), length=2**40), "header is said"),
        (file(with_texts(), length=4096), "header is said"),
        (file(b" " * ((16 << 20) + 8)), "header is said"),
        (struct.pack("<Q", 2) + b"{}", "unaligned"),
        (file(b"\xff\xfe{}"), "not JSON"),
        (file(b"{}".decode().encode("utf-16")), "not JSON"),
        (file(DEEP), "not JSON"),
        (file(b"9" * 10_000), "not JSON"),
        (file([1]), "not a table"),
        (file({"__metadata__": 3}), "not texts"),
        (file({"__metadata__": {"facts": 3}}), "not texts"),
        (file({}), "it says that it is"),
        (file(with_texts(format=None)), "it says that it is"),
        (file(with_texts(format="thinwire snapshot 2")), "it says that it is"),
        (file(with_texts(facts=None)), "facts are not JSON"),
        (file(with_texts(facts="{")), "facts are not JSON"),
        (file(with_texts(facts="[" * 100_000)), "facts are not JSON"),
        (file(with_texts(facts="[]")), "no version"),
        (file(with_texts(facts="{}")), "no version"),
        (file(with_texts(facts='{"version": 1.0}')), "no version"),
        (file(with_texts(facts='{"version": true}')), "no version"),
        (file(with_texts(), b"left over"), "9 are there"),
        (file(described(), bytes(7)), "7 are there"),
        (file(described(), bytes(9)), "9 are there"),
        (file({**described(), "v": 3}, bytes(8)), "it describes 'v'"),
        (file({**described(), "v": [[0], "F32"]}, bytes(8)), "it describes 'v'"),
        (file(described(dtype=None), bytes(8)), "it describes 'w'"),
        (file(described(shape=None), bytes(8)), "it describes 'w'"),
        (file(described(data_offsets=None), bytes(8)), "it describes 'w'"),
        (file(described(dtype="F33"), bytes(8)), "it describes 'w'"),
        (file(described(dtype=["F32"]), bytes(8)), "it describes 'w'"),
        (file(described(dtype="F64"), bytes(8)), "8 bytes for"),
        (file(described(shape=[-2]), bytes(8)), "it describes 'w'"),
        (file(described(shape=[2.0]), bytes(8)), "it describes 'w'"),
        (file(described(shape=[True, 2]), bytes(8)), "it describes 'w'"),
        (file(described(shape="2"), bytes(8)), "it describes 'w'"),
        (file(described(shape=[1] * 17 + [2]), bytes(8)), "the shape of 'w'"),
        (file(described(shape=[2**63, 0], data_offsets=[0, 0])), "the shape of 'w'"),
        (file(described(shape=[2**40, 2**40, 0], data_offsets=[0, 0])), "the shape of 'w'"),
        (file(described(shape=[2**50], data_offsets=[0, 2**52]), bytes(8)), "8 are there"),
        (file(described(data_offsets=[0, 8, 8]), bytes(8)), "it describes 'w'"),
        (file(described(data_offsets=[8, 0]), bytes(8)), "-8 bytes"),
        (file(described(data_offsets=[8, 16]), bytes(16)), "starts at byte 8"),
        (file(TWO, bytes(8)), "starts at byte 4"),
        (file(described(dtype="BOOL", shape=[8]), bytes(7) + b"\2"), "0 and 1"),
        (
            file(
                {
                    **described(data_offsets=[1, 9]),
                    "v": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                },
                bytes(9),
            ),
            "not aligned",
        ),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises((ExchangeError, MismatchError), match=why):
        unpack(data)


def test_a_truncated_snapshot_is_refused_wherever_it_ends() -> None:
    data = pack(SNAPSHOT)
    for end in range(len(data)):
        with pytest.raises(ExchangeError):
            unpack(data[:end])


def test_damage_ends_in_an_error_of_ours_or_in_a_snapshot() -> None:
    data = bytearray(pack(SNAPSHOT))
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for place in range(header):
        for flip in (0x01, 0x10, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= flip
            try:
                unpack(damaged)
            except ThinwireError:
                refused += 1
    assert refused > header  # a letter of a name, or a digit of a fact, may be another


def test_a_snapshot_is_no_record_and_a_record_no_snapshot() -> None:
    with pytest.raises(MismatchError, match="records 1"):
        unpack(pack_records([record(1, 2)]))
    with pytest.raises(MismatchError, match="snapshot 1"):
        unpack_records(pack(SNAPSHOT))


def records_file(listed: object, tensors: dict | None = None) -> bytes:
    texts = {"format": "thinwire records 1", "facts": json.dumps(listed)}
    return file({"__metadata__": texts, **(tensors or {})}, bytes(4) if tensors else b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (records_file({}), "not a list"),
        (records_file([3]), "record 0 is 3"),
        (records_file([{"version": 1, "messages": 0}]), "record 0"),
        (records_file([{"version": -1, "messages": 0, "facts": {}}]), "record 0"),
        (records_file([{"version": 1, "messages": 10**12, "facts": {}}]), "record 0"),
        (records_file([{"version": 1, "messages": -1, "facts": {}}]), "record 0"),
        (
            records_file(
                [{"version": 1, "messages": 1, "facts": {}}],
                {"1.0": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
            ),
            "missing",
        ),
        (
            records_file([], {"0.0": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
            "belong to no record",
        ),
        (
            records_file(
                [{"version": 1, "messages": 1, "facts": {}}],
                {"0.0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
            ),
            "no vector",
        ),
        (
            records_file(
                [{"version": 1, "messages": 1, "facts": {}}],
                {"0.0": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}},
            ),
            "no vector",
        ),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(ExchangeError, match=why):
        unpack_records(data)


# The journal


def versions(records: list[RoundRecord] | None) -> list[int] | None:
    return None if records is None else [one.version for one in records]


def test_a_journal_gives_what_is_missing() -> None:
    journal = RoundLog(1000)
    assert journal.after(0) is None
    for version in (4, 5, 6):
        journal.append(record(version, 1))
    assert versions(journal.after(3)) == [4, 5, 6]
    assert versions(journal.after(5)) == [6]
    assert versions(journal.after(6)) == []
    assert versions(journal.after(9)) == []
    assert versions(journal.after(2)) is None


def test_a_journal_drops_the_oldest_first() -> None:
    journal = RoundLog(10)
    for version in (1, 2, 3):
        journal.append(record(version, 2, 3))
    assert versions(journal.after(0)) is None
    assert versions(journal.after(1)) == [2, 3]
    journal.append(record(4, 11))
    assert versions(journal.after(3)) is None
    assert versions(journal.after(4)) == []
    journal.append(record(5, 10))
    assert versions(journal.after(4)) == [5]


def test_a_journal_of_nothing_keeps_nothing() -> None:
    journal = RoundLog(0)
    journal.append(record(1, 1))
    assert versions(journal.after(0)) is None
    with pytest.raises(ConfigurationError, match="-1 bytes"):
        RoundLog(-1)


def test_a_journal_of_small_rounds_is_bounded_too() -> None:
    journal = RoundLog(10)
    for version in range(1, 1030):
        journal.append(record(version))
    assert len(journal.after(5) or []) == 1024
    assert journal.after(4) is None


@pytest.mark.parametrize("next_version", [2, 3, 5, 1])
def test_a_journal_starts_anew_where_the_sequence_breaks(next_version: int) -> None:
    journal = RoundLog(100)
    for version in (2, 3, next_version):
        journal.append(record(version, 1))
    assert versions(journal.after(next_version - 1)) == [next_version]
    assert versions(journal.after(next_version - 2)) is None


def test_a_cleared_journal_is_empty_and_begins_anywhere() -> None:
    journal = RoundLog(2)
    journal.append(record(1, 2))
    journal.clear()
    assert journal.after(0) is None
    assert journal.after(1) is None
    journal.append(record(8, 1))
    journal.append(record(9, 1))
    assert versions(journal.after(7)) == [8, 9]


def test_a_journal_keeps_copies() -> None:
    buffer = torch.arange(10, dtype=torch.uint8)
    facts = {"who": ["a"]}
    journal = RoundLog(100)
    messages = [buffer[2:4], buffer[::3], buffer[:0]]
    journal.append(RoundRecord(version=1, facts=facts, messages=messages))
    buffer.zero_()
    facts["who"].append("b")
    (kept,) = journal.after(0) or []
    assert [message.tolist() for message in kept.messages] == [[2, 3], [0, 3, 6, 9], []]
    assert kept.facts == {"who": ["a"]}
    assert all(message.is_contiguous() for message in kept.messages)
    assert kept.messages[0].untyped_storage().nbytes() == 2


def test_a_journal_may_be_read_while_it_is_written() -> None:
    journal = RoundLog(50)
    stop = threading.Event()
    broken: list[object] = []

    def read() -> None:
        while not stop.is_set():
            found = journal.after(0)
            found = journal.after(seen[-1]) if found is None else found
            steps = versions(found) or [1]
            if steps != list(range(steps[0], steps[0] + len(steps))):
                broken.append(steps)

    seen = [0]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for version in range(1, 500):
            journal.append(record(version, 7))
            seen.append(max(0, version - 3))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not broken


# Signed requests


@contextmanager
def serving(routes: dict, *, host: str = "127.0.0.1") -> Iterator[int]:
    server = SignedServer(TOKEN, routes, host=host)
    try:
        yield server.port
    finally:
        server.close()


def echo(body: bytes) -> SignedReply:
    return SignedReply(body=body)


ECHO = {("POST", "/echo"): echo, ("GET", "/ping"): lambda _: SignedReply(body=b"pong")}


def signed_head(
    body: bytes = b"",
    *,
    path: str = "/echo",
    sent: str | None = None,
    nonce: str = "n",
    length: str | None = "",
    signature: str | None = None,
) -> bytes:
    sent = repr(time.time()) if sent is None else sent
    digest = hashlib.sha256(body).hexdigest()
    signature = TOKEN.sign("POST", path, nonce, sent, digest) if signature is None else signature
    lines = [f"POST {path} HTTP/1.0", f"Thinwire-Nonce: {nonce}", f"Thinwire-Time: {sent}"]
    lines.append(f"Thinwire-Signature: {signature}")
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def exchange(port: int, raw: bytes) -> tuple[int, bytes]:
    """Status and body of what a plain client gets for `raw`."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body[:-64]


def test_an_answer_comes_back() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        assert ask(TOKEN, address, "/ping") == b"pong"
        assert ask(TOKEN, address, "/echo", body=b"") == b""
        assert ask(TOKEN, address, "/echo", body=bytes(3_000_001)) == bytes(3_000_001)
        assert ask_json(TOKEN, address, "/echo", {"a": [1]}) == {"a": [1]}


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_an_ipv6_host_works(host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving(ECHO, host=host) as port:
        assert ask(TOKEN, f"[::1]:{port}", "/ping") == b"pong"


def test_a_request_can_be_made_once() -> None:
    with serving(ECHO) as port:
        raw = signed_head(b"abc") + b"abc"
        assert exchange(port, raw) == (200, b"abc")
        status, body = exchange(port, raw)
        assert status == 403
        assert b"made before" in body


def test_nonces_are_forgotten_when_time_alone_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = signed_http._RequestVerifier(TOKEN, {}, None)
    assert desk._is_new("a")
    assert not desk._is_new("a")
    later = time.monotonic() + 2 * signed_http._SKEW_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert desk._is_new("b")
    assert desk._seen == {"b"}


@pytest.mark.parametrize(
    ("ahead_s", "why"), [(300, b"clock is +300 s"), (-3600, b"clock is -3600 s")]
)
def test_a_wrong_clock_is_told_by_how_much(ahead_s: float, why: bytes) -> None:
    with serving(ECHO) as port:
        status, body = exchange(port, signed_head(sent=repr(time.time() + ahead_s)))
        assert status == 403
        assert why in body
        assert b"NTP" in json.loads(body)["do"].encode()
        assert exchange(port, signed_head(sent=repr(time.time() + 60)))[0] == 200


@pytest.mark.parametrize("sent", ["abc", "", "nan", "inf", "-inf", "1e400", "0x10", "\xff"])
def test_a_time_that_is_none_is_refused(sent: str, capfd: pytest.CaptureFixture) -> None:
    with serving(ECHO) as port:
        assert exchange(port, signed_head(sent=sent))[0] == 403
        assert ask(TOKEN, f"127.0.0.1:{port}", "/ping") == b"pong"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("length", "status"),
    [
        *[
            (text, 400)
            for text in ("abc", "-1", "1e9", "0x10", "1.0", " ", "9" * 19, "9" * 5000, "\xb2")
        ],
        (None, 400),
        ("17", 400),  # more than are sent
        (str(LARGEST_REQUEST + 1), 413),
        ("9" * 18, 413),
    ],
)
def test_a_length_that_is_none_is_refused(
    length: str | None, status: int, capfd: pytest.CaptureFixture
) -> None:
    with serving(ECHO) as port:
        answered, body = exchange(port, signed_head(length=length))
        assert answered == status
        assert "error" in json.loads(body)
        assert ask(TOKEN, f"127.0.0.1:{port}", "/ping") == b"pong"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("nonce", ["", "n" * 65])
def test_a_nonce_is_short_and_there(nonce: str) -> None:
    with serving(ECHO) as port:
        assert exchange(port, signed_head(nonce=nonce))[0] == 403


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + bytes(range(256)),
        b"GET /ping\r\n\r\n",
        b"BREW /pot HTTP/1.0\r\n\r\n",
        b"POST /echo HTTP/9.9\r\n\r\n",
        b"POST /echo HTTP/1.0\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"POST /echo HTTP/1.0\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST " + b"/" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nThinwire-Signature: \xff\xfe\r\nContent-Length: 0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nno colon\r\n\x00\r\n\r\n",
    ],
)
def test_garbage_is_survived_in_silence(raw: bytes, capfd: pytest.CaptureFixture) -> None:
    with serving(ECHO) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
        assert ask(TOKEN, f"127.0.0.1:{port}", "/ping") == b"pong"
    assert capfd.readouterr().err == ""


def drip(slow: socket.socket, port: int) -> None:
    """Send a byte now and then, for 5 s or until it fails; the others are served all the time."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        slow.sendall(b"P")
        assert ask(TOKEN, f"127.0.0.1:{port}", "/ping") == b"pong"
        time.sleep(0.02)


def test_who_asks_slowly_is_dropped_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.3)
    with serving(ECHO) as port, socket.create_connection(("127.0.0.1", port), 5) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            drip(slow, port)
        assert 0.2 < time.monotonic() - began < 2
    assert capfd.readouterr().err == ""


def test_who_does_not_take_the_answer_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_SEND_S", 0.2)
    sent = threading.Event()
    large = SignedReply(body=bytes(32 << 20), on_sent=sent.set)
    with (
        serving({("POST", "/echo"): lambda _: large}) as port,
        socket.create_connection(("127.0.0.1", port), 5) as slow,
    ):
        slow.sendall(signed_head())
        time.sleep(0.5)
        received = 0
        while piece := slow.recv(1 << 20):
            received += len(piece)
        assert received < 32 << 20
        assert not sent.is_set()
    assert capfd.readouterr().err == ""


def test_one_too_many_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MOST_AT_ONCE", 2)
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        idle = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(2)]
        with pytest.raises(ExchangeError):
            ask(TOKEN, address, "/ping")
        for client in idle:
            client.close()
        until = time.monotonic() + 5
        while True:
            try:
                assert ask(TOKEN, address, "/ping") == b"pong"
                break
            except ExchangeError:
                assert time.monotonic() < until


def test_what_a_handler_raises_is_answered(capfd: pytest.CaptureFixture) -> None:
    def broken(body: bytes) -> SignedReply:
        raise KeyError("no such worker")

    with (
        serving({("POST", "/broken"): broken, **ECHO}) as port,
        pytest.raises(ExchangeError, match="KeyError: 'no such worker'"),
    ):
        ask(TOKEN, f"127.0.0.1:{port}", "/broken", body=b"")
    assert capfd.readouterr().err == ""


def test_a_refusal_says_why_and_what_to_do() -> None:
    told = {"error": "two have one identity", "do": "choose another"}
    routes = {
        ("GET", "/a"): lambda _: json_answer(told, status=409),
        ("GET", "/b"): lambda _: SignedReply(status=400, body=b"[1]"),
        ("GET", "/c"): lambda _: SignedReply(body=b"{"),
    }
    with serving(routes) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(MismatchError, match="two have one identity; do: choose another"):
            ask(TOKEN, address, "/a")
        with pytest.raises(MismatchError, match="status 400"):
            ask(TOKEN, address, "/b")
        with pytest.raises(ExchangeError, match="not JSON"):
            ask_json(TOKEN, address, "/c")
        with pytest.raises(MismatchError, match="there is no GET /d"):
            ask(TOKEN, address, "/d")


def test_another_token_is_refused() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match="not signed"):
        ask(OTHER, f"127.0.0.1:{port}", "/ping")


def test_a_request_that_is_too_large_is_not_sent() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match="of a request"):
        ask(TOKEN, f"127.0.0.1:{port}", "/echo", body=bytes(LARGEST_REQUEST + 1))


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(ExchangeError, match="announces 11 bytes and at most 10"):
            ask(TOKEN, address, "/echo", body=bytes(11), largest=10)
        assert ask(TOKEN, address, "/echo", body=bytes(10), largest=10) == bytes(10)


@pytest.mark.parametrize("address", ["", "here", "here:", ":1", "h:abc", "h:0", "h:65536", "h:-1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ExchangeError, match="is not HOST:PORT"):
        ask(TOKEN, address, "/ping")


def test_nobody_there_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExchangeError, match="refused"):
            ask(TOKEN, f"127.0.0.1:{taken.getsockname()[1]}", "/ping")


def heard(client: socket.socket) -> bytes:
    """A request, in full."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += client.recv(1 << 16)
    head, _, body = raw.partition(b"\r\n\r\n")
    announced = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    left = int(announced[0].split()[1]) - len(body) if announced else 0
    return raw + (client.recv(left, socket.MSG_WAITALL) if left else b"")


@contextmanager
def relay(port: int, change: Callable[[bytes], bytes]) -> Iterator[str]:
    """The address of a man in the middle, who changes the one request he passes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(change(heard(client)))
                answer = b""
                while piece := server.recv(1 << 16):
                    answer += piece
                client.sendall(change(answer))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(5)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"abc", b"abd"), (b"ABC", b"ABD"), (b"/loud", b"/lout"), (b" 200 ", b" 201 ")],
)
def test_what_was_changed_on_the_way_is_refused(old: bytes, new: bytes) -> None:
    routes = {
        ("POST", path): lambda body: SignedReply(body=body.upper()) for path in ("/loud", "/lout")
    }
    with serving(routes) as port:
        with relay(port, lambda raw: raw) as address:
            assert ask(TOKEN, address, "/loud", body=b"abc") == b"ABC"
        with (
            relay(port, lambda raw: raw.replace(old, new)) as address,
            pytest.raises(MismatchError, match="changed on the way"),
        ):
            ask(TOKEN, address, "/loud", body=b"abc")


def test_an_answer_to_another_request_is_refused() -> None:
    answers: list[bytes] = []

    def replay(raw: bytes) -> bytes:
        if raw.startswith(b"HTTP"):
            answers.append(raw)
            return answers[0]
        return raw

    with serving(ECHO) as port:
        with relay(port, replay) as address:
            assert ask(TOKEN, address, "/ping") == b"pong"
        with relay(port, replay) as address, pytest.raises(MismatchError, match="not signed"):
            ask(TOKEN, address, "/ping")


@contextmanager
def impostor(*pieces: bytes, silent_s: float = 0.0) -> Iterator[str]:
    """The address of somebody who answers anything with `pieces`, is silent, and is gone."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client:
                heard(client)
                for piece in pieces:
                    client.sendall(piece)
                done.wait(silent_s)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(5)


OK = b"HTTP/1.0 200 OK\r\nThinwire-Signature: follows\r\n"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "without response"),
        ([b"SSH-2.0-OpenSSH\r\n"], "SSH"),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"], "not signed"),
        ([b"HTTP/1.0 404 Not Found\r\n\r\n<html>"], "not signed"),
        ([OK, b"\r\n"], "does not say how many"),
        *[([OK, b"Content-Length: %s\r\n\r\n" % n], "announces") for n in (b"x", b"-1", b"1e3")],
        ([OK, b"Content-Length: 63\r\n\r\n"], "announces -1 bytes"),
        ([OK, b"Content-Length: 999999999999999999\r\n\r\n"], "at most"),
        ([OK, b"Content-Length: 1064\r\n\r\n", bytes(999)], "it sent 999 bytes of 1000"),
        ([OK, b"Content-Length: 1064\r\n\r\n", bytes(1063)], "ends before its signature"),
        ([OK, b"Content-Length: 74\r\n\r\n", b"\xff" * 74], "not signed"),
    ],
)
def test_an_answer_of_somebody_else_is_refused(pieces: list[bytes], why: str) -> None:
    with (
        impostor(*pieces) as address,
        pytest.raises((ExchangeError, MismatchError), match=why),
    ):
        ask(TOKEN, address, "/ping")


@pytest.mark.parametrize(
    "pieces", [[], [OK], [OK, b"Content-Length: 1064\r\n\r\n"], [OK[:9], OK[9:20]]]
)
def test_silence_ends_in_time(pieces: list[bytes]) -> None:
    began = time.monotonic()
    with (
        impostor(*pieces, silent_s=10) as address,
        pytest.raises(ExchangeTimeout, match=r"nothing came from there for 0\.2 s"),
    ):
        ask(TOKEN, address, "/ping", timeout_s=0.2)
    assert time.monotonic() - began < 2


def test_a_body_with_more_parts_is_sent_from_where_it_lies() -> None:
    parts = [memoryview(b"x" * n) for n in (0, 1, (1 << 20) + 3)]
    sent = threading.Event()
    answer = SignedReply(body=b"first", more=parts, on_sent=sent.set)
    with serving({("GET", "/parts"): lambda _: answer}) as port:
        found = ask(TOKEN, f"127.0.0.1:{port}", "/parts")
        assert found == b"first" + b"".join(parts)
        assert sent.wait(5)


def test_a_large_answer_costs_one_copy() -> None:
    import tracemalloc

    nbytes = 48 << 20
    part = memoryview(bytes(1 << 20))
    answer = SignedReply(more=[part] * 48)
    with serving({("GET", "/large"): lambda _: answer}) as port:
        tracemalloc.start()
        try:
            content = ask(TOKEN, f"127.0.0.1:{port}", "/large", largest=nbytes)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert len(content) == nbytes
    assert peak < 1.25 * nbytes  # a buffer that grows is up to an eighth too large


# Healing


class Worker:
    """A state of which every tensor and fact is one number, changed by a thread or by hand."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = 0
        self.tensors = {"a": torch.zeros(50_000), "b": torch.zeros(7, dtype=torch.bfloat16)}
        self.captures = 0
        self.helped: list[str] = []
        self.journal = RoundLog(1 << 20)

    def step(self) -> None:
        with self.lock:
            self.version += 1
            for tensor in self.tensors.values():
                tensor.fill_(self.version % 128)
            self.journal.append(record(self.version, 3, 5))

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
        worker.journal,
        host="127.0.0.1",
        card=lambda: b"card",
        on_helped=worker.helped.append,
    )
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        server.close()


def snapshot_of(address: str, who: str = "new", **options: object) -> Snapshot:
    asked = {"largest": 1 << 20, "timeout_s": 5.0, **options}
    return fetch_snapshot(TOKEN, address, who=who, **asked)


def records_of(address: str, after: int, **options: object) -> list[RoundRecord] | None:
    asked = {"largest": 1 << 20, "timeout_s": 5.0, "who": "new", **options}
    return fetch_records(TOKEN, address, after, **asked)


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def test_a_newcomer_gets_position_state_and_card() -> None:
    worker = Worker()
    worker.step()
    with healing(worker) as (_, address):
        assert fetch_position(TOKEN, address) == worker.position()
        assert ask(TOKEN, address, "/card") == b"card"
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
def test_the_copy_is_let_go_once_the_worker_moved_on(asks: str) -> None:
    worker = Worker()
    with healing(worker) as (server, address):
        snapshot_of(address)
        assert server._shelf._parts
        worker.step()
        match asks:
            case "release":
                server.release()
            case "position":
                fetch_position(TOKEN, address)
            case _:
                records_of(address, 0)
        assert not server._shelf._parts


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
        assert fetch_position(TOKEN, address).version == 0
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
        assert all(map(same, found, worker.journal.after(1) or []))
        assert versions(found) == [2, 3, 4]
        assert eventually(lambda: worker.helped == ["new"])


def test_rounds_that_are_gone_or_too_large_are_none() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        for _ in range(3):
            worker.step()
        assert records_of(address, 0, largest=30) is None
        worker.journal.clear()
        assert records_of(address, 1) is None
        assert worker.helped == []


def test_who_stands_where_a_worker_without_journal_stands_misses_nothing() -> None:
    worker = Worker()
    worker.step()
    worker.journal.clear()
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
def test_whoever_asks_for_something_else_is_told(body: bytes) -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        with pytest.raises(MismatchError, match="does not say who asks"):
            ask(TOKEN, address, "/records", body=body)
        if b"new" not in body:
            with pytest.raises(MismatchError, match="does not say who asks"):
                ask(TOKEN, address, "/state", body=body)
    assert worker.captures == 0


def test_a_state_that_is_too_large_is_refused_unread() -> None:
    worker = Worker()
    with healing(worker) as (_, address), pytest.raises(ExchangeError, match="at most 1000"):
        snapshot_of(address, largest=1000)


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


def test_a_stranger_gets_no_state() -> None:
    worker = Worker()
    with healing(worker) as (_, address):
        with pytest.raises(MismatchError):
            fetch_snapshot(OTHER, address, who="new", largest=1 << 20, timeout_s=5)
        with pytest.raises(MismatchError):
            fetch_position(OTHER, address)
    assert worker.captures == 0


def test_a_peer_that_dies_in_the_middle_is_noticed_soon() -> None:
    pieces = [OK, b"Content-Length: 1000064\r\n\r\n", bytes(500_000)]
    began = time.monotonic()
    with impostor(*pieces) as address, pytest.raises(ExchangeError, match="it sent 500000 bytes"):
        snapshot_of(address)
    assert time.monotonic() - began < 2
    with impostor(*pieces, silent_s=10) as address, pytest.raises(ExchangeTimeout):
        snapshot_of(address, timeout_s=0.2)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("told", [[], 3, {}, {"version": "x", "step": 1, "digest": ""}, None])
def test_a_position_that_is_none_is_refused(told: object) -> None:
    with (
        serving({("POST", "/position"): lambda _: json_answer(told)}) as port,
        pytest.raises(MismatchError, match="its position is"),
    ):
        fetch_position(TOKEN, f"127.0.0.1:{port}")


def test_an_infinite_position_is_refused() -> None:
    body = b'{"version": Infinity, "step": 1, "digest": ""}'
    with (
        serving({("POST", "/position"): lambda _: SignedReply(body=body)}) as port,
        pytest.raises(MismatchError, match="its position is"),
    ):
        fetch_position(TOKEN, f"127.0.0.1:{port}")


@pytest.mark.parametrize("found", [[2, 3], [1, 3], [1, 1], [0]])
def test_rounds_that_do_not_follow_are_refused(found: list[int]) -> None:
    body = pack_records([record(version, 1) for version in found])
    with (
        serving({("POST", "/records"): lambda _: SignedReply(body=body)}) as port,
        pytest.raises(MismatchError, match="its rounds after 0"),
    ):
        records_of(f"127.0.0.1:{port}", 0)


def test_a_damaged_state_is_refused() -> None:
    body = pack(SNAPSHOT)[:-1]
    with (
        serving({("POST", "/state"): lambda _: SignedReply(body=body)}) as port,
        pytest.raises(ExchangeError, match="are there"),
    ):
        snapshot_of(f"127.0.0.1:{port}")
