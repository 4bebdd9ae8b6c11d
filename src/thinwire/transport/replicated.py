"""A worker of several equal ranks, which divide its payloads among them."""

from collections.abc import Generator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from thinwire.errors import ConfigurationError, MismatchError, check
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
    transport, bit for bit, and each byte crosses it once.

    Args:
        inner: joins this rank to the same rank of the other workers.
        group: the process group, or one-dimensional mesh, of this worker's ranks.

    Attributes:
        parts: S, the number of parts of every payload.

    Raises:
        ConfigurationError: `group` is no process group with this rank in it.
        ExchangeTimeout: a rank of the group does not build this within the group's timeout.
        MismatchError: from `announce`, if the group has ranks of several workers, or its ranks hold
            different parameters.
    """

    def __init__(self, inner: Transport, group: Any) -> None:
        super().__init__(inner)
        is_outside = hasattr(group, "get_coordinate") and group.get_coordinate() is None
        given = None if is_outside else group_of(group)
        if not isinstance(given, dist.ProcessGroup) or not is_known(given):
            raise ConfigurationError(
                _DIVIDE,
                because=f"this rank is not in {group!r}, or that is no process group of "
                "torch.distributed",
                do="pass the group, or the one dimension of the mesh, that has this worker's ranks "
                "and no others, on each of them; or leave out ddp_group: every rank then sends all",
            )
        ranks = dist.get_process_group_ranks(given)
        with naming_failures(f"anything inside a worker of {len(ranks)} ranks", hint=_UNMATCHED):
            # Another thread gathers in this group while the trainer averages gradients in its own.
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
        """Announce `card`, which has a digest of the weights, if all ranks of this worker agree."""
        found: list[Any] = [(self.rank, self.world_size, card)] * self.parts
        if self.parts > 1:
            with naming_failures("descriptions inside a worker", hint=_UNMATCHED):
                dist.all_gather_object(found, found[0], self._group)
        for rank, theirs in enumerate(found):
            is_same_worker = theirs[:2] == found[0][:2]
            check(
                theirs == found[0],
                _DIVIDE,
                because=f"its ranks 0 and {rank} hold other parameters"
                if is_same_worker
                else f"its rank 0 is worker {found[0][0]} of {found[0][1]} and its rank {rank} is "
                f"worker {theirs[0]} of {theirs[1]}",
                do="pass a group of ranks of one worker, seeded alike, as ddp_group, and to the "
                "transport the group that joins the same rank of every worker; ranks that shard "
                "the parameters send their own shards, without ddp_group",
                kind=MismatchError,
            )
        return self._inner.announce(card, tag)

    def _divided(self, post: Post, tag: RoundTag) -> Generator[Post, Received, Received]:
        (numel,) = set(post.take.values()) or {0}  # all senders' payloads have one size
        sizes = self._sizes(numel)
        take = dict.fromkeys(post.take, sizes[self._index])
        mine = post.changed(lambda p: p.split(self._sizes(p.numel()))[self._index])
        parts = yield mine._replace(take=take)
        if not parts:
            return {}
        rows = torch.stack([part.cpu() for part in parts.values()])
        rows = F.pad(rows, (0, max(sizes) - rows.shape[1]))
        everyone = [torch.empty_like(rows) for _ in sizes]
        with naming_failures(f"{tag} inside a worker"):
            dist.all_gather(everyone, rows, group=self._group)
        cut = [each[:, :size] for each, size in zip(everyone, sizes, strict=True)]
        return dict(zip(parts, torch.cat(cut, dim=1).unbind(), strict=True))

    def _sizes(self, numel: int) -> list[int]:
        bounds = [rank * numel // self.parts for rank in range(self.parts + 1)]
        return [end - start for start, end in pairwise(bounds)]
