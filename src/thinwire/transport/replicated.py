"""A worker of several ranks that hold the same: what it sends goes out once, divided among them."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import MismatchError
from thinwire.transport.base import (
    AllGather,
    AllToAll,
    Announce,
    Requests,
    Round,
    RoundTag,
    Swap,
    Transport,
)
from thinwire.transport.distributed import group_of, naming_failures

__all__ = ["ReplicatedRanks"]

T = TypeVar("T")


@final
class ReplicatedRanks(Transport):
    """Wraps the transport of each of a worker's S ranks, which all run the same exchanges.

    Of a payload of n bytes rank j exchanges bytes [j n / S, (j + 1) n / S) with rank j of the other
    workers, and the ranks gather the rest from each other. Answers are those of the wrapped
    transport, bit for bit, and over it every byte goes once.

    Args:
        inner: joins this rank to the same rank of the other workers.
        group: the process group, or one-dimensional mesh, of this worker's ranks.

    Raises:
        MismatchError: from an exchange that announces, if the ranks announce different things.
    """

    def __init__(self, inner: Transport, group: Any) -> None:
        self._inner = inner
        ranks = dist.get_process_group_ranks(group_of(group))
        # Of its own: another thread gathers here while the trainer averages gradients there.
        self._group: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._index, self._size = self._group.rank(), self._group.size()

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._inner.world_size

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of this rank's part; all of the worker's ranks do."""
        if self._size == 1 or self.world_size == 1:
            return self._inner.run(requests, tag)
        return self._inner.run(self._divided(requests, tag), tag)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()

    def _check_equal(self, announced: bytes) -> None:
        """All ranks must announce the same: it has a digest of the weights."""
        mine = torch.frombuffer(bytearray(sha256(announced).digest()), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        with naming_failures("descriptions inside a worker"):
            dist.all_gather(found, mine, group=self._group)
        for rank, theirs in enumerate(found):
            if not torch.equal(theirs, found[0]):
                raise MismatchError(
                    "divide what a worker sends among its ranks",
                    because=f"its ranks 0 and {rank} hold other parameters",
                    do="seed them alike, or leave out ddp_group: ranks that shard the parameters "
                    "send their own shards",
                )

    def _divided(self, requests: Requests[T], tag: RoundTag) -> Requests[T]:
        answer: Any = None
        while True:
            try:
                request = requests.send(answer)
            except StopIteration as end:
                return end.value
            match request:
                case AllGather(payload):
                    parts = yield AllGather(self._part(payload))
                    answer = self._whole(parts, payload.numel(), tag)
                case AllToAll(payloads):
                    parts = yield AllToAll([self._part(payload) for payload in payloads])
                    answer = self._whole(parts, payloads[self.rank].numel(), tag)
                case Swap(payload, peer):
                    part = yield Swap(self._part(payload), peer)
                    (answer,) = self._whole([part], payload.numel(), tag)
                case Announce(announced):
                    self._check_equal(announced)
                    answer = yield request
                case _:
                    answer = yield request

    def _bounds(self, numel: int) -> list[int]:
        return [rank * numel // self._size for rank in range(self._size + 1)]

    def _part(self, payload: Tensor) -> Tensor:
        bounds = self._bounds(payload.numel())
        return payload[bounds[self._index] : bounds[self._index + 1]]

    def _whole(self, parts: Sequence[Tensor], numel: int, tag: RoundTag) -> list[Tensor]:
        """Payloads of `numel` bytes, of which every rank of the worker has `parts`."""
        bounds = self._bounds(numel)
        sizes = [end - start for start, end in pairwise(bounds)]
        mine = torch.zeros(len(parts), max(sizes), dtype=torch.uint8)
        for row, part in zip(mine, parts, strict=True):
            row[: part.numel()] = part
        everyone = [torch.empty_like(mine) for _ in sizes]
        with naming_failures(f"{tag} inside a worker"):
            dist.all_gather(everyone, mine, group=self._group)
        return [
            torch.cat([rows[k, :size] for rows, size in zip(everyone, sizes, strict=True)])
            for k in range(len(parts))
        ]
