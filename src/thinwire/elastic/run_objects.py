"""The objects of a run: their names, reading and writing.

    RUN/about                                          what must be the same on all workers
    RUN/process/IDENTITY/NUMBER                        one for each start of a worker
    RUN/call/ROLL/WORKER[.MARK]                        a worker's report before a roll
    RUN/roll/ROLL                                      the workers of the rounds after it
    RUN/alive/WORKER                                   its metrics, overwritten as it trains
    RUN/message/ROLL/FRAGMENT/ROUND/STEP/RANK          what a worker sends; empty counts as lost
    RUN/state/VERSION/WORKER/PART                      a snapshot, complete once it has its `end`

Rolls and messages are written only if absent, so that the first one decides for good. A worker
that waits too long for a message writes an empty one under that message's name; the sender and all
others then find the empty one. Rolls and empty messages are never deleted: no worker can overwrite
a decision, however long it was away.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from thinwire.elastic.roll import NewestState, View, WorkerReport, read_as, text_of
from thinwire.elastic.timeouts import SLOWEST_BYTES_PER_S
from thinwire.errors import MismatchError
from thinwire.files import check_run_name, replace_file
from thinwire.handshake import check_same
from thinwire.membership import WorkerMetrics
from thinwire.security.token import Token
from thinwire.transport.base import RoundTag
from thinwire.transport.object_store import ObjectStore, now_s, together
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor, name_part

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PART_NBYTES = 32 << 20
_AT_ONCE = 4
_KEPT_STATES = 2
_SUM_NBYTES = 4
_SMALL = 4096  # bytes: about the size of an object that is not a message


def absent_message() -> Tensor:
    """The empty message that replaces one that did not arrive in time."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _keep(path: Path, piece: Tensor) -> None:
    """Write a part of a snapshot into its folder; delete the parts of any other snapshot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            if other.name.rpartition("-")[0] != path.name.rpartition("-")[0]:
                other.unlink(missing_ok=True)
        replace_file(path, partial(Path.write_bytes, data=piece.numpy().data))
    except OSError as error:
        _LOG.warning("a restart would read this snapshot from its beginning: %s", error)


class _End(msgspec.Struct):
    parts: Annotated[int, msgspec.Meta(ge=0, le=10**5)]
    nbytes: int


class RunObjects:
    """Reads and writes the objects of one run.

    Args:
        store: where the objects are.
        run: the run's name.
        token: seals what is written; None leaves it readable.
        workers: K if it is fixed, else 0.
        index: this rank's index in its worker.
        ranks: S, the number of ranks of each worker.
        patience_s: how long to wait for a store that does not answer.
        cache: folder for parts of a snapshot that is being read; None keeps none.

    Raises:
        ConfigurationError: `run` cannot be part of the names of objects.

    Attributes:
        shard: suffix of the names of this rank's objects; "" for workers of one rank.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        token: Token | None,
        *,
        workers: int = 0,
        index: int = 0,
        ranks: int = 1,
        patience_s: float = 30.0,
        cache: Path | None = None,
    ) -> None:
        check_run_name(run)
        self.store, self.run, self.patience_s = store, run, patience_s
        self.shard = f".{index}" if ranks > 1 else ""
        self._ranks, self._about_key = ranks, f"{run}/about" + (f".{index}" if index else "")
        self.sealed = SealedObjects(store, token, run, workers=workers)
        self._cache = cache and cache / (self.shard or ".")
        self._calls = list[str]()  # names of this worker's reports in the store

    def until_s(self, nbytes: int = 0) -> float:
        """Deadline of requests that begin now, by the clock of the event loop.

        It adds to the patience the time that `nbytes` take at 1 Mbit/s.
        """
        return now_s() + self.patience_s + nbytes / SLOWEST_BYTES_PER_S

    # -- what the run is ---------------------------------------------------------------------------

    async def check_description(
        self, description: Mapping[str, str], name: str, until_s: float
    ) -> None:
        """Write what this worker runs, or compare it with what the first worker wrote.

        Args:
            description: this worker's.
            name: one that no other process has.
            until_s: deadline, by the clock of the event loop.

        Raises:
            MismatchError: they differ, or the first was written with another token.
            ExchangeError: the store cannot be used.
        """
        await self.store.check_put_if_absent(f"{self.run}/check/{name_part(name)}", until_s)
        mine = json.dumps(dict(description), sort_keys=True).encode()
        if await self.put_decided(self._about_key, mine, until_s):
            return
        check_same(
            await self.description(until_s),
            description,
            cannot=f"take part in run {self.run!r} in {self.store.url}",
            whose="the run",
            do="start all workers from the same script, arguments and thinwire version, or pass "
            "another name as run",
        )

    async def description(self, until_s: float) -> dict[str, str]:
        """The description that the run's first worker wrote.

        Raises:
            MismatchError: it was written with another token.
        """
        return await self.read(dict[str, str], self._about_key, until_s) or {}

    async def new_process(self, identity: str, until_s: float) -> str:
        """Name a new process of worker `identity`; names sort in the order of starts.

        A clock does not give that order: it may have been set back between two starts.
        """
        prefix = f"{self.run}/process/{name_part(identity)}/"
        mine = bytes_tensor(secrets.token_bytes(8))
        number = max(_numbers(await self.store.sizes(prefix, until_s), prefix), default=0) + 1
        while not await self.sealed.put(f"{prefix}{number:08}", mine, until_s):
            number += 1
        return f"{identity}:{number:08}"

    # -- rolls and calls ---------------------------------------------------------------------------

    async def roll(self, number: int, until_s: float) -> View | None:
        """Roll `number`; None if it is not written yet."""
        return await self.read(View, self.roll_key(number), until_s)

    async def put_roll(self, roll: View, until_s: float) -> bool:
        """Write a roll, unless its number is taken; returns whether the stored one is equal."""
        return await self.put_decided(self.roll_key(roll.number), text_of(roll).encode(), until_s)

    async def newest_roll(self, after: int, until_s: float) -> int:
        """The number of the newest roll, at least `after`."""
        prefix = f"{self.run}/roll/"
        # A listing names a thousand rolls at once; asking for each would take a request apiece.
        found = await self.store.sizes(prefix, until_s, after=self.roll_key(after))
        return max([after, *_numbers(found, prefix)])

    async def put_call(
        self, number: int, call: WorkerReport, until_s: float, *, is_of_many: bool = False
    ) -> None:
        """Write the report `call` before roll `number`.

        Args:
            number: number of the roll.
            call: the report.
            until_s: deadline, by the clock of the event loop.
            is_of_many: mark its name with its content, so that readers open one of many equal
                reports. A second report before the same roll has a plain name and replaces it.
        """
        key = self.call_key(number, call.name)
        if is_of_many and not self._calls:
            (key,) = self.alike(number, [call], [call.name])
        self._calls.append(key)
        await self.replace(key, text_of(call).encode(), until_s)

    async def call_keys(self, number: int, until_s: float) -> list[str]:
        """Names of all reports before roll `number`, in order."""
        found = await self.store.sizes(f"{self.run}/call/{number:08}/", until_s)
        return [key for key in found if key == unmarked(key) or unmarked(key) not in found]

    def alike(
        self, number: int, calls: Sequence[WorkerReport], names: Sequence[str]
    ) -> dict[str, WorkerReport]:
        """Reports that workers `names` would write to say the same as `calls`, by marked name.

        With a token nobody else can make such a name. The length of a round is not compared.
        """
        found = dict[str, WorkerReport]()
        nameless = (msgspec.structs.replace(call, name="", round_s=None) for call in calls)
        for text, call in {text_of(call): call for call in nameless}.items():
            for name in names:
                key = self.call_key(number, name)
                key = f"{key}.{self.sealed.mark(key, text)}"
                found[key] = msgspec.structs.replace(call, name=name)
        return found

    async def calls(self, keys: Sequence[str], until_s: float) -> list[WorkerReport]:
        """Read the reports `keys`, without those that are absent or invalid."""
        found = await together(*(self._call(key, until_s) for key in keys))
        return [call for call in found if call is not None]

    async def forget_calls(self) -> None:
        """Delete this worker's reports, whose rolls exist by now."""
        old, self._calls = self._calls, []
        if old:
            await self.store.delete(old)

    async def _call(self, key: str, until_s: float) -> WorkerReport | None:
        try:
            call = await self.read(WorkerReport, key, until_s)
        except MismatchError as error:
            _LOG.warning("a worker is passed over: %s", error)
            return None
        # A copy of another worker's report does not count.
        is_own = call is not None and unmarked(key).endswith(f"/{name_part(call.name)}")
        return call if is_own else None

    def roll_key(self, number: int) -> str:
        """Name of roll `number`."""
        return f"{self.run}/roll/{number:08}"

    def call_key(self, number: int, name: str) -> str:
        """Name of the report of worker `name` before roll `number`."""
        return f"{self.run}/call/{number:08}/{name_part(name)}"

    # -- signs of life -----------------------------------------------------------------------------

    async def put_sign_of_life(self, name: str, metrics: WorkerMetrics, until_s: float) -> None:
        """Overwrite worker `name`'s sign of life with its metrics; not counted as a put."""
        sign = text_of({**metrics.describe(), "sign": secrets.token_hex(8)})
        await self.replace(self._alive_key(name), sign.encode(), until_s)
        self.store.requests.puts -= 1
        self.store.requests.alive += 1

    async def sign_of_life(self, name: str, until_s: float) -> tuple[str, float] | None:
        """Tag and time of worker `name`'s last sign of life; None if it has given none."""
        self.store.requests.alive += 1
        return await self.store.stamp(self._alive_key(name), until_s)

    async def metrics(self, name: str, until_s: float) -> WorkerMetrics:
        """The metrics in worker `name`'s last sign of life."""
        told = await self.read(dict[str, Any], self._alive_key(name), until_s)
        return WorkerMetrics.read(told or {})

    def _alive_key(self, name: str) -> str:
        return f"{self.run}/alive/{name_part(name)}"

    # -- messages ----------------------------------------------------------------------------------

    def place(self, roll: int, tag: RoundTag) -> str:
        """Name prefix of an exchange's messages, which no other exchange has."""
        return f"{self.run}/message/{roll:08}/{name_part(tag.what)}/{tag.round:08}"

    async def messages(
        self, place: str, workers: int, until_s: float, *, nbytes: int
    ) -> list[Tensor] | None:
        """All messages of an all-gather at `place`, in rank order; None if one is not there.

        A message that counts as lost, or does not open, is empty.

        Args:
            place: prefix of their names.
            workers: K.
            until_s: deadline, by the clock of the event loop.
            nbytes: size of all of them, which share this worker's link.
        """
        keys = [f"{place}/{rank:05}{self.shard}" for rank in range(workers)]
        found = await together(*(self.sealed.get(key, until_s, nbytes=nbytes) for key in keys))
        return None if any(payload is None for payload in found) else found

    async def delete_messages(self, before_roll: int, until_s: float) -> int:
        """Delete messages sent before roll `before_roll`, except empty ones; returns how many."""
        prefix, lost = f"{self.run}/message/", self.sealed.added_nbytes
        end = f"{prefix}{before_roll:08}"
        sizes = await self.store.sizes(prefix, until_s)
        old = [key for key, nbytes in sizes.items() if key < end and nbytes > lost]
        return len(old) if old and await self.store.delete(old) else 0

    # -- snapshots ---------------------------------------------------------------------------------

    async def put_state(
        self, parts: Sequence[memoryview], state: NewestState, written: set[str]
    ) -> None:
        """Write a snapshot: parts of a file, and after all of them its end.

        Args:
            parts: the file's parts, in order.
            state: identifies the snapshot.
            written: names of pieces to skip; each piece that is written is added.
        """
        base = self._state_base(state, self.shard)
        pieces = [p[at : at + _PART_NBYTES] for p in parts for at in range(0, len(p), _PART_NBYTES)]
        named = {f"{base}/{n:05}": piece for n, piece in enumerate(pieces)}
        keys = [key for key in named if key not in written]
        for some in (keys[n : n + _AT_ONCE] for n in range(0, len(keys), _AT_ONCE)):
            until_s = self.until_s(sum(len(named[key]) for key in some))
            await together(*(self.put_decided(key, named[key], until_s) for key in some))
            written.update(some)
        end = json.dumps({"parts": len(pieces), "nbytes": sum(map(len, parts))}).encode()
        await self.put_decided(f"{base}/end", end, self.until_s())

    async def state(self, state: NewestState, *, largest: int) -> bytearray | None:
        """The file of a snapshot; None if it is not there.

        It is empty if a part is gone or damaged, or if it is longer than `largest`.
        """
        base, end = self._state_base(state, self.shard), _End(parts=0, nbytes=-1)
        with suppress(MismatchError):
            end = await self.read(_End, f"{base}/end", self.until_s())
        if end is None or not 0 <= end.nbytes <= largest:
            return None if end is None else bytearray()
        file, at = bytearray(end.nbytes), 0
        keys = [f"{base}/{n:05}" for n in range(end.parts)]
        for some in (keys[n : n + _AT_ONCE] for n in range(0, end.parts, _AT_ONCE)):
            until_s = self.until_s(min(end.nbytes - at, _AT_ONCE * _PART_NBYTES))
            found = await together(*(self._part(key, until_s) for key in some))
            for piece in found:
                if piece is None or at + len(piece) > end.nbytes:
                    return bytearray()
                memoryview(file)[at : at + len(piece)] = piece.numpy().data
                at += len(piece)
        return file if at == end.nbytes else bytearray()

    async def _part(self, key: str, until_s: float) -> Tensor | None:
        """A part of a snapshot; from the cache if this worker read it before it was restarted."""
        kept = self._cache and self._cache / key.replace("/", "-")
        if kept is not None and kept.is_file():
            return bytes_tensor(kept.read_bytes())
        piece = await self._opened(key, until_s, _PART_NBYTES)
        if kept is not None and piece is not None:
            await asyncio.to_thread(_keep, kept, piece)
        return piece

    def forget_parts(self) -> None:
        """Empty the cache."""
        if self._cache is not None:
            shutil.rmtree(self._cache, ignore_errors=True)

    async def has_state(self, state: NewestState, until_s: float) -> bool:
        """Whether a snapshot is complete, with the parts of all ranks of its writer."""
        shards = [f".{index}" for index in range(self._ranks)] if self.shard else [""]
        ends = [f"{self._state_base(state, shard)}/end" for shard in shards]
        found = await together(*(self.store.get(end, until_s, nbytes=_SMALL) for end in ends))
        return all(end is not None for end in found)

    async def delete_states(self, until_s: float) -> None:
        """Delete all snapshots but the newest two."""
        prefix = f"{self.run}/state/"
        keys = list(await self.store.sizes(prefix, until_s))
        ends = {key.removeprefix(prefix).split("/")[0] for key in keys if key.endswith("/end")}
        kept = sorted(ends)[-_KEPT_STATES:]
        old = [key for key in keys if kept and key.removeprefix(prefix) < kept[0]]
        if old:
            await self.store.delete(old)

    async def read(self, kind: type[T], key: str, until_s: float) -> T | None:
        """A small typed object with a checksum; None if it is absent.

        Raises:
            MismatchError: it is no `kind`. ExchangeError: the store cannot be read.
        """
        opened = await self._opened(key, until_s, _SMALL)
        try:
            return None if opened is None else read_as(kind, opened.numpy().tobytes())
        except ValueError as error:
            raise MismatchError(
                f"read run {self.run!r} in {self.store.url}",
                because=f"{key} was written with another token or by another version of thinwire, "
                "or was changed",
                do="set THINWIRE_TOKEN to the run's, or unset it if the run has none, and take "
                "its workers' version of thinwire; or pass another name as run",
            ) from error

    async def _opened(self, key: str, until_s: float, nbytes: int) -> Tensor | None:
        payload = await self.sealed.get(key, until_s, nbytes=nbytes, is_sound=_is_sound)
        return None if payload is None else payload[:-_SUM_NBYTES]

    async def put_decided(self, key: str, raw: bytes | memoryview, until_s: float) -> bool:
        """Write what decides for all, with a checksum; false if another object is in its place."""
        return await self.sealed.put(key, _summed(raw), until_s)

    async def replace(self, key: str, raw: bytes | memoryview, until_s: float) -> None:
        """Write an object, with a checksum, in place of what this process wrote there before."""
        await self.sealed.replace(key, _summed(raw), until_s)

    def _state_base(self, state: NewestState, shard: str) -> str:
        return f"{self.run}/state/{state.version:012}/{name_part(state.writer)}{shard}"


