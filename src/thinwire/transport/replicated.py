"""A worker of several ranks that hold the same: what it sends goes out once, divided among them."""

from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import MismatchError, check
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    Transport,
    WrappedTransport,
    wrapped,
)
from thinwire.transport.collectives import timeout_of
from thinwire.transport.distributed import device_of, group_of, is_known, naming_failures

T = TypeVar("T")

_DIVIDE = "divide what a worker sends among the ranks of ddp_group"
_UNMATCHED = "not every rank of the group passed it as ddp_group"


class ReplicatedRanks(WrappedTransport):
    """Wraps the transport of each of a worker's S ranks, which all run the same exchanges.

    Of a payload of n bytes rank j exchanges bytes [j n / S, (j + 1) n / S) with rank j of the other
    workers, and the ranks gather the rest from each other. Answers are those of the wrapped
    transport, bit for bit, and over it every byte goes once.

    Args:
        inner: joins this rank to the same rank of the other workers.
        group: the process group, or one-dimensional mesh, of this worker's ranks.

    Attributes:
        parts: into how many parts every payload is divided: S.

    Raises:
        ConfigurationError: `group` is no process group that has this rank.
        ExchangeTimeout: a rank of the group does not build this, within the group's timeout.
        MismatchError: from `announce`, if the group has ranks of several workers, or the ranks
            announce different things.
    """

    def __init__(self, inner: Transport, group: Any) -> None:
        super().__init__(inner)
        given = _checked(group)
        ranks = dist.get_process_group_ranks(given)
        with naming_failures(f"anything inside a worker of {len(ranks)} ranks", lambda: _UNMATCHED):
            # Of its own: another thread gathers here while the trainer averages gradients there.
            self._group: Any = dist.new_group(
                ranks,
                timeout=timeout_of(given, device_of(given)),
                backend="gloo",
                use_local_synchronization=True,
            )
        self._index, self.parts = self._group.rank(), self._group.size()

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of this rank's part; all of the worker's ranks do."""
        if self.parts == 1 or self.world_size == 1:
            return self._inner.run(posts, tag)
        return self._inner.run(wrapped(posts, lambda post: self._divided(post, tag)), tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Announce it, if all ranks of this worker announce the same."""
        if self.parts > 1:
            self._check_ranks(card)
        return self._inner.announce(card, tag)

    def _check_ranks(self, card: bytes) -> None:
        """All ranks are of one worker, and announce the same: it has a digest of the weights."""
        found: list[Any] = [None] * self.parts
        with naming_failures("descriptions inside a worker", lambda: _UNMATCHED):
            dist.all_gather_object(found, (self.rank, self.world_size, card), self._group)
        worker, workers, first = found[0]
        for rank, (other, of, theirs) in enumerate(found):
            check(
                (other, of) == (worker, workers),
                _DIVIDE,
                because=f"its rank 0 is worker {worker} of {workers} and its rank {rank} is worker "
                f"{other} of {of}",
                do="pass the group of one worker's ranks as ddp_group, and to the transport the "
                "one that joins the same rank of every worker",
                kind=MismatchError,
            )
            check(
                theirs == first,
                "divide what a worker sends among its ranks",
                because=f"its ranks 0 and {rank} hold other parameters",
                do="seed them alike, or leave out ddp_group: ranks that shard the parameters send "
                "their own shards",
                kind=MismatchError,
            )

    def _divided(self, post: Post, tag: RoundTag) -> Generator[Post, Received, Received]:
        bounds = {sender: self._bounds(nbytes) for sender, nbytes in post.take.items()}
        take = {r: ends[self._index + 1] - ends[self._index] for r, ends in bounds.items()}
        parts = yield post.changed(self._part)._replace(take=take)
        sizes = set(post.take.values())
        assert len(sizes) <= 1, "a worker's ranks gather parts of one size"
        whole = self._whole(list(parts.values()), sizes.pop(), tag) if parts else ()
        return dict(zip(parts, whole, strict=True))

    def _bounds(self, numel: int) -> list[int]:
        return [rank * numel // self.parts for rank in range(self.parts + 1)]

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


def _checked(group: Any) -> Any:
    """The process group that was given as ddp_group, if it is one that has this rank."""
    is_outside = hasattr(group, "get_coordinate") and group.get_coordinate() is None
    found = dist.GroupMember.NON_GROUP_MEMBER if is_outside else group_of(group)
    is_group = isinstance(found, dist.ProcessGroup) and is_known(found)
    check(
        is_group,
        _DIVIDE,
        because="this rank is not in the group"
        if found == dist.GroupMember.NON_GROUP_MEMBER
        else f"{group!r} is no process group of torch.distributed",
        do="pass the group, or the one dimension of the mesh, that has this worker's ranks and no "
        "others, on each of them; or leave out ddp_group: every rank then sends all",
    )
    return found
