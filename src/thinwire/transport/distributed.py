"""Workers in separate processes, joined by a torch.distributed process group."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout
from thinwire.transport.base import Label, Pending, Reduce, Transport

__all__ = ["Distributed", "naming_failures"]

_OLDER_GATHER = "all_gather_into_tensor"


@final
class _Works(Pending):
    """Asynchronous operations of a process group; they advance while training goes on."""

    def __init__(
        self, works: Sequence[Any], payloads: list[Tensor], label: Label, keep: Tensor | None = None
    ) -> None:
        self._works, self._payloads, self._label = works, payloads, label
        self._keep = keep  # what is being sent must outlive the sending

    def wait(self) -> list[Tensor]:
        with naming_failures(self._label):
            for work in self._works:
                work.wait()
        return self._payloads


@final
class _Reducing(Pending):
    """Shards under way; who waits for them reduces this worker's and gathers the results."""

    def __init__(
        self, transport: "Distributed", shards: Pending, reduce: Reduce, label: Label
    ) -> None:
        self._transport, self._shards, self._reduce = transport, shards, reduce
        self._label = label

    def wait(self) -> list[Tensor]:
        result = self._reduce(self._shards.wait())
        return self._transport.start(result, self._label).wait()


@contextmanager
def naming_failures(label: Label | str) -> Generator[None]:
    """Turn whatever a backend throws inside into an error that says what was being exchanged."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        silent = "timed out" in reason.lower() or "timeout" in reason.lower()
        kind = ExchangeTimeout if silent else ExchangeError
        raise kind(
            f"exchange {label}",
            because=("a peer stayed silent: " if silent else "a peer is gone: ") + reason,
            do="restart the workers from their last checkpoint; if the link is merely slow, give "
            "the process group a longer timeout",
        ) from error


@final
class Distributed(Transport):
    """Every worker is one rank of a process group: gloo, NCCL or any other.

    A worker may itself be a group of ranks (DDP, FSDP2): pass the group that joins the same rank of
    every worker. Without torchrun and without a process group it is a world of one.

    Args:
        group: the process group whose ranks are the workers; None means the default group.

    Raises:
        ConfigurationError: torchrun started several processes but none joined a process group.

    >>> Distributed().world_size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._joined = dist.is_available() and dist.is_initialized()
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and not self._joined:
            raise ConfigurationError(
                "connect the workers",
                because=f"torchrun started {started} processes but there is no process group",
                do="call torch.distributed.init_process_group() before tw.transport.Distributed()",
            )
        self._exchanges = 0

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self._group) if self._joined else 0

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self._group) if self._joined else 1

    def introduce(self, card: bytes) -> dict[int, bytes]:
        """Gather the cards of all ranks; lengths may differ, so they travel first."""
        label = Label(what="the workers' descriptions", round=0)
        length = torch.tensor([len(card)], dtype=torch.int64).view(torch.uint8)
        lengths = [int(p.cpu().view(torch.int64)) for p in self.start(length, label).wait()]
        padded = torch.frombuffer(bytearray(card.ljust(max(1, *lengths))), dtype=torch.uint8)
        cards = self.start(padded, label).wait()
        return {
            rank: bytes(payload.cpu().numpy()[:length])
            for rank, (payload, length) in enumerate(zip(cards, lengths, strict=True))
        }

    def start(self, payload: Tensor, label: Label) -> Pending:
        """Start an all-gather; a pair of gloo workers swaps payloads directly.

        gloo's all-gather takes 2 to 4 times as long as one send each way between two workers
        (measured over loopback and over an emulated 50 Mbit/s link); from four workers on its ring
        is the faster one over a slow link.
        """
        self._exchanges += 1
        if self.world_size == 1:
            return _Works([], [payload], label)
        payload = payload.to(self._device())
        everyone = payload.new_empty(self.world_size, payload.numel())
        swap = self.world_size == 2 and dist.get_backend(self._group) == "gloo"
        with naming_failures(label):
            works = self._swap(everyone, payload) if swap else self._gather(everyone, payload)
        return _Works(works, list(everyone.unbind()), label)

    def start_reduce(self, payloads: Sequence[Tensor], reduce: Reduce, label: Label) -> Pending:
        """Start an all-to-all; whoever waits for it reduces and gathers."""
        return _Reducing(self, self._scatter(payloads, label), reduce, label)

    def _scatter(self, payloads: Sequence[Tensor], label: Label) -> Pending:
        if self.world_size == 1:
            return _Works([], list(payloads), label)
        sizes = [payload.numel() for payload in payloads]
        mine = [sizes[self.rank]] * self.world_size
        sent = torch.cat([payload.to(self._device()) for payload in payloads])
        received = sent.new_empty(sum(mine))
        with naming_failures(label):
            work: Any = dist.all_to_all_single(
                received, sent, mine, sizes, group=self._group, async_op=True
            )
        return _Works([work], list(received.split(mine)), label, keep=sent)

    def _gather(self, everyone: Tensor, payload: Tensor) -> list[Any]:
        # all_gather_single is the name from torch 2.13 on, where the older one warns.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else _OLDER_GATHER
        gather: Any = getattr(dist, name)
        return [gather(everyone.view(-1), payload, group=self._group, async_op=True)]

    def _swap(self, everyone: Tensor, payload: Tensor) -> list[Any]:
        peer = 1 - self.rank
        everyone[self.rank].copy_(payload)
        group, tag = self._group, self._exchanges
        return [
            dist.isend(everyone[self.rank], group=group, tag=tag, group_dst=peer),
            dist.irecv(everyone[peer], group=group, tag=tag, group_src=peer),
        ]

    def _device(self) -> torch.device:
        gpu = "nccl" in dist.get_backend(self._group)
        return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
