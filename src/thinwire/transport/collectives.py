"""Exchanges by collectives, over NCCL and every other backend but gloo.

All ranks of a group must issue its collectives in the same order. So each transport makes its own
group, and its progress thread issues them one after the other.
"""

import datetime
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.transport.base import Post, Received, Wait

_POLL_S = 0.0005
_SLOWEST_POLL_S = 0.005


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """The timeout of a group's backend for `device`."""
    options: Any = group._get_backend(device).options
    return options._timeout


class Collectives:
    """One exchange by collectives; it refers to the process group only while it runs.

    On a GPU they run on NCCL's stream. The progress thread waits for it on a side stream, so
    training continues, and `sync` orders the stream of the waiting thread after it. The main thread
    must not capture a CUDA graph during an exchange: the progress thread queries events.

    Args:
        group: process group of one transport only.
        device: cuda for NCCL, else cpu.

    Attributes:
        stream: stream of the progress thread; None on a CPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._timeout_s = timeout_of(group, device).total_seconds()
        self._aborted = threading.Event()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # The current stream wrote what the exchange reads.
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def start(self, post: Post, step: int) -> Wait:
        """Return a function that issues the collective and waits for it."""
        return lambda: self._carry(post)

    def _carry(self, post: Post) -> Received:
        """All-gather one payload for all; for others run an all-to-all, whose parts may be empty.

        Single sends and receives would make NCCL open a connection for every pair of ranks.
        """
        group, workers = self._group, self._group.size()
        if post.is_to_all(workers):
            sent = next(iter(post.to.values())).to(self._device).contiguous()
            everyone = sent.new_empty(workers, sent.numel())
            kinds: Any = dist
            # The newer name came with torch 2.13, where the older one warns.
            gather = getattr(kinds, "all_gather_single", None) or kinds.all_gather_into_tensor
            self._complete(gather(everyone.view(-1), sent, group=group, async_op=True))
            return {rank: everyone[rank] for rank in post.take}
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        parts = [post.to[r].to(self._device) if r in post.to else empty for r in range(workers)]
        sizes = [part.numel() for part in parts]
        taken = [post.take.get(rank, 0) for rank in range(workers)]
        sent, received = torch.cat(parts), empty.new_empty(sum(taken))
        work = dist.all_to_all_single(received, sent, taken, sizes, group=group, async_op=True)
        self._complete(work)
        by_rank = received.split(taken)
        return {rank: by_rank[rank] for rank in post.take}

    def abort(self) -> None:
        """Make the thread that waits in `_complete` raise soon."""
        self._aborted.set()

    def _complete(self, work: Any) -> None:
        """Poll, because a wait inside the backend cannot be interrupted."""
        started_s = time.perf_counter()
        while not work.is_completed():
            waited_s = time.perf_counter() - started_s
            if self._aborted.wait(min(_SLOWEST_POLL_S, max(_POLL_S, waited_s / 10))):
                raise RuntimeError("the connection was closed on this side")
            if waited_s > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
        work.wait()
        if self.stream is not None:
            self.stream.synchronize()

    def sync(self, payloads: Iterable[Tensor]) -> None:
        """Order later work of the caller's stream after the exchange that wrote `payloads`."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self.stream)
            for payload in payloads:
                payload.record_stream(current)
