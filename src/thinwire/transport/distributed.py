"""Workers in separate processes, joined by a torch.distributed process group."""

import itertools
import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ExchangeError, ExchangeTimeout, ThinwireError, check
from thinwire.transport.base import (
    Posts,
    Round,
    RoundTag,
    RunningExchange,
    Transport,
    bytes_tensor,
    to_all,
)
from thinwire.transport.collectives import Collectives, timeout_of
from thinwire.transport.gloo import GlooMessages, gloo_group
from thinwire.transport.in_process import in_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_NUMBERS: "weakref.WeakKeyDictionary[Any, Iterator[int]]" = weakref.WeakKeyDictionary()
"""Numbers of the transports on a group."""
_JOIN_S = 5.0


def reason_of(error: Exception) -> str:
    """The message of `error`, without its place in gloo's source.

    >>> reason_of(RuntimeError("[pair.cc:553] Connection closed by peer [::1]:4. This is typical"))
    'Connection closed by peer [::1]:4'
    """
    text = (str(error).strip() or repr(error)).splitlines()[0]
    text = re.sub(r"\[[^\]]*\.(?:cc|h):\d+\] ", "", text)
    return text.split(". This is", 1)[0]


@contextmanager
def naming_failures(what: RoundTag | str, *, hint: str = "") -> Generator[None]:
    """Turn an error of a backend into one that names the exchange.

    Args:
        what: the exchange.
        hint: the likely cause.
    """
    try:
        yield
    except ThinwireError:  # some are ValueErrors, too
        raise
    except (RuntimeError, ValueError) as error:
        reason = reason_of(error)
        silent = "timed out" in reason.lower() or "timeout" in reason.lower()
        kind = ExchangeTimeout if silent else ExchangeError
        peer = "a peer stayed silent" if silent else "a peer is gone"
        raise kind(
            f"exchange {what}",
            because=": ".join(filter(None, (hint, peer, reason))),
            do="restart the workers from their last checkpoint; if the link is merely slow, give "
            "the process group a longer timeout",
        ) from error


def closed(tag: RoundTag) -> ExchangeError:
    """The error of an exchange whose transport was closed."""
    return ExchangeError(
        f"exchange {tag}",
        because="its transport was closed",
        do="wait for every exchange before closing; then build another transport on all workers",
    )


