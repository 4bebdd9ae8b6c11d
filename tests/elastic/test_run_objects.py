"""The objects of a run in a store: what is written is found again, and garbage is passed over."""

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from bucket_workers import SECRET, memory, names_in, obstore, read, write
from thinwire.elastic import run_objects
from thinwire.elastic.roll import NewestState, View, WorkerReport, text_of
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.shard import Shard
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError
from thinwire.membership import Progress
from thinwire.security.token import Token
from thinwire.transport import RoundTag, object_store
from thinwire.transport.object_store import ObjectStore
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor

AT = Progress(version=0, step=0, digest="ab")
STATE = NewestState(version=3, roll=4, writer="a:1")
LARGEST = 1 << 20


def objects(store: Any, token: str | None = None) -> RunObjects:
    return RunObjects(ObjectStore(store), "a-run", None if token is None else Token(token))


def soon() -> float:
    return time.monotonic() + 5


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def roll(number: int) -> View:
    return View(number=number, names=("a:1",), phase="join", position=AT)


def call(name: str) -> WorkerReport:
    return WorkerReport(name=name, phase="join", position=AT)


def test_other_names_beside_rolls_are_no_rolls(store) -> None:
    run = objects(store)
    for number in (1, 2, 3):
        assert do(run.put_roll(roll(number), soon()))
    for name in ("²", "٣", "a-note", "00000009x", "9", "1" * 5000, "00000007/b"):
        write(store, f"a-run/roll/{name}", b"x")
        assert do(run.newest_roll(0, soon())) == 3


def changed(what: WorkerReport | View, *pairs: tuple[str, str]) -> list[bytes]:
    return [text_of(what).replace(old, new).encode() for old, new in pairs]


NO_JSON = [b"", b"[]", b"{}", b"[" * 100_000]
GARBAGE = [
    *NO_JSON,
    *(b"\xff", b'"a"', b"null"),
    *changed(
        call("b:1"),
        *(('"version": 0', f'"version": {wrong}') for wrong in ("Infinity", "[]")),
        *(('"version": -1', f'"version": {wrong}') for wrong in ('"x"', "null")),
        *(('"b:1"', wrong) for wrong in ("5", '["b:1"]')),
        *(('"join"', wrong) for wrong in ('"lunch"', "{}")),
        ('"lacks"', '"likes"'),
    ),
    text_of(call("c:1")).encode(),
]


def test_garbage_in_the_place_of_a_call_is_passed_over(store) -> None:
    run = objects(store)
    for name in ("a:1", "b:1"):
        do(run.put_call(1, call(name), soon()))
    keys = do(run.call_keys(1, soon()))
    assert keys == [run.call_key(1, name) for name in ("a:1", "b:1")]
    assert do(run.calls(keys, soon())) == [call("a:1"), call("b:1")]
    for garbage in GARBAGE:
        for place in (keys[1], "a-run/call/00000001/a-note", "a-run/call/00000001/²"):
            write(store, place, garbage)
        assert do(run.calls(do(run.call_keys(1, soon())), soon())) == [call("a:1")], garbage[:99]


def test_garbage_in_the_place_of_a_roll_is_named(store) -> None:
    odd = changed(roll(1), ('"version": 0', '"version": Infinity'), ('"names"', '"games"'))
    for garbage in NO_JSON + odd:
        write(store, "a-run/roll/00000001", garbage)
        with pytest.raises(MismatchError, match="a-run/roll/00000001"):
            do(objects(store).roll(1, soon()))


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_a_roll_is_written_once(token, store) -> None:
    run = objects(store, token)
    assert do(run.roll(1, soon())) is None
    assert do(run.put_roll(roll(1), soon()))
    # The same of a process whose connection was lost.
    assert do(run.put_roll(roll(1), soon()))
    assert not do(run.put_roll(replace(roll(1), names=("b:1",)), soon()))
    assert do(run.roll(1, soon())) == roll(1)


