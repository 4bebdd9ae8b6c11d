"""The process group of the workers of a round, and exchanges over it that may count on nobody."""

import contextlib
import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.elastic import torchft
from thinwire.elastic.timeouts import Timeouts
from thinwire.elastic.votes import tally, vote
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.rejection import Rejection
from thinwire.transport.base import Inspect, Label, Pending, Reduce
from thinwire.transport.gloo_messages import GlooMessages
from thinwire.transport.progress_thread import Future, ProgressThread, Task

__all__ = ["ElasticGroup", "discarded", "failed", "reason_of", "reconfigurable_group"]


def reconfigurable_group(host: str) -> Any:
    """torchft's process group over gloo, which listens on this machine's address `host`.

    Raises:
        ConfigurationError: torchft is not installed.
    """
    kinds: Any = dist
    reconfigurable: Any = torchft.load("process_group").ProcessGroupGloo

    @final
    class Listening(reconfigurable):
        """Differs from torchft's in the address it listens on: not what the host's name means."""

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            backend_kind = kinds.ProcessGroupGloo
            options = backend_kind._Options()
            options._devices = [backend_kind.create_device(hostname=host)]
            options._timeout = self._timeout
            group = kinds.ProcessGroup(store, rank, world_size)
            group._set_default_backend(kinds.ProcessGroup.BackendType.GLOO)
            backend = backend_kind(store, rank, world_size, options)
            group._register_backend(
                torch.device("cpu"), kinds.ProcessGroup.BackendType.GLOO, backend
            )
            return group

    return Listening(timeout=datetime.timedelta(seconds=60))


@final
class _Verdict:
    """What all workers agreed on."""

    def __init__(self) -> None:
        self.left_out: Mapping[int, Rejection] = {}
        self.overhead_nbytes = 0


@final
class _Voted(Pending):
    def __init__(self, inner: Pending, verdict: _Verdict) -> None:
        self._inner, self._verdict = inner, verdict

    def wait(self) -> list[Tensor]:
        return self._inner.wait()

    def arrived_s(self) -> float | None:
        return self._inner.arrived_s()

    def left_out(self) -> Mapping[int, Rejection]:
        return self._verdict.left_out

    def overhead_nbytes(self) -> int:
        return self._verdict.overhead_nbytes


@final
class _ElasticTask(Task):
    """Payloads, perhaps a reduction, and a vote on what has arrived."""

    def __init__(
        self, group: "ElasticGroup", label: Label, inspect: Inspect, *, nbytes: int, number: int
    ) -> None:
        super().__init__(label, Future())
        self._group, self._inspect, self._nbytes = group, inspect, nbytes
        timeout_s = group.timeouts.exchange(nbytes)
        self.carrier = GlooMessages(group.members, 0, 2 * number, timeout_s=timeout_s)
        self._ballots = GlooMessages(group.members, 0, 2 * number + 1, timeout_s=timeout_s)
        self.verdict = _Verdict()
        self.first: Any = None
        self.reduce: Reduce | None = None

    def see_through(self) -> list[Tensor]:
        started_s = time.perf_counter()
        try:
            landed = self._carry()
        except (RuntimeError, ValueError, ThinwireError) as error:
            # Those who wait for something from this worker shall not wait in vain.
            self.abort()
            raise self._group.break_up(self.label, error) from error
        self._group.timeouts.exchanged(self._nbytes, seconds=time.perf_counter() - started_s)
        return landed

    def _carry(self) -> list[Tensor]:
        landed = self.first.land()
        if self.reduce is not None:
            landed = self.carrier.gather_results(self.reduce(landed)).land()
        mine = self._inspect(landed)
        ballot = vote(mine, len(landed))
        votes = self._ballots.gather(ballot).land()
        self.verdict.left_out = tally(votes, mine)
        self.verdict.overhead_nbytes = ballot.numel()
        self._check(len(landed))
        return landed

    def _check(self, workers: int) -> None:
        bad = self.verdict.left_out
        # A result stands for all workers' shards: without it the round has a hole.
        if bad and (self.reduce is not None or len(bad) == workers):
            flaws = "; ".join(f"worker {sender}: {flaw}" for sender, flaw in bad.items())
            raise RoundDiscarded(
                f"use {self.label}", because=flaws, do="nothing: the next round sends it again"
            )

    def abort(self) -> None:
        self.carrier.abort()