class Distributed(Transport):
    """Every worker is one rank of a process group: gloo, NCCL or any other.

    A worker may itself be a group of ranks (DDP, FSDP2): pass the group, or the dimension of the
    mesh, that joins the same rank of every worker. Without torchrun and without a process group,
    this is the only worker.

    A thread runs the exchanges in the order in which they were started.

    Args:
        group: the process group, or one-dimensional device mesh, whose ranks are the workers; by
            default torch's default group.

    Raises:
        ConfigurationError: torchrun started several processes but none joined a process group.

    >>> Distributed().world_size
    1
    """

    def __init__(self, group: "dist.ProcessGroup | DeviceMesh | None" = None) -> None:
        self._group = group_of(group)
        is_alone = group is None and not (dist.is_available() and dist.is_initialized())
        started = int(os.environ.get("WORLD_SIZE", "1"))
        check(
            started == 1 or not is_alone,
            "connect the workers",
            because=f"torchrun started {started} processes but there is no process group",
            do="call torch.distributed.init_process_group() before tw.transport.Distributed(); if "
            "they are all one worker, connect it by its address, tw.connect(AT)",
        )
        joined = None if is_alone else self._joined_group()
        self.rank, self.world_size = (0, 1) if joined is None else (joined.rank(), joined.size())
        # Makes an exchange's carrier from its number; empty before the first exchange.
        self._carriers: list[Callable[[int], GlooMessages | Collectives]] = []
        self._begun = itertools.count(1)
        self._progress = ProgressThread()
        # Also runs at interpreter exit, which must not find the thread inside a backend.
        self._closing = weakref.finalize(self, _end, self._progress, self._carriers)

    def _joined_group(self) -> Any:
        return dist.group.WORLD if self._group is None else self._group

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange: by tagged messages over gloo, by collectives over other backends.

        The first exchange connects the ranks, so it waits for all of them. All ranks of a group
        must start their transports in the same order.

        After its first post, `posts` continues in another thread; there it must start no exchange.
        """
        if self.world_size == 1:
            return in_process(1)[0].run(posts, tag)
        if not self._closing.alive:
            raise closed(tag)
        running = RunningExchange(posts)
        if running.post is None:
            return running
        # Start in this thread, so that gloo sends the first payloads at once.
        with naming_failures(tag):
            if not self._carriers:
                # Not in __init__: some rank may build a transport and never use it.
                self._carriers.append(_carrier(self._joined_group()))
            carrier = self._carriers[0](next(self._begun))
            first = carrier.start(running.post, 0)
        last: list[Tensor] = []

        # It refers to the transport, which keeps that from garbage collection meanwhile.
        def carry() -> None:
            step, stream = 0, carrier.stream
            # Later payloads are computed on this stream, and sent from it.
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                while running.post is not None:
                    with naming_failures(tag):
                        received = first() if step == 0 else carrier.start(running.post, step)()
                    last[:] = received.values()
                    running.answer(received)
                    step += 1

        self._progress.submit(running, tag, carry=carry, abort=carrier.abort)
        if isinstance(carrier, Collectives):
            ended = running.arrive
            running.arrive = lambda: (ended(), carrier.sync(last))
        return running

    def close(self) -> None:
        """End the progress thread; exchanges under way fail.

        Called when the transport is garbage collected and when the process ends.
        """
        self._closing()

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        """All-gather the cards; lengths go first, because all payloads must have one size."""

        def gathered(mine: Tensor) -> Posts[dict[int, Tensor]]:
            received = yield to_all(mine, self.rank, self.world_size)
            return lambda: {self.rank: mine} | {r: each.cpu() for r, each in received.items()}

        length = torch.tensor([len(card)], dtype=torch.int64, device="cpu").view(torch.uint8)
        found = self.run(gathered(length), tag).wait()
        lengths = {rank: int(each.view(torch.int64)) for rank, each in found.items()}
        cards = self.run(gathered(bytes_tensor(card.ljust(max(1, *lengths.values())))), tag).wait()
        return {rank: each.numpy().tobytes()[: lengths[rank]] for rank, each in cards.items()}


def _carrier(group: Any) -> Callable[[int], GlooMessages | Collectives]:
    """Make a process group for one transport; all ranks of `group` call this.

    A message that one transport left in flight must not reach another transport.

    Returns:
        A function that makes the carrier of an exchange from its number.
    """
    device = device_of(group)
    if _backend_name(group) != "gloo":
        twin: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend(group),
            timeout=timeout_of(group, device),
            use_local_synchronization=True,
        )
        # destroy_process_group() fails to free it if another reference exists.
        known: Any = weakref.ref(twin)
        return lambda _: Collectives(known(), device)
    if is_known(group):
        stores: Any = dist
        number = next(_NUMBERS.setdefault(group, itertools.count()))
        own = stores.PrefixStore(f"thinwire{number}", group.get_group_store())
        timeout_s = timeout_of(group, device).total_seconds()
        group = gloo_group(own, group.rank(), group.size(), timeout_s=timeout_s)
    return partial(GlooMessages, group)


def _end(progress: "ProgressThread", carriers: list[Any]) -> None:
    progress.close()
    if os.getpid() == progress.process:  # a forked child has none of the group's threads
        carriers.clear()


def group_of(group: Any) -> Any:
    """The process group of a one-dimensional mesh; anything else unchanged."""
    return group.get_group() if hasattr(group, "get_group") else group


def is_known(group: Any) -> bool:
    """True if torch.distributed knows `group`; otherwise it belongs to a single transport."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _backend_name(group: Any) -> str:
    return dist.get_backend(group) if is_known(group) else group.name()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of the tensors that a group's backend sends."""
    gpu = "nccl" in _backend_name(group)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


class ProgressThread:
    """Runs exchanges one after the other in a daemon thread, which starts with the first.

    All workers start their exchanges in the same order, so no two threads wait for each other.

    >>> def one():
    ...     yield from ()
    ...     return lambda: 1
    >>> thread, running = ProgressThread(), RunningExchange(one())
    >>> thread.submit(running, RoundTag(what="x", round=1), carry=bool, abort=bool)
    >>> running.wait()
    1
    >>> thread.close()

    Attributes:
        process: id of the process that made this; a process forked from it lacks the thread.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.process = os.getpid()
        self._is_closing = False
        self._abort: Callable[[], object] = bool
        self._thread: threading.Thread | None = None

    def submit(
        self,
        running: RunningExchange[Any],
        tag: RoundTag,
        *,
        carry: Callable[[], object],
        abort: Callable[[], object],
    ) -> None:
        """Run an exchange after those submitted before; once closed, let it fail.

        Args:
            running: the exchange; its `wait` returns once it has ended.
            tag: the exchange's tag, for error messages.
            carry: answers every post; blocks until that is done or the backend times out.
            abort: makes `carry`, which runs in another thread, raise soon.
        """
        ended = threading.Event()
        running.arrive = ended.wait
        # torch's thread count is set per thread, and sums may depend on it.
        threads = torch.get_num_threads()

        def task() -> None:
            # Set first: either close() then has `abort`, or this thread sees `_is_closing`.
            self._abort = abort
            try:
                if self._is_closing:
                    raise closed(tag)
                if torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
                carry()
            except BaseException as error:  # it belongs to the thread that waits
                running.error = error
            self._abort = bool
            ended.set()

        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire-progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; an exchange in flight fails.

        A thread inside a backend at interpreter exit aborts the process, so call this before. It
        does nothing in a forked child, which has no exchanges.
        """
        if os.getpid() != self.process:
            return
        self._is_closing = True
        self._tasks.put(None)
        # The last reference to a transport may be in a task, and a thread cannot join itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._abort()
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # an idle thread must not keep a process group alive