def test_a_call_is_replaced_and_forgotten(store) -> None:
    run, leaving = objects(store), replace(call("a:1"), leaves=True)
    for each in (call("a:1"), leaving):
        do(run.put_call(1, each, soon()))
    assert do(run.calls([run.call_key(1, "a:1")], soon())) == [leaving]
    for _ in range(2):
        do(run.forget_calls())
    assert names_in(store) == []


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_a_marked_name_tells_what_a_report_says_and_a_later_report_has_none(token, store) -> None:
    run = objects(store, token)
    others = [run, *(objects(store, token) for _ in "bc")]
    said = [call("a:1"), replace(call("b:1"), round_s=3.0), replace(call("c:1"), lacks=True)]
    for each, own in zip(said, others, strict=True):
        do(own.put_call(1, each, soon(), is_of_many=True))
    keys = do(run.call_keys(1, soon()))
    alike = run.alike(1, said[:1], ["b:1", "c:1"])
    assert [alike.get(key) for key in keys] == [None, call("b:1"), None]
    assert do(run.calls(keys, soon())) == said
    # Of another token, roll or worker it is another name.
    other = objects(store, "another secret of many characters")
    known = (
        other.alike(1, said, ["a:1"]),
        run.alike(2, said, ["a:1"]),
        run.alike(1, said, ["d:1"]),
    )
    assert not {*keys} & {key for each in known for key in each}
    do(others[2].put_call(1, call("c:1"), soon()))
    assert do(run.calls(do(run.call_keys(1, soon())), soon())) == [*said[:2], call("c:1")]
    for own in others:
        do(own.forget_calls())
    assert names_in(store) == []


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_messages_of_old_rolls_are_deleted_but_not_what_stands_for_lost_ones(token, store) -> None:
    run = objects(store, token)
    places = [run.place(number, RoundTag(what="fragment 0", round=1)) for number in (9, 10, 11)]
    for place in places:
        do(run.sealed.put(f"{place}/0/00000", bytes_tensor(b"x"), soon()))
        do(run.sealed.put(f"{place}/0/00001", absent_message(), soon()))
    assert do(run.delete_messages(11, soon())) == 2
    kept = [f"{place}/0/00001" for place in places]
    assert names_in(store) == sorted([*kept, f"{places[2]}/0/00000"])
    assert do(run.messages(f"{places[0]}/0", 2, soon(), nbytes=2)) is None
    found = do(run.messages(f"{places[2]}/0", 2, soon(), nbytes=2))
    assert [each.numpy().tobytes() for each in found] == [b"x", b""]


def test_a_request_for_a_large_message_may_take_as_long_as_all_of_them(monkeypatch, store) -> None:
    run = objects(store)
    for rank in range(2):
        key = f"a-run/message/x/{rank:05}"
        do(run.sealed.put(key, torch.zeros(20_000, dtype=torch.uint8), soon()))
    monkeypatch.setattr(object_store, "_REQUEST_S", 0.0)  # 32 kB a second, and nothing on top
    real = run.store._obstore.get_async

    async def slow(store: Any, key: str) -> Any:
        await asyncio.sleep(0.7)
        return await real(store, key)

    monkeypatch.setattr(run.store._obstore, "get_async", slow)
    found = do(run.messages("a-run/message/x", 2, soon(), nbytes=40_000))
    assert [each.numel() for each in found] == [20_000] * 2
    assert run.store.requests.retries == 0


def written(store: Any, token: str | None = None, payload: bytes = b"a snapshot") -> str:
    """Write a snapshot; returns the beginning of its names."""
    parts = [memoryview(payload[:3]), memoryview(b""), memoryview(payload[3:])]
    do(objects(store, token).put_state(parts, STATE, set()))
    return names_in(store, "a-run/state/")[0].rpartition("/")[0]


def found(store: Any, token: str | None = None, largest: int = LARGEST) -> bytes | None:
    file = do(objects(store, token).state(STATE, largest=largest))
    return None if file is None else bytes(file)


