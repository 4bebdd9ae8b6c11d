"""Carrying by collectives: how it is done over NCCL, and over backends that we know nothing of.

A group's collectives must be issued in one order on all ranks. So the second halves of reductions,
which the courier issues when it gets to them, have a group of their own.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.transport.backend import Backend, Work, nothing

__all__ = ["Collectives", "twin_of"]

_OLDER_GATHER = "all_gather_into_tensor"
_POLL_S = 0.0005
_SLOWEST_POLL_S = 0.005


def twin_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks, backend and timeout; all of its ranks make it together."""
    ranks = dist.get_process_group_ranks(group)
    twin: Any = dist.new_group(
        ranks,
        backend=dist.get_backend(group),
        timeout=_timeout(group, device),
        use_local_synchronization=True,
    )
    return twin


def _timeout(group: dist.ProcessGroup, device: torch.device) -> Any:
    options: Any = group._get_backend(device).options
    return options._timeout


@final
class Collectives(Backend):
    """One exchange in collectives.

    On a GPU they run on NCCL's own stream. The courier waits for it on a side stream, so training
    is not held up, and `hand_over` makes the stream of whoever waits go after that one. The main
    thread must not capture a CUDA graph with an exchange under way: the courier asks for events.

    Args:
        group: for what the main thread issues.
        twin: for what the courier issues; None if this exchange is no reduction.
        device: cuda for NCCL, cpu for others.
    """

    def __init__(
        self, group: dist.ProcessGroup, twin: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._group, self._twin, self._device = group, twin, device
        self._timeout_s = _timeout(group, device).total_seconds()
        self._lane = _SideStream(device) if device.type == "cuda" else None
        self._hung_up = threading.Event()

    def gather(self, payload: Tensor) -> Work:
        """An all-gather."""
        return self._gather(payload, self._group)

    def gather_results(self, result: Tensor) -> Work:
        """An all-gather in the other group."""
        assert self._twin is not None
        return self._gather(result, self._twin)

    def scatter(self, payloads: Sequence[Tensor]) -> Work:
        """An all-to-all."""
        sizes = [payload.numel() for payload in payloads]
        mine = [sizes[self._group.rank()]] * self._group.size()
        sent = torch.cat([payload.to(self._device) for payload in payloads])
        received = sent.new_empty(sum(mine))
        work: Any = dist.all_to_all_single(
            received, sent, mine, sizes, group=self._group, async_op=True
        )
        return _CollectiveWork(work, list(received.split(mine)), sent, self._land)

    def abort(self) -> None:
        """Stop asking."""
        self._hung_up.set()

    def reducing(self) -> AbstractContextManager[object]:
        """On the side stream, if there is one."""
        return nullcontext() if self._lane is None else torch.cuda.stream(self._lane.stream)

    def sync_stream(self) -> Callable[[list[Tensor]], None]:
        """What makes work that is issued afterwards run after the payloads are there."""
        return nothing if self._lane is None else self._lane.sync_stream

    def _gather(self, payload: Tensor, group: dist.ProcessGroup) -> Work:
        payload = payload.to(self._device).contiguous()
        everyone = payload.new_empty(group.size(), payload.numel())
        # all_gather_single is the name from torch 2.13 on, where the older one warns.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else _OLDER_GATHER
        gather: Any = getattr(dist, name)
        work = gather(everyone.view(-1), payload, group=group, async_op=True)
        return _CollectiveWork(work, list(everyone.unbind()), payload, self._land)

    def _land(self, work: Any) -> None:
        """Ask instead of waiting inside the backend, which nothing could interrupt."""
        started_s = time.perf_counter()
        while not work.is_completed():
            waited_s = time.perf_counter() - started_s
            if self._hung_up.is_set():
                raise RuntimeError("the connection was closed on this side")
            if waited_s > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
            time.sleep(min(_SLOWEST_POLL_S, max(_POLL_S, waited_s / 10)))
        with self.reducing():
            work.wait()
        if self._lane is not None:
            self._lane.arrive()


@final
class _CollectiveWork(Work):
    def __init__(
        self, work: Any, received: list[Tensor], sent: Tensor, land: Callable[[Any], None]
    ) -> None:
        self._work, self._received, self._land = work, received, land
        self._sent = sent  # must outlive the sending

    def land(self) -> list[Tensor]:
        self._land(self._work)
        return self._received


@final
class _SideStream:
    """A side stream for one exchange."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        # What the reduction reads besides the payloads was written by the stream that starts it.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def arrive(self) -> None:
        """Everything that was put on the side stream is done when this returns."""
        self._arrived.record(self.stream)
        self._arrived.synchronize()

    def sync_stream(self, payloads: list[Tensor]) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self._arrived)
        for payload in payloads:
            payload.record_stream(current)