def unmarked(key: str) -> str:
    """Name of a report without the mark of its content.

    >>> unmarked("a.run/call/00000001/a-1234abcd.0a1b")
    'a.run/call/00000001/a-1234abcd'
    """
    place, _, name = key.rpartition("/")
    return f"{place}/{name.partition('.')[0]}"


def _numbers(keys: Iterable[str], prefix: str) -> list[int]:
    """The numbers that `keys` end in; other keys are ignored.

    >>> _numbers(["r/roll/00000012", "r/roll/a-note"], "r/roll/")
    [12]
    """
    ends = (key.removeprefix(prefix) for key in keys)
    return [int(text) for text in ends if re.fullmatch(r"[0-9]{8,18}", text)]


def _summed(raw: bytes | memoryview) -> Tensor:
    """`raw` and its CRC-32, so that no worker acts on a damaged copy of what decides for all."""
    summed = bytearray().join((raw, zlib.crc32(raw).to_bytes(_SUM_NBYTES, "little")))
    return torch.frombuffer(summed, dtype=torch.uint8)


def _is_sound(summed: Tensor) -> bool:
    """True if the checksum at its end is right.

    >>> _is_sound(_summed(b"")), _is_sound(absent_message())
    (True, False)
    """
    raw = summed.numpy().data
    checksum = zlib.crc32(raw[:-_SUM_NBYTES]).to_bytes(_SUM_NBYTES, "little")
    return checksum == bytes(raw[-_SUM_NBYTES:])