def test_a_link_that_takes_longer_for_a_snapshot_than_a_store_is_waited_for(monkeypatch) -> None:
    """A home's uplink of 2 Mbit/s takes nine minutes for what is sent at a time."""
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 8)
    monkeypatch.setattr(run_objects, "SLOWEST_BYTES_PER_S", 10.0)
    run, payload = objects(memory()), bytes(range(20))
    run.patience_s = 0.5
    obstore = run.store._obstore

    async def slow(real: Any, store: Any, key: str, *args: Any, **how: Any) -> Any:
        await asyncio.sleep(0.0 if key.endswith("/end") else 1.0)
        return await real(store, key, *args, **how)

    monkeypatch.setattr(obstore, "put_async", partial(slow, obstore.put_async))
    monkeypatch.setattr(obstore, "get_async", partial(slow, obstore.get_async))
    put = partial(run.put_state, [memoryview(payload)], STATE)
    found = partial(run.state, STATE, largest=LARGEST)
    do(put(set()))
    assert do(found()) == payload
    # The control: as if the link were of any speed.
    monkeypatch.setattr(run_objects, "SLOWEST_BYTES_PER_S", 1e9)
    for work in (put(set()), found()):
        with pytest.raises(ExchangeTimeout):
            do(work)


@pytest.mark.parametrize(("bytes_per_s", "is_written"), [(10.0, True), (1e9, False)])
def test_who_leaves_waits_as_long_as_the_snapshot_takes_that_another_needs(
    bytes_per_s, is_written, monkeypatch
) -> None:
    monkeypatch.setattr(run_objects, "SLOWEST_BYTES_PER_S", bytes_per_s)
    run = objects(memory())
    run.patience_s = 0.1
    given = {"state": SimpleNamespace(shared_nbytes=lambda: 40)}
    given |= {"timeouts": SimpleNamespace(floor_s=1.0)}
    given |= dict.fromkeys(("apply", "events", "ranks"))
    shard = Shard(objects=run, **cast("Any", given))

    async def leaves() -> bool:
        shard.writing, shard.is_awaited = asyncio.ensure_future(asyncio.sleep(1.0)), True
        await shard.close()
        return shard.writing.done()

    assert do(leaves()) == is_written


def test_a_snapshot_whose_writing_failed_is_written_on_from_there(monkeypatch) -> None:
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 8)
    monkeypatch.setattr(run_objects, "_AT_ONCE", 2)
    run, payload, put, done = objects(memory()), bytes(range(64)), list[str](), set[str]()
    real = run.store._obstore.put_async

    async def full(store: Any, key: str, *args: Any, **how: Any) -> Any:
        put.append(key.rpartition("/")[2])
        if key.endswith("/00005") and put.count("00005") == 1:
            raise PermissionError("full")
        return await real(store, key, *args, **how)

    monkeypatch.setattr(run.store._obstore, "put_async", full)
    parts = [memoryview(payload)]
    with pytest.raises(ExchangeError):
        do(run.put_state(parts, STATE, done))
    assert {key.rpartition("/")[2] for key in done} == {"00000", "00001", "00002", "00003"}
    do(run.put_state(parts, STATE, done))
    assert max(put.count(f"{n:05}") for n in (0, 1, 2, 3, 6, 7)) == 1
    assert do(run.state(STATE, largest=LARGEST)) == payload


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_a_snapshot_in_pieces_is_found_again(token, monkeypatch) -> None:
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 8)
    monkeypatch.setattr(run_objects, "_AT_ONCE", 2)
    for nbytes in (0, 1, 7, 8, 9, 64):
        store, payload = memory(), bytes(range(nbytes))
        written(store, token, payload)
        assert found(store, token) == payload
        assert found(store, token, largest=nbytes - 1) == b""
        assert do(objects(store, token).has_state(STATE, soon()))


