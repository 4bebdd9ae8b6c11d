"""Workers in separate processes, joined by a torch.distributed process group."""

import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout, ThinwireError, check
from thinwire.transport.base import (
    Posts,
    Round,
    RoundTag,
    RunningExchange,
    Transport,
    bytes_tensor,
    to_all,
)
from thinwire.transport.collectives import Collectives, sync, timeout_of, twin_of
from thinwire.transport.exchange_counts import ExchangeCounts
from thinwire.transport.gloo_group import gloo_group
from thinwire.transport.gloo_messages import GlooMessages
from thinwire.transport.in_process import in_process
from thinwire.transport.progress_thread import ProgressThread

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_SHARED: "weakref.WeakKeyDictionary[Any, tuple[Any, Iterator[int]]]" = weakref.WeakKeyDictionary()
"""What the transports on a group share: a connection to its store, and their numbers."""


def reason_of(error: Exception) -> str:
    """What `error` says, without where in gloo it was said.

    >>> reason_of(RuntimeError("[pair.cc:553] Connection closed by peer [::1]:4. This is typical"))
    'Connection closed by peer [::1]:4'
    """
    text = (str(error).strip() or repr(error)).splitlines()[0]
    text = re.sub(r"\[[^\]]*\.(?:cc|h):\d+\] ", "", text)
    return text.split(". This is", 1)[0]


@contextmanager
def naming_failures(
    what: RoundTag | str, differences: Callable[[], str] | None = None
) -> Generator[None]:
    """Turn what a backend throws inside into an error that says what was being exchanged.

    Args:
        what: is exchanged.
        differences: called after a failure; says how the other workers differ from this one.
    """
    try:
        yield
    except ThinwireError:  # some are ValueErrors, too
        raise
    except (RuntimeError, ValueError) as error:
        reason = reason_of(error)
        silent = "timed out" in reason.lower() or "timeout" in reason.lower()
        kind = ExchangeTimeout if silent else ExchangeError
        known = differences() if differences else ""
        peer = "a peer stayed silent" if silent else "a peer is gone"
        raise kind(
            f"exchange {what}",
            because=": ".join(filter(None, (known, peer, reason))),
            do="restart the workers from their last checkpoint; if the link is merely slow, give "
            "the process group a longer timeout",
        ) from error