@final
class ElasticGroup:
    """A group of workers for as long as none of them is lost.

    Args:
        group: a torch.distributed.ProcessGroup over gloo; None for a lone worker.
        timeouts: how long an exchange may take.
        on_broken: told why the group can be used no longer, once.
    """

    def __init__(
        self, group: Any, timeouts: Timeouts, on_broken: Callable[[str, float], None]
    ) -> None:
        self.members, self.timeouts = group, timeouts
        self._on_broken = on_broken
        self._courier = ProgressThread()
        self._begun = 0
        self.broken = self._lost = ""

    def start(self, payload: Tensor, label: Label, inspect: Inspect) -> Pending:
        """Start a ring of messages, and a vote."""
        if self.members is None:
            return _alone(lambda: [payload])
        nbytes = payload.numel() * (self.members.size() - 1)
        return self._begin(label, inspect, nbytes, lambda carrier: carrier.gather(payload), None)

    def start_reduce(
        self, payloads: Sequence[Tensor], reduce: Reduce, label: Label, inspect: Inspect
    ) -> Pending:
        """Start messages to all, and a vote on the results."""
        if self.members is None:
            return _alone(lambda: [reduce(list(payloads))])
        nbytes = 2 * sum(payload.numel() for payload in payloads)
        return self._begin(label, inspect, nbytes, lambda c: c.scatter(payloads), reduce)

    def _begin(
        self,
        label: Label,
        inspect: Inspect,
        nbytes: int,
        launch: Callable[[GlooMessages], Any],
        reduce: Reduce | None,
    ) -> Pending:
        if self.broken:
            return failed(discarded(label, self.broken))
        self._begun += 1
        exchange = _ElasticTask(self, label, inspect, nbytes=nbytes, number=self._begun)
        exchange.reduce = reduce
        try:
            exchange.first = launch(exchange.carrier)
        except (RuntimeError, ValueError) as error:
            return failed(self.break_up(label, error))
        return _Voted(self._courier.send(exchange), exchange.verdict)

    def break_up(self, label: Label, error: Exception) -> RoundDiscarded:
        """Use the group no longer; returns why the exchange of `label` counts on nobody."""
        reason = self._lost or reason_of(error)
        if isinstance(error, RoundDiscarded):
            reason = error.because
        if not self.broken:
            self.broken = reason
            if "timed out" in reason.lower() or "timeout" in reason.lower():
                self.timeouts.timed_out()
            self._on_broken(f"{label}: {reason}", 0.0)
        return discarded(label, reason)

    def lose(self, why: str) -> None:
        """Fail what is under way: somebody is gone, which gloo notices at its timeout."""
        members = self.members
        if members is not None and self._courier.busy and not self.broken:
            self._lost = why
            GlooMessages(members, 0, 0).abort()

    def close(self) -> None:
        """Fail what is under way and let go of the group."""
        self.broken = self.broken or "the group was given up"
        self._courier.close()
        if self.members is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                GlooMessages(self.members, 0, 0).abort()
        self.members = None


def reason_of(error: Exception) -> str:
    """What `error` says, without where in gloo it was said.

    >>> reason_of(RuntimeError("[pair.cc:553] Connection closed by peer [::1]:4. This is typical"))
    'Connection closed by peer [::1]:4'
    """
    text = (str(error).strip() or repr(error)).splitlines()[0]
    text = re.sub(r"\[[^\]]*\.(?:cc|h):\d+\] ", "", text)
    return text.split(". This is", 1)[0]


def discarded(label: Label, because: str) -> RoundDiscarded:
    """The error of a round that counts on nobody."""
    return RoundDiscarded(
        f"use {label}", because=because, do="nothing: the next round sends it again"
    )


def failed(error: Exception) -> Pending:
    """An exchange that fails when it is waited for."""
    delivery = Future()
    delivery.fail(error)
    return delivery


def _alone(make: Callable[[], list[Tensor]]) -> Pending:
    delivery = Future()
    delivery.succeed(make())
    return delivery
