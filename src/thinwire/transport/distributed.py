"""Workers in separate processes, joined by a torch.distributed process group."""

import os
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout
from thinwire.transport.backend import Backend, Work
from thinwire.transport.base import Inspect, Label, Pending, Reduce, Transport, accept_all
from thinwire.transport.collectives import Collectives, twin_of
from thinwire.transport.exchange_counts import ExchangeCounts
from thinwire.transport.gloo_messages import GlooMessages
from thinwire.transport.progress_thread import Future, ProgressThread, Task

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Distributed", "naming_failures"]

_SERIES: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
"""How many transports have begun exchanges on a group."""


def _nothing_known() -> str:
    return ""


@contextmanager
def naming_failures(
    label: Label | str, differences: Callable[[], str] = _nothing_known
) -> Generator[None]:
    """Turn whatever a backend throws inside into an error that says what was being exchanged.

    Args:
        label: what.
        differences: called after a failure; says how the other workers differ from this one.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        silent = "timed out" in reason.lower() or "timeout" in reason.lower()
        kind = ExchangeTimeout if silent else ExchangeError
        known = differences()
        raise kind(
            f"exchange {label}",
            because=(f"{known}: " if known else "")
            + ("a peer stayed silent: " if silent else "a peer is gone: ")
            + reason,
            do="restart the workers from their last checkpoint; if the link is merely slow, give "
            "the process group a longer timeout",
        ) from error


@final
class _Exchange(Task):
    """One exchange: its first half, and for a reduction what is made of it and the second half."""

    def __init__(
        self, transport: "Distributed", carrier: Backend, label: Label, first: Work
    ) -> None:
        super().__init__(label, Future(carrier.sync_stream()))
        self._transport = transport  # is not closed while this is under way
        self._carrier, self._first = carrier, first
        self.reduce: Reduce | None = None

    def see_through(self) -> list[Tensor]:
        with self._transport.naming(self.label):
            landed = self._first.land()
        if self.reduce is None:
            return landed
        with self._carrier.reducing():
            result = self.reduce(landed)
            with self._transport.naming(self.label):
                second = self._carrier.gather_results(result)
        with self._transport.naming(self.label):
            return second.land()

    def abort(self) -> None:
        self._carrier.abort()


@final
class Distributed(Transport):
    """Every worker is one rank of a process group: gloo, NCCL or any other.

    A worker may itself be a group of ranks (DDP, FSDP2): pass the group, or the dimension of the
    mesh, that joins the same rank of every worker. Without torchrun and without a process group it
    is a world of one.

    Exchanges advance by themselves, in the order in which they were started: a thread passes on
    what must be passed on, reduces and starts second halves.

    Args:
        group: the process group, or one-dimensional device mesh, whose ranks are the workers; None
            means the default group.

    Raises:
        ConfigurationError: torchrun started several processes but none joined a process group, or a
            mesh has several dimensions.

    >>> Distributed().world_size
    1
    """

    def __init__(self, group: "dist.ProcessGroup | DeviceMesh | None" = None) -> None:
        self._group = _group_of(group)
        self._joined = dist.is_available() and dist.is_initialized()
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and not self._joined:
            raise ConfigurationError(
                "connect the workers",
                because=f"torchrun started {started} processes but there is no process group",
                do="call torch.distributed.init_process_group() before tw.transport.Distributed()",
            )
        self._begun = self._series = 0
        self._progress: ExchangeCounts | None = None
        self._twin: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._courier = ProgressThread()
        # Also at the end of the interpreter, which must not find the thread inside a backend.
        self._closing = weakref.finalize(self, self._courier.close)

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

    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all) -> Pending:
        """Start a ring of messages over gloo, an all-gather over others."""
        del inspect  # nobody is left out: a bad message is an error
        if self.world_size == 1:
            return _alone(lambda: [payload])
        carrier = self._begin(payload.numel())
        with self.naming(label):
            first = carrier.gather(payload)
        return self._courier.send(_Exchange(self, carrier, label, first))

    def start_reduce(
        self,
        payloads: Sequence[Tensor],
        reduce: Reduce,
        label: Label,
        inspect: Inspect = accept_all,
    ) -> Pending:
        """Start messages to all over gloo, an all-to-all over others.

        `reduce` is called in another thread, in which it may not start exchanges.
        """
        del inspect
        if self.world_size == 1:
            return _alone(lambda: [reduce(list(payloads))])
        carrier = self._begin(sum(payload.numel() for payload in payloads), self._get_twin)
        with self.naming(label):
            first = carrier.scatter(payloads)
        exchange = _Exchange(self, carrier, label, first)
        exchange.reduce = reduce
        return self._courier.send(exchange)

    def close(self) -> None:
        """End the thread that sees exchanges through; those under way fail.

        It happens by itself when the transport is no longer used and when the process ends.
        """
        self._closing()

    @contextmanager
    def naming(self, label: Label) -> Generator[None]:
        """`naming_failures`, with what this transport knows of the other workers."""
        differences = _nothing_known if self._progress is None else self._progress.differences
        with naming_failures(label, differences):
            yield

    def _begin(
        self, nbytes: int, twin: Callable[[], dist.ProcessGroup | None] = lambda: None
    ) -> Backend:
        """Count an exchange that sends `nbytes`, and make what carries it."""
        group: Any = dist.group.WORLD if self._group is None else self._group
        if self._progress is None:
            # Not before the first exchange: some rank may build a transport and never use it.
            self._series = _SERIES[group] = _SERIES.get(group, -1) + 1
            self._progress = self._new_progress(group)
        self._begun += 1
        self._progress.begin(nbytes)
        if _takes_messages(group):
            return GlooMessages(group, self._series, self._begun)
        return Collectives(group, twin(), _device(group))

    def _new_progress(self, group: Any) -> ExchangeCounts:
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        return ExchangeCounts(store, f"thinwire{self._series}", self.rank, self.world_size)

    def _get_twin(self) -> dist.ProcessGroup:
        twin = self._twin()
        if twin is None:
            group: Any = dist.group.WORLD if self._group is None else self._group
            twin = twin_of(group, _device(group))
            # destroy_process_group() must find nobody who keeps it alive.
            self._twin = weakref.ref(twin)
        return twin


def _group_of(group: Any) -> Any:
    """The process group of a mesh; whatever else it is, itself."""
    # Who has a mesh has imported this module.
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        return group
    if group.ndim != 1:
        names: Any = group.mesh_dim_names or ()
        names = names if names and "worker" not in names else ("worker",)
        raise ConfigurationError(
            f"connect the workers over a mesh of {group.ndim} dimensions",
            because="only one of them joins the same rank of every worker",
            do="pass " + " or ".join(f"mesh[{name!r}]" for name in names),
        )
    return group.get_group()


def _takes_messages(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def _device(group: dist.ProcessGroup) -> torch.device:
    gpu = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def _alone(make: Callable[[], list[Tensor]]) -> Pending:
    """The exchange of a worker with itself."""
    delivery = Future()
    try:
        delivery.succeed(make())
    except Exception as error:  # which belongs to whoever waits
        delivery.fail(error)
    return delivery
