"""Process groups over gloo, and exchanges by tagged messages between two of their ranks.

gloo matches collectives by the order in which they are issued. If two ranks disagree on the next
one, a message that is too long for its receiver aborts the process (`gloo::EnforceNotMet` in a
thread where it cannot be caught), and one that is too short counts as complete. Here the tag of a
message holds the exchange's number, the kind of post and the number of bytes, so it never reaches a
receiver that expects another message: both time out. Nor does it matter in which order the posts of
several exchanges are issued.
"""

import contextlib
import datetime
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.storage import HostCopy
from thinwire.transport.base import Post, Received, Wait

_MOST_STEPS = 3
_ABORT = 3  # the step number of a message that is never sent


def gloo_group(
    store: Any, rank: int, world_size: int, *, host: str | None = None, timeout_s: float
) -> Any:
    """Connect a process group over gloo that is independent of the default one.

    Args:
        store: store for the rendezvous of its ranks, without other keys.
        rank: this process's rank.
        world_size: number of ranks.
        host: address of this machine to listen on; default the one torch picks for its groups.
        timeout_s: timeout of its messages.

    Raises:
        RuntimeError: a rank does not connect in time.

    >>> gloo_group(dist.HashStore(), 0, 1, host="127.0.0.1", timeout_s=5).size()
    1
    """
    kinds: Any = dist
    timeout = datetime.timedelta(seconds=timeout_s)
    options = timeout
    if host is not None:
        options = kinds.ProcessGroupGloo._Options()
        options._devices = [kinds.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
    group = kinds.ProcessGroup(store, rank, world_size)
    group._set_default_backend(kinds.ProcessGroup.BackendType.GLOO)
    backend = kinds.ProcessGroupGloo(store, rank, world_size, options)
    group._register_backend(torch.device("cpu"), kinds.ProcessGroup.BackendType.GLOO, backend)
    return group


class GlooMessages:
    """One exchange by messages; it refers to the process group only while it runs.

    Args:
        group: a gloo group (torch.distributed.ProcessGroup) that no other transport uses.
        number: the exchange's number.
    """

    stream = None

    def __init__(self, group: Any, number: int) -> None:
        self._group, self._number = group, number
        self._rank, self._world_size = group.rank(), group.size()

    def start(self, post: Post, step: int) -> Wait:
        """Send one payload for all along a ring; other payloads directly."""
        assert step < _MOST_STEPS, "a tag has room for three posts of an exchange"
        if not any(payload.is_cuda for payload in post.to.values()):
            return self._carry(post.changed(lambda payload: payload.cpu().contiguous()), step)
        copies = {id(payload): HostCopy(payload) for payload in post.to.values()}
        # The waiting thread sends once the copies have arrived. Messages have tags, so later posts
        # may overtake them.
        return lambda: self._carry(post.changed(lambda payload: copies[id(payload)].read()), step)()

    def _carry(self, post: Post, step: int) -> Wait:
        if post.is_to_all(self._world_size):
            return self._ring(next(iter(post.to.values())), (step, "gather"))
        received = {
            s: torch.empty(n, dtype=torch.uint8, device="cpu") for s, n in post.take.items()
        }
        # Each worker starts with another receiver, or all would send to worker 0 first.
        distances = range(1, self._world_size)
        after = [(self._rank + distance) % self._world_size for distance in distances]
        key = (step, "scatter")
        # Keep the payloads, which gloo reads until they have left.
        works = [(received[p], self._receive(received[p], p, key)) for p in after if p in received]
        works += [(post.to[p], self._send(post.to[p], p, key)) for p in after if p in post.to]

        def wait() -> Received:
            for _, work in works:
                work.wait()
            return received

        return wait

    def abort(self) -> None:
        """Close all connections, which wakes a thread that is blocked in a wait.

        gloo closes them once any message times out, so this waits briefly for a message that nobody
        sends.
        """
        never_sent = torch.empty(1, dtype=torch.uint8, device="cpu")
        for distance in range(1, self._world_size):
            with contextlib.suppress(RuntimeError, ValueError):
                peer = (self._rank + distance) % self._world_size
                self._receive(never_sent, peer, (_ABORT, "")).wait(
                    datetime.timedelta(milliseconds=1)
                )

    def _ring(self, payload: Tensor, step: tuple[int, str]) -> Wait:
        """Send this worker's payload to the right, then each one that arrives from the left.

        For two workers that is one message each way. From four workers on it is faster over a slow
        link than a message to every worker, where packets of many senders meet at one receiver.
        """
        left, right = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
        # Hop h sends what hop h - 1 received.
        senders = [(self._rank - hop) % self._world_size for hop in range(1, self._world_size)]
        rows = payload.new_empty(len(senders), payload.numel()).unbind()
        coming = [self._receive(row, left, step) for row in rows]
        sends = [(payload, self._send(payload, right, step))]

        def wait() -> Received:
            for row, work in zip(rows[:-1], coming[:-1], strict=True):
                work.wait()
                sends.append((row, self._send(row, right, step)))
            # Sends, too: gloo reads the rows until they have left, and the caller may free them.
            for work in (coming[-1], *(work for _, work in sends)):
                work.wait()
            return dict(zip(senders, rows, strict=True))

        return wait

    def _send(self, payload: Tensor, peer: int, step: tuple[int, str]) -> Any:
        return self._group.send([payload], peer, self._tag(payload.numel(), step))

    def _receive(self, payload: Tensor, peer: int, step: tuple[int, str]) -> Any:
        return self._group.recv([payload], peer, self._tag(payload.numel(), step))

    def _tag(self, nbytes: int, step: tuple[int, str]) -> int:
        """A tag of 30 bits: number 15, step 2, digest 13.

        Tags differ between up to 32,768 exchanges in flight, and almost surely between sizes or
        kinds: a worker that gathers must not take the payload of one that swaps.
        """
        number, kind = step
        digest = zlib.crc32(f"{self._number} {nbytes} {kind}".encode()) & 0x1FFF
        return (self._number & 0x7FFF) << 15 | number << 13 | digest
