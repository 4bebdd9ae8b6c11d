"""The workers of a round as one rank sees them: its link to theirs, and exchanges over it."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import Tensor

from thinwire.elastic.carrier import GroupLink, StreamCarrier
from thinwire.elastic.quorum import Quorum, identity_of
from thinwire.elastic.timeouts import Timeouts, in_background
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.transport.backend import Backend, Wait
from thinwire.transport.base import (
    FinishedRound,
    Posts,
    Round,
    RoundTag,
    RunningExchange,
    run_alone,
)
from thinwire.transport.distributed import reason_of
from thinwire.transport.progress_thread import Future, ProgressThread, Task

T = TypeVar("T")

_LOOK_S = 0.02


class _ElasticTask(Task):
    """An exchange that may be discarded."""

    def __init__(
        self,
        group: "ElasticGroup",
        tag: RoundTag,
        running: RunningExchange[Any],
        backend: Backend,
        nbytes: int,
    ) -> None:
        super().__init__(tag, Future(running, backend.sync_stream()))
        self._group, self._running, self._backend = group, running, backend
        self._nbytes = nbytes
        self.first: Wait | None = None

    def carry(self) -> Sequence[Tensor]:
        assert self.first is not None
        started_s, wait, step = time.perf_counter(), self.first, 0
        try:
            while True:
                received = wait()
                self._running.answer(received)
                if self._running.post is None:
                    break
                step += 1
                wait = self._backend.start(self._running.post, step)
        except (RuntimeError, ValueError, ThinwireError) as error:
            # The others wait for a message of this worker that will not come: tell them now, not at
            # their timeouts.
            self.abort()
            raise self._group.break_up(self.tag, error) from error
        self._group.timeouts.exchanged(self._nbytes, seconds=time.perf_counter() - started_s)
        return list(received.values())

    def abort(self) -> None:
        self._backend.abort()


class ElasticGroup:
    """A link between workers for as long as none of them is lost.

    Args:
        link: between them; None for a lone worker.
        timeouts: how long an exchange may take.
        on_broken: told why the link can be used no longer, once.
    """

    def __init__(
        self, link: GroupLink | None, timeouts: Timeouts, on_broken: Callable[[str, float], None]
    ) -> None:
        self.link, self.timeouts = link, timeouts
        self._on_broken = on_broken
        self._progress = ProgressThread()
        self._begun = 0
        self.broken = self._lost = ""

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; what stops it discards the round."""
        if self.link is None:
            return run_alone(posts)
        if self.broken:
            return FinishedRound(None, discarded(tag, self.broken))
        running = RunningExchange(posts)
        if running.post is None:
            return FinishedRound(running)
        post, nbytes = running.post, sum(running.post.take.values())
        if not post.is_to_all(self.link.workers):
            nbytes *= 2  # results come back
        self._begun += 1
        backend = self.link.backend(self._begun, timeout_s=self.timeouts.exchange(nbytes))
        task = _ElasticTask(self, tag, running, backend, nbytes)
        try:
            task.first = backend.start(post, 0)
        except (RuntimeError, ValueError) as error:
            return FinishedRound(None, self.break_up(tag, error))
        self._progress.submit(task)
        return task.future

    def break_up(self, tag: RoundTag, error: Exception) -> RoundDiscarded:
        """Use the link no longer; returns why the round of `tag` is discarded."""
        is_discarded = isinstance(error, RoundDiscarded)
        reason = error.because if is_discarded else self._lost or reason_of(error)
        if not self.broken:
            self.broken = reason
            if "timed out" in reason.lower() or "timeout" in reason.lower():
                self.timeouts.timed_out()
            self._on_broken(f"{tag}: {reason}", 0.0)
        return discarded(tag, reason)

    def lose(self, why: str) -> None:
        """Fail what is under way: a worker is gone, and one that was stopped keeps its streams."""
        if (link := self.link) is not None and self._progress.busy and not self.broken:
            self._lost = why
            link.abort()

    def close(self) -> None:
        """Fail what is under way and let go of the link."""
        self.broken = self.broken or "the group was given up"
        self._progress.close()
        if self.link is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                self.link.abort()
        self.link = None


class RankLink:
    """What one rank of a worker has in an elastic run: the group of the current round.

    Which workers take part is decided by `ElasticSession` and handed in.

    Args:
        carrier: makes links.
        on_broken: told why a group can be used no longer.
        index: of this rank in its worker, from 0: it is linked to the same one of the others.

    Attributes:
        key: of the group.
        names: of the workers that this rank is linked to, or connects to.
    """

    def __init__(
        self, carrier: StreamCarrier, on_broken: Callable[[str, float], None], *, index: int = 0
    ) -> None:
        self._carrier, self._on_broken, self._index = carrier, on_broken, index
        self._group: ElasticGroup | None = None
        self._lost = ""
        self.key = ""
        self.names: frozenset[str] = frozenset()

    @property
    def usable_key(self) -> str:
        """Key of the group, if there is one that can be used; else ""."""
        return self.key if self._group is not None and not self._group.broken else ""

    def form(self, quorum: Quorum, name: str, timeouts: Timeouts) -> str:
        """Have a group of exactly the members of `quorum`; returns why not, or "".

        Args:
            quorum: of the round.
            name: of this worker in it.
            timeouts: for connecting, and for exchanges.
        """
        if quorum.key == self.key and self._group is not None:
            # One that broke since all said that they had it is gone for all.
            return self._group.broken
        if self._group is not None:
            self._group.close()
        self._group = None
        names = [member.name for member in quorum.members]
        self._lost, self.names = "", frozenset(names)
        link = None
        if len(names) > 1:
            try:
                link = self._connect(quorum, names.index(name), timeouts.connect())
            except (RuntimeError, ValueError, TimeoutError) as error:
                if not self._lost:
                    timeouts.not_connected()
                return f"the workers could not connect: {reason_of(error)}"
        timeouts.connected()
        self._group = ElasticGroup(link, timeouts, self._on_broken)
        return ""

    def _connect(self, quorum: Quorum, rank: int, timeout_s: float) -> GroupLink:
        # In a thread of its own: it ends with its timeout, and this wait when a worker is gone.
        call = in_background(
            lambda: self._carrier.connect(
                [member.addresses[self._index] for member in quorum.members],
                key=f"{quorum.key}/{self._index}",
                rank=rank,
                timeout_s=timeout_s,
            ),
            name="thinwire-connect",
        )
        until_s = time.monotonic() + timeout_s
        while not concurrent.futures.wait([call], _LOOK_S).done:
            if self._lost:
                raise TimeoutError(self._lost)
            if time.monotonic() > until_s:
                raise TimeoutError(f"it took longer than {timeout_s:g} s")
        return call.result()

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange in the group; without one the round is discarded."""
        if self._group is None:
            return FinishedRound(None, discarded(tag, "the workers are not connected"))
        return self._group.run(posts, tag)

    def lose(self, names: Collection[str]) -> None:
        """Fail what is under way if a worker of the group is among `names`, which are gone."""
        gone = sorted(map(identity_of, self.names.intersection(names)))
        if gone:
            self._lost = f"{' and '.join(gone)} is gone"
            if (group := self._group) is not None:
                group.lose(self._lost)

    def close(self) -> None:
        """End the group and the carrier."""
        if self._group is not None:
            self._group.close()
        self._carrier.close()


def discarded(tag: RoundTag, because: str) -> RoundDiscarded:
    """The error of a round that does not count on any worker."""
    return RoundDiscarded(
        f"use {tag}", because=because, do="nothing: the next round sends it again"
    )
