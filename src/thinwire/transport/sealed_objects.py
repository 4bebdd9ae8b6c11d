"""Objects of a run in a store, sealed with its token if it has one."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from thinwire.security.sealing import SEAL_NBYTES, Sealer, place_of
from thinwire.security.token import Token
from thinwire.storage import BufferPool
from thinwire.transport.base import bytes_tensor as bytes_tensor
from thinwire.transport.object_store import ObjectStore

_LONGEST_NAME, _MARK_DIGITS = 24, 32
_READS = 6  # tries to open an object: a read may be damaged though the object is sound


class SealedObjects:
    """Objects that open only under the name that they were written to.

    Args:
        store: where the objects are.
        token: the run's token; None leaves payloads unsealed.
        run: name of the run.
        workers: K if it is fixed, which payloads are bound to; else 0.

    >>> import asyncio
    >>> from thinwire.transport.object_store import ObjectStore, now_s
    >>> store = ObjectStore("memory://")
    >>> objects = SealedObjects(store, Token("a secret of many characters"), "first")
    >>> async def there_and_back():
    ...     until_s = now_s() + 10
    ...     await objects.put("first/a", bytes_tensor(b"abc"), until_s)
    ...     return objects.opened(await store.get("first/a", until_s, nbytes=3), "first/a")
    >>> asyncio.run(there_and_back()).tolist()
    [97, 98, 99]
    """

    def __init__(
        self, store: ObjectStore, token: Token | None, run: str, *, workers: int = 0
    ) -> None:
        self.store, self._workers = store, workers
        self._sealer = None if token is None else Sealer(token, run)
        self._name_key = b"" if token is None else token.derive(f"thinwire names 1 {run}")
        self._buffers = BufferPool() if self._sealer is None else self._sealer.buffers

    @property
    def added_nbytes(self) -> int:
        """Bytes that sealing adds to a payload; 0 without a token."""
        return 0 if self._sealer is None else SEAL_NBYTES

    async def put(self, key: str, payload: Tensor, until_s: float) -> bool:
        """Write `payload` (uint8 [n], on the CPU); return False if another has the name.

        Raises:
            ExchangeError: the store refuses it. ExchangeTimeout: the deadline.
        """
        return await self.put_parts(key, {key: payload}, until_s)

    async def put_parts(self, key: str, parts: Mapping[str, Tensor], until_s: float) -> bool:
        """Write one object of several payloads, each of which opens under a name of its own."""

        def is_same(there: memoryview) -> bool:
            for name, payload in parts.items():
                end = payload.nbytes + self.added_nbytes
                # Compare opened payloads: sealed bytes differ by a nonce.
                found, there = self.opened(there[:end], name), there[end:]
                if found is None or not torch.equal(found, payload):
                    return False
            return not there

        closed = [self._closed(name, payload) for name, payload in parts.items()]
        return await self.store.put(key, closed, until_s, is_same)

    async def replace(self, key: str, payload: Tensor, until_s: float) -> None:
        """Write `payload` in place of the object `key`, which only this process writes."""
        await self.store.replace(key, self._closed(key, payload), until_s)

    async def get(
        self,
        key: str,
        until_s: float,
        *,
        nbytes: int,
        name: str = "",
        at: slice | None = None,
        is_sound: Callable[[Tensor], bool] = lambda _: True,
    ) -> Tensor | None:
        """Read the payload of `key`; None if there is no object, empty if it does not open.

        Args:
            key: the object's name.
            until_s: deadline, by the clock of the running event loop.
            nbytes: about how many bytes are read.
            name: the name that the payload opens under; default `key`.
            at: the payload's bytes in the object; default all of them.
            is_sound: false if a payload that opens has to be read again.

        Raises:
            ExchangeError: the store refuses it. ExchangeTimeout: the deadline.
        """
        for _ in range(_READS):
            raw = await self.store.get(key, until_s, nbytes=nbytes, at=at)
            payload = None if raw is None else self.opened(raw, name or key)
            if raw is None or (payload is not None and is_sound(payload)):
                return payload
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def mark(self, key: str, text: str) -> str:
        """Suffix for the name of object `key` that tells whether the object says `text`.

        HMAC-SHA-256 of both: with a token, nobody else can make it or tell what is said.
        """
        return hmac.digest(self._name_key, place_of(key, text), "sha256").hex()[:_MARK_DIGITS]

    def free_memory(self) -> None:
        """Free the memory of payloads that were read, which is large after a long absence."""
        self._buffers.clear()

    def opened(self, raw: memoryview, key: str) -> Tensor | None:
        """Open the payload of `key`; None if this run did not seal it for that name."""
        if self._sealer is not None:
            return self._sealer.open(raw, self._bound(key))
        payload = self._buffers.take(len(raw), torch.device("cpu"))
        payload.numpy().data[:] = raw
        return payload

    def _closed(self, key: str, payload: Tensor) -> memoryview:
        sealer = self._sealer
        travels = payload if sealer is None else sealer.seal(payload, self._bound(key))
        return travels.numpy().data

    def _bound(self, key: str) -> bytes:
        return place_of("object", key, self._workers)


@cache
def name_part(what: str) -> str:
    """`what` as part of a name: readable, and different for every `what`.

    >>> name_part("fragment 0"), name_part("größe")
    ('fragment-0', 'gr--e-d353a267')
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", what)
    if plain == what.replace(" ", "-") and "-" not in what and len(plain) <= _LONGEST_NAME:
        return plain
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
