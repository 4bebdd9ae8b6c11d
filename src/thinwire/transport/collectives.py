"""Carrying by collectives: over NCCL, and over any backend that is not gloo.

A group's collectives must be issued in one order on all ranks. So the later posts of an
exchange, which the progress thread issues when it gets to them, have a group of their own.
"""

import datetime
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.transport.base import Post, Received, Wait

_OLDER_GATHER = "all_gather_into_tensor"
_POLL_S = 0.0005
_SLOWEST_POLL_S = 0.005


def twin_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks, backend and timeout; all of its ranks make it together."""
    ranks = dist.get_process_group_ranks(group)
    twin: Any = dist.new_group(
        ranks,
        backend=dist.get_backend(group),
        timeout=timeout_of(group, device),
        use_local_synchronization=True,
    )
    return twin


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """How long what a group carries on `device` may take."""
    options: Any = group._get_backend(device).options
    return options._timeout


class Collectives:
    """One exchange in collectives; it must not outlive that, for it holds on to the process group.

    On a GPU they run on NCCL's own stream. The progress thread waits for it on a side stream, so
    training is not held up, and `side_stream.sync` makes the stream of the thread that waits go
    after that one. The main thread must not capture a CUDA graph with an exchange under way: the
    progress thread asks for events.

    Args:
        group: for what the main thread issues.
        twin: for what the progress thread issues; None if the exchange has one post only.
        device: cuda for NCCL, cpu for others.
    """

    def __init__(
        self, group: dist.ProcessGroup, twin: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._group, self._twin, self._device = group, twin, device
        self._timeout_s = timeout_of(group, device).total_seconds()
        self.side_stream = _SideStream(device) if device.type == "cuda" else None
        self._aborted = threading.Event()

    def start(self, post: Post, step: int) -> Wait:
        """An all-gather of what goes to all, else an all-to-all, in which parts may be empty.

        Not single sends and receives: gloo does not say whether one is complete, and NCCL would
        connect every two ranks anew.
        """
        group = self._twin if step else self._group
        assert group is not None, "an exchange with several posts has a group for the later ones"
        workers = group.size()
        if post.is_to_all(workers):
            payload = next(iter(post.to.values())).to(self._device).contiguous()
            everyone = payload.new_empty(workers, payload.numel())
            # all_gather_single is the name from torch 2.13 on, where the older one warns.
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else _OLDER_GATHER
            gather: Any = getattr(dist, name)
            work = gather(everyone.view(-1), payload, group=group, async_op=True)
            return self._wait(work, everyone.unbind(), payload, post)
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        parts = [post.to[r].to(self._device) if r in post.to else empty for r in range(workers)]
        sizes = [part.numel() for part in parts]
        taken = [post.take.get(rank, 0) for rank in range(workers)]
        sent, received = torch.cat(parts), empty.new_empty(sum(taken))
        work = dist.all_to_all_single(received, sent, taken, sizes, group=group, async_op=True)
        return self._wait(work, received.split(taken), sent, post)

    def abort(self) -> None:
        """Make the thread that waits in `_complete` raise at its next look."""
        self._aborted.set()

    def _wait(self, work: Any, by_rank: Sequence[Tensor], sent: Tensor, post: Post) -> Wait:
        def wait() -> Received:
            self._complete(work)
            under_way.clear()
            return {rank: by_rank[rank] for rank in post.take}

        under_way = [sent]  # must outlive the sending
        return wait

    def _complete(self, work: Any) -> None:
        """Poll, because nothing could interrupt a wait inside the backend."""
        started_s = time.perf_counter()
        while not work.is_completed():
            waited_s = time.perf_counter() - started_s
            if self._aborted.is_set():
                raise RuntimeError("the connection was closed on this side")
            if waited_s > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
            time.sleep(min(_SLOWEST_POLL_S, max(_POLL_S, waited_s / 10)))
        side = self.side_stream
        with nullcontext() if side is None else torch.cuda.stream(side.stream):
            work.wait()
        if side is not None:
            side.arrive()


class _SideStream:
    """A CUDA stream for one exchange, beside the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        # What the reduction reads besides the payloads was written by the stream that starts it.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def arrive(self) -> None:
        """Everything that was put on the side stream is done when this returns."""
        self._arrived.record(self.stream)
        self._arrived.synchronize()

    def sync(self, payloads: Sequence[Tensor]) -> None:
        """Make work that the caller issues afterwards run after the payloads are there."""
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self._arrived)
        for payload in payloads:
            payload.record_stream(current)