@pytest.mark.parametrize("token", [None, SECRET], ids=["open", "sealed"])
def test_what_was_read_of_a_snapshot_is_not_read_again_after_a_restart(
    token, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(run_objects, "_PART_NBYTES", 8)
    monkeypatch.setattr(run_objects, "_AT_ONCE", 2)
    store, payload, cache = memory(), bytes(range(60)), tmp_path / "a" / "snapshot"
    written(store, token, payload)
    names = [name for name in names_in(store, "a-run/state/") if not name.endswith("/end")]
    parts, last = len(names), names[-1]
    read_whole = SealedObjects.get

    def healing(cache: Path, dies_at: str = "") -> tuple[bytes, int]:
        """The snapshot, and how many of its parts came from the store."""
        asked = list[str]()

        async def get(self: SealedObjects, key: str, *args: Any, **kwargs: Any) -> Any:
            if key == dies_at:
                raise ConnectionError
            asked.append(key)
            return await read_whole(self, key, *args, **kwargs)

        monkeypatch.setattr(SealedObjects, "get", get)
        run = RunObjects(ObjectStore(store), "a-run", token and Token(token), cache=cache)
        file = bytes(do(run.state(STATE, largest=LARGEST)))
        return file, sum(not key.endswith("/end") for key in asked)

    with pytest.raises(ConnectionError):
        healing(cache, last)
    assert healing(cache) == (payload, 1)
    assert healing(cache) == (payload, 0)
    # Of another snapshot nothing is kept, a part that a disk has lost makes it of no use, once, and
    # a folder that cannot be made is done without.
    (first,) = [file for file in cache.iterdir() if file.name.endswith("00000")]
    first.with_name("older-00000").write_bytes(b"x")
    first.write_bytes(b"")
    assert healing(cache) == (b"", 0)
    RunObjects(ObjectStore(store), "a-run", None, cache=cache).forget_parts()
    assert not cache.exists()
    assert healing(cache) == (payload, parts)
    first.with_name("older-00000").write_bytes(b"x")
    first.unlink()
    assert healing(cache) == (payload, 1)
    assert not first.with_name("older-00000").exists()
    (tmp_path / "file").write_text("")
    assert healing(tmp_path / "file") == (payload, parts)
    assert "would read this snapshot from its beginning" in caplog.text


ENDS = [
    *NO_JSON,
    b"}{",
    b'{"parts": 1}',
    b'{"parts": [], "nbytes": {}}',
    *(
        b'{"parts": %s, "nbytes": %s}' % wrong
        for wrong in ((b"1", b"-10"), (b"2", b"10"), (b"1", b"11"), (b"1e999", b"10"))
    ),
]


def test_a_snapshot_without_an_end_is_not_there_and_one_that_is_damaged_is_empty(store) -> None:
    base = written(store)
    whole = {name: read(store, f"{base}/{name}") for name in ("end", "00000")}
    wrong = [("end", end) for end in (None, *ENDS)]
    for name, raw in (*wrong, ("00000", whole["00000"][:-1]), ("00000", None)):
        if raw is None:
            obstore.delete(store, f"{base}/{name}")
        else:
            write(store, f"{base}/{name}", raw)
        # What is not there may come, and is waited for.
        assert found(store) == (None if (name, raw) == ("end", None) else b""), (name, raw)
        write(store, f"{base}/{name}", whole[name])
        assert found(store) == b"a snapshot"
    store = memory()
    base = written(store, SECRET)
    write(store, f"{base}/00000", read(store, f"{base}/00000")[::-1])
    assert found(store, SECRET) == b""


def test_the_two_newest_snapshots_are_kept_and_so_is_one_that_is_being_written(store) -> None:
    run = objects(store)
    for version in (3, 5, 8, 9):
        state = NewestState(version=version, roll=version, writer="a:1")
        do(run.put_state([memoryview(b"x")], state, set()))
    (end_of_nine,) = (key for key in names_in(store) if "0009/" in key and key.endswith("end"))
    obstore.delete(store, end_of_nine)
    do(run.delete_states(soon()))
    kept = {int(key.split("/")[2]) for key in names_in(store, "a-run/state/")}
    assert kept == {5, 8, 9}


def test_a_description_that_does_not_open_names_the_token(store) -> None:
    for raw in (b"", b"x" * 90, b"[]", b'"a"', b"[" * 100_000):
        write(store, "a-run/about", raw)
        for mine in (None, SECRET):
            with pytest.raises(MismatchError, match="THINWIRE_TOKEN"):
                do(objects(store, mine).check_description({"a": "b"}, "w0:1", soon()))


def test_another_description_is_named(store) -> None:
    do(objects(store).check_description({"a": "1", "b": "2"}, "w0:1", soon()))
    do(objects(store).check_description({"b": "2", "a": "1"}, "w1:1", soon()))
    with pytest.raises(MismatchError, match="b differs; because the run has 2 and this run 3"):
        do(objects(store).check_description({"a": "1", "b": "3"}, "w2:1", soon()))