class Distributed(Transport):
    """Every worker is one rank of a process group: gloo, NCCL or any other.

    A worker may itself be a group of ranks (DDP, FSDP2): pass the group, or the dimension of the
    mesh, that joins the same rank of every worker. Without torchrun and without a process group it
    is a world of one.

    Exchanges advance by themselves, in the order in which they were started: a thread passes on
    what must be passed on and answers their later posts.

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
        self._group = group_of(group)
        self._is_alone = group is None and not (dist.is_available() and dist.is_initialized())
        started = int(os.environ.get("WORLD_SIZE", "1"))
        check(
            started == 1 or not self._is_alone,
            "connect the workers",
            because=f"torchrun started {started} processes but there is no process group",
            do="call torch.distributed.init_process_group() before tw.transport.Distributed(); if "
            "they are all one worker, connect it by tw.transport.Rendezvous",
        )
        joined = None if self._is_alone else self._joined_group()
        self.rank, self.world_size = (0, 1) if joined is None else (joined.rank(), joined.size())
        # What makes the carrier of an exchange from its number; empty before the first one.
        self._carriers: list[Callable[[int], GlooMessages | Collectives]] = []
        self._counts: ExchangeCounts | None = None
        self._progress = ProgressThread()
        # Also at the end of the interpreter, which must not find the thread inside a backend.
        self._closing = weakref.finalize(self, _end, self._progress, self._carriers)

    def _joined_group(self) -> Any:
        return dist.group.WORLD if self._group is None else self._group

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Over gloo in tagged messages, over other backends in collectives.

        The first exchange waits until all ranks have begun theirs: they connect. Transports of one
        group begin in the same order on all ranks.

        What `posts` computes after its first post runs in another thread, and must not start
        exchanges.
        """
        if self.world_size == 1:
            return in_process(1)[0].run(posts, tag)
        check(
            self._closing.alive,
            f"exchange {tag}",
            because="its transport was closed",
            do="build another one, on all workers",
            kind=ExchangeError,
        )
        running = RunningExchange(posts)
        if running.post is None:
            return running
        # From this thread: over gloo what is sent first is on its way at once.
        with self._naming(tag):
            carrier = self._begin()
            first = carrier.start(running.post, 0)
        last: list[Tensor] = []

        # It holds on to the transport, which is not closed while this is under way.
        def carry() -> None:
            step, stream = 0, carrier.stream
            # What is sent next was computed on this stream, so it is sent from there.
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                while running.post is not None:
                    with self._naming(tag):
                        received = first() if step == 0 else carrier.start(running.post, step)()
                    last[:] = received.values()
                    running.answer(received)
                    step += 1

        self._progress.submit(running, tag, carry=carry, abort=carrier.abort)
        if (stream := carrier.stream) is not None:
            ended = running.arrive
            running.arrive = lambda: (ended(), sync(stream, last))
        return running

    def close(self) -> None:
        """End the thread that sees exchanges through; those under way fail.

        It happens by itself when the transport is no longer used and when the process ends.
        """
        self._closing()

    def _naming(self, tag: RoundTag) -> AbstractContextManager[None]:
        """Turn a failure inside into an error that also says which worker is behind, if known."""
        return naming_failures(tag, self._counts and self._counts.behind)

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        """Gather all cards; an all-gather takes one length, so lengths go first."""

        def gathered(mine: Tensor) -> Posts[dict[int, Tensor]]:
            received = yield to_all(mine, self.rank, self.world_size)
            return lambda: {self.rank: mine} | {r: each.cpu() for r, each in received.items()}

        length = torch.tensor([len(card)], dtype=torch.int64).view(torch.uint8)
        found = self.run(gathered(length), tag).wait()
        lengths = {rank: int(each.view(torch.int64)) for rank, each in found.items()}
        padded = bytes_tensor(card.ljust(max(1, *lengths.values())))
        cards = self.run(gathered(padded), tag).wait()
        return {rank: each.numpy().tobytes()[: lengths[rank]] for rank, each in cards.items()}

    def _begin(self) -> GlooMessages | Collectives:
        """Count an exchange, and make what carries it."""
        if self._counts is None:
            # Not before the first exchange: some rank may build a transport and never use it.
            group = self._joined_group()
            store, numbers = _shared(group)
            name = f"thinwire{next(numbers)}"
            self._carriers.append(_carrier(group, store, name))
            self._counts = ExchangeCounts(store, name, self.rank, self.world_size)
        self._counts.begin()
        return self._carriers[0](self._counts.begun)


def _shared(group: Any) -> tuple[Any, Iterator[int]]:
    """Connecting takes seconds on some machines, so that not every transport does."""
    if group not in _SHARED:
        store: Any = None
        # Nothing but an error message is poorer without the store.
        with suppress(RuntimeError, ValueError, OSError):
            # A wait for a key blocks a connection: not the one that torch uses.
            store = group.get_group_store().clone()
        _SHARED[group] = store, itertools.count()
    return _SHARED[group]


def _carrier(group: Any, store: Any, name: str) -> Callable[[int], GlooMessages | Collectives]:
    """What carries exchanges over a group of one transport's own: all ranks of `group` call this.

    What one transport left under way must not reach another one.
    """
    device = device_of(group)
    if _backend_name(group) != "gloo":
        # destroy_process_group() must find no other reference that keeps it alive.
        twin: Any = weakref.ref(twin_of(group, device))
        return lambda _: Collectives(twin(), device)
    if is_known(group):
        stores: Any = dist
        own = stores.PrefixStore(name, store or group.get_group_store())
        timeout_s = timeout_of(group, device).total_seconds()
        group = gloo_group(own, group.rank(), group.size(), timeout_s=timeout_s)
    return partial(GlooMessages, group)


def _end(progress: ProgressThread, carriers: list[Any]) -> None:
    progress.close()
    if progress.is_own_process:  # a child has none of the group's threads, and cannot end them
        carriers.clear()


def group_of(group: Any) -> Any:
    """The process group of a mesh; anything else unchanged."""
    # A caller that has a mesh has imported its module, which is slow to import.
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ConfigurationError(
            "connect ranks over this mesh",
            because=f"it is a mesh of {group.ndim} dimensions, and only one of them joins the same "
            "rank of every worker",
            do="pass mesh['worker'], or whatever that dimension's name is",
        )
    return group.get_group()


def is_known(group: Any) -> bool:
    """Whether torch.distributed knows `group`; any other is a single transport's."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _backend_name(group: Any) -> str:
    return dist.get_backend(group) if is_known(group) else group.name()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where what a group carries has to be."""
    gpu = "nccl" in _backend_name(group)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
