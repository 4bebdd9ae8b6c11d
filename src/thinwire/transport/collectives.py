"""Carrying by collectives: over NCCL, and over any backend that is not gloo.

A group's collectives must be issued in one order on all ranks. So a transport has a group of its
own, and its progress thread issues all of them, one after the other.
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

_OLDER_GATHER = "all_gather_into_tensor"
_POLL_S = 0.0005
_SLOWEST_POLL_S = 0.005


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """How long what a group carries on `device` may take."""
    options: Any = group._get_backend(device).options
    return options._timeout


class Collectives:
    """One exchange in collectives; it must not outlive that, for it holds on to the process group.

    On a GPU they run on NCCL's own stream. The progress thread waits for it on a side stream, so
    training is not held up, and `sync` makes the stream of the thread that waits go after that
    one. The main thread must not capture a CUDA graph with an exchange under way: the progress
    thread asks for events.

    Args:
        group: of one transport.
        device: cuda for NCCL, cpu for others.

    Attributes:
        stream: on which the progress thread works; None on a CPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._timeout_s = timeout_of(group, device).total_seconds()
        self._aborted = threading.Event()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # What the exchange reads was written by the stream that starts it.
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def start(self, post: Post, step: int) -> Wait:
        """Nothing yet: what it returns issues the collective and waits for it."""
        del step
        return lambda: self._carry(post)

    def _carry(self, post: Post) -> Received:
        """An all-gather of what goes to all, else an all-to-all, in which parts may be empty.

        Not single sends and receives: gloo does not say whether one is complete, and NCCL would
        connect every two ranks anew.
        """
        group, workers = self._group, self._group.size()
        if post.is_to_all(workers):
            sent = next(iter(post.to.values())).to(self._device).contiguous()
            everyone = sent.new_empty(workers, sent.numel())
            # all_gather_single is the name from torch 2.13 on, where the older one warns.
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else _OLDER_GATHER
            gather: Any = getattr(dist, name)
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
        """Make the thread that waits in `_complete` raise at its next look."""
        self._aborted.set()

    def _complete(self, work: Any) -> None:
        """Poll, because nothing could interrupt a wait inside the backend."""
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
        """Make work that the caller issues afterwards run after what was done to `payloads`."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self.stream)
            for payload in payloads:
                payload.record_stream(current)
