"""Workers that share an object store, or a folder: a transport that knows who takes part."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import queue
import secrets
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from thinwire.elastic.events import EventLog
from thinwire.elastic.roll import identity_of
from thinwire.elastic.timeouts import ElasticOptions, Timeouts
from thinwire.errors import RunStopped, ThinwireError, check
from thinwire.files import check_run_name
from thinwire.membership import (
    Answer,
    Membership,
    Phase,
    Replay,
    RoundPlan,
    RoundRecord,
    SharedState,
    Snapshot,
    WorkerMetrics,
)
from thinwire.security.token import Token, optional_token
from thinwire.transport.address import HubAddress, is_hub
from thinwire.transport.base import Posts, Round, RoundTag, Transport
from thinwire.transport.in_process import in_process
from thinwire.transport.object_store import ObjectStore
from thinwire.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from thinwire.elastic.loop_thread import LoopThread
    from thinwire.elastic.session import Session
    from thinwire.elastic.shard import Shard

T = TypeVar("T")
_Answer: TypeAlias = "tuple[Snapshot | Replay, concurrent.futures.Future[None]]"

LEAST_WAIT_S: Final = 10.0
"""The default of `Elastic(least_wait_s=...)`."""
_SNAPSHOT_AFTER: Final = 4.0
_KEPT_ROUNDS: Final = 2
_UNMEASURED_ROUND_S = 60.0  # wait for a slow worker until a round was measured
_FORMAT: Final = "9"
_LONGEST_NAME: Final = 200
_FIXED_TIMEOUT_S: Final = 600.0


class Elastic(Transport, Membership):
    """A worker among others that share an object store, or a folder, and nothing else.

    No worker needs an address or an open port, and nothing but the store has to be up all the time.
    By default workers join late, fail and come back. Before each round, whichever worker is first
    writes down who takes part; a message counts if it arrives before the others stop waiting for
    it. All workers that read the same objects conclude the same, so a lost worker, or all of them
    at once, can resume from what is in the store.

    With `workers=K` the same K workers take part to the end and get the same bits as K workers over
    torch.distributed. A killed worker resumes from its checkpoint while the others wait.

    A worker may have several ranks, each with shards of the model (FSDP2, tensor parallelism). All
    of them build this with the same arguments; each exchanges with the same rank of the other
    workers. The first rank speaks for the worker. If any rank ends, the worker ends.

    Args:
        store: s3://, gs:// or az:// of a bucket with a prefix, hub:// as `thinwire hub` prints it,
            file:// of a folder that all workers see, or an obstore store. Keys and endpoints come
            from the environment.
        run: the run's name, the same on all workers and unique in that store; default the one in a
            hub's address.
        workers: K, if the number of workers is fixed.
        worker: this worker's number in a run with `workers`, from 0.
        token: seals all payloads; default the one in a hub's address, or in the environment
            variable THINWIRE_TOKEN. Without one, anyone who can read the store can read them.
        identity: this worker's name in the run, also after a restart; default random.
        group: the process group, or one-dimensional mesh, of this worker's ranks; default a worker
            of one rank.
        options: how long to wait, and for how many workers. With `workers`, only `timeout_s` and
            `give_up_s`.
        least_wait_s: only without `workers`: the least wait before a worker counts as lost, however
            short rounds are; default 10.
        snapshot_after: only without `workers`: write a snapshot of outer parameters and optimizer
            once the messages since the last one have this many times its bytes; default 4. A larger
            value means less to send (snapshots add 1/`snapshot_after` to the messages) and more for
            a newcomer to read.
        keep: only with `workers`: how many of the latest rounds keep their messages for a killed
            worker, as many as it may have taken since its checkpoint; default 2.
        cache: only without `workers`: a folder for the parts of a snapshot that a newcomer has
            read, so that it goes on from there after a restart; default none.
        store_options: options of the store, in place of environment variables.

    Raises:
        ConfigurationError: a name or a number is invalid, an argument is not for a run of this
            kind, obstore is missing, or the URL is unknown.

    >>> Elastic("memory://", run="first", identity="a").is_fixed
    False
    >>> Elastic("memory://", run="first", workers=2, worker=1).rank
    1
    """

    def __init__(
        self,
        store: Any,
        *,
        run: str = "",
        workers: int | None = None,
        worker: int | None = None,
        token: Token | str | None = None,
        identity: str | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        options: ElasticOptions | None = None,
        least_wait_s: float | None = None,
        snapshot_after: float | None = None,
        keep: int | None = None,
        cache: Path | None = None,
        store_options: Mapping[str, str] | None = None,
    ) -> None:
        if is_hub(store):
            hub = HubAddress.read(store)
            token, run = token or hub.token(), run or hub.run
        identity = _checked_identity(identity, worker, workers)
        options = options or ElasticOptions()
        coming = {"least_wait_s": least_wait_s, "snapshot_after": snapshot_after, "cache": cache}
        _check_unused({"keep": keep} if workers is None else coming, workers, options)
        least_wait_s = LEAST_WAIT_S if least_wait_s is None else least_wait_s
        token = optional_token() if token is None else token
        # Here, because these need what a description of the worker does not.
        from thinwire.elastic.fixed import FixedGroup
        from thinwire.elastic.run_objects import RunObjects
        from thinwire.elastic.worker_ranks import WorkerRanks

        check_run_name(run)  # before a folder is made
        token = Token(token) if isinstance(token, str) else token
        self._store = ObjectStore(store, store_options, token=token)
        self.url, self.run_name, self.identity = self._store.url, run, identity
        self.events = EventLog()
        self._ranks = WorkerRanks(group)
        self.ranks = self._ranks.size
        self._options = options
        self._snapshot_after = _SNAPSHOT_AFTER if snapshot_after is None else snapshot_after
        self._timeouts = Timeouts(
            floor_s=least_wait_s,
            patience=self._options.patience,
            unmeasured_s=max(_UNMEASURED_ROUND_S, least_wait_s),
            fixed_s=self._options.timeout_s,
        )
        self._objects = RunObjects(
            self._store,
            run,
            token,
            workers=workers or 0,
            index=self._ranks.index,
            ranks=self.ranks,
            patience_s=self._options.give_up_s,
            cache=cache,
        )
        self._description = {
            "thinwire": __version__,
            "objects": _FORMAT,
            "ranks of a worker": str(self.ranks),
        }
        self._thread: LoopThread | None = None
        self._asked_to_leave: Callable[[], bool] = lambda: False
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._session: Session | None = None  # of the first rank
        self._shard: Shard | None = None
        self._name, self._names, self._may_end = identity, (identity,), True
        if workers is not None and worker is not None:
            # Not by __new__, which would hide the parameters from help().
            object.__setattr__(self, "__class__", FixedElastic)
            self._fixed = FixedGroup(
                self._objects,
                workers=workers,
                rank=worker,
                timeout_s=self._options.timeout_s or _FIXED_TIMEOUT_S,
                keep=_KEPT_ROUNDS if keep is None else keep,
            )
            self._fixed.is_asked_to_leave = lambda: self._asked_to_leave()
            self._names = self._fixed.names
            self._name = self._names[worker]

    # -- the transport -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker in the round."""
        return 0 if self._name not in self._names else self._names.index(self._name)

    @property
    def world_size(self) -> int:
        """Number of workers in the round."""
        return len(self._names)

    @property
    def added_nbytes(self) -> int:
        """Bytes that sealing adds; 0 without a token."""
        return self._objects.sealed.added_nbytes

    @property
    def service_requests(self) -> Mapping[str, int]:
        """Requests to the store so far."""
        return asdict(self._store.requests)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Run an exchange among the workers of the round; a failure discards the round."""
        from thinwire.elastic.worker_ranks import AgreedRound

        group = self._joined().group
        assert group is not None, "a round was begun"
        return AgreedRound(group.run(posts, tag), self._ranks)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Add `card` to this worker's description, which `join` compares with the run's."""
        del tag
        self._description |= json.loads(card)
        return {0: card}

    def close(self) -> None:
        """`leave`."""
        self.leave()

    # -- the membership ----------------------------------------------------------------------------

    is_fixed = False

    def join(self, state: SharedState) -> None:
        """Join the run, if what this worker runs is the same; once.

        Raises:
            ExchangeError: the store did not answer for too long.
            MismatchError: this worker runs something else.
        """
        if self._shard is not None:
            return  # it joined before, and the first round failed
        from thinwire.elastic.loop_thread import LoopThread
        from thinwire.elastic.session import Session
        from thinwire.elastic.shard import Shard

        self._thread, self._state = LoopThread(), state
        try:
            name = self._ranks.agreed(self._introduced)
            self._name = self._ranks.gather(name)[0]
            self._names = (self._name,)
            self._shard = Shard(
                objects=self._objects,
                state=state,
                timeouts=self._timeouts,
                apply=self._apply,
                events=self.events,
                ranks=self._ranks,
            )
            if self._ranks.is_first:
                self._session = Session(
                    self._shard, self._name, self._options, snapshot_after=self._snapshot_after
                )
        except BaseException:
            self.leave()
            raise

    def _introduced(self) -> str:
        """Compare this rank with the run; the first rank returns the name of its process."""
        objects, by = self._objects, secrets.token_hex(8)
        assert self._thread is not None

        async def introduced() -> str:
            until_s = objects.until_s()  # by the clock of the thread's loop
            await objects.check_description(self._description, by, until_s)
            first = self._ranks.is_first
            return await objects.new_process(self.identity, until_s) if first else ""

        return self._thread.result(introduced(), self._asked_to_leave)

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """End waits for the others and for the store with `RunStopped`, once asked to.

        Args:
            asked: called about once a second while waiting, or more often.
        """
        self._asked_to_leave = asked

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Meet the others, and catch up with them if this worker is behind."""
        from thinwire.elastic.worker_ranks import end_following, follow

        shard, session, thread = self._joined(), self._session, self._thread
        assert thread is not None
        if session is None:
            plan = yield from self._pumped(follow(self._ranks, shard))
        else:
            try:
                plan = yield from self._pumped(session.begin_round(phase))
            except ThinwireError as error:
                thread.run(end_following(self._ranks, error))
                raise
            thread.run(end_following(self._ranks, plan))
        self._may_end = plan.phase is Phase.DONE
        if self._may_end:
            shard.leave_group()
        # At the end of a run this worker is among those of the last round, or alone.
        self._names = tuple(plan.names)
        yield plan

    def _pumped(self, work: Coroutine[Any, Any, RoundPlan]) -> Generator[Answer, None, RoundPlan]:
        """Yield what the loop has to apply, until `work` is done."""
        from thinwire.elastic.loop_thread import LOOK_S, stopped

        assert self._thread is not None
        answers = self._answers = queue.SimpleQueue()  # set before the first answer can come
        running = self._thread.start(work)
        running.add_done_callback(lambda _: answers.put(None))
        while True:
            try:
                pending = answers.get(timeout=LOOK_S)
            except queue.Empty:
                if self._asked_to_leave():
                    raise stopped(running) from None
                continue
            if pending is None:
                return running.result()
            answer, applied = pending
            try:
                yield answer
            except GeneratorExit:
                running.cancel()
                raise
            except BaseException as error:  # it belongs to whoever asked for it
                applied.set_exception(error)
            else:
                applied.set_result(None)

    async def _apply(self, answer: Snapshot | Replay) -> None:
        applied = concurrent.futures.Future[None]()
        self._answers.put((answer, applied))
        await asyncio.wrap_future(applied)

    def member(self, rank: int) -> str:
        """The identity of worker `rank` of the round."""
        return identity_of(self._names[rank])

    def log_round(self, record: RoundRecord) -> None:
        """Record the place of the round's messages, for workers that missed it."""
        logged = self._joined().logged(record), self._state.progress()
        ranks = self._ranks.gather(logged)
        if self._session is not None:
            self._session.log_round(ranks)

    def discard_round(self, why: str) -> None:
        """Note that a round was discarded."""
        self.events.note("discarded", round=self._state.version, why=why)

    def may_end(self) -> bool:
        """False if the others continued without this worker, as far as it knows."""
        return self._may_end

    def report(self, metrics: WorkerMetrics) -> None:
        """Show `metrics` to the others, once this worker has joined."""
        if self._session is not None:
            self._session.metrics = metrics

    def leave(self) -> None:
        """Leave the run."""
        session, shard, thread = self._session, self._shard, self._thread
        self._session = self._shard = self._thread = None
        if thread is None:
            return
        try:
            if session is not None:
                # Even if asked to stop: this worker's last steps may be nowhere else.
                thread.run(session.report_end())
            if shard is not None:
                with suppress(RunStopped):
                    thread.result(shard.close(), self._asked_to_leave)
        finally:
            thread.close()

    def _joined(self) -> Shard:
        assert self._shard is not None, "join() comes first; an OuterLoop calls it"
        return self._shard


class FixedElastic(Elastic):
    """`Elastic` with `workers`: the same workers to the end."""

    is_fixed = True
    join = Membership.join  # `announce` compares the workers
    member = Membership.member

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it runs in a thread, after earlier ones."""
        carries = in_process(1)[0] if self.world_size == 1 else self._fixed
        return carries.run(posts, tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Put this worker's card and wait for the others', before any training."""
        return {0: card} if self.world_size == 1 else self._fixed.announce(card, tag)

    def leave(self) -> None:
        """End the thread; exchanges under way fail. Objects in the store stay."""
        self._fixed.close()


def _checked_identity(identity: str | None, worker: int | None, workers: int | None) -> str:
    """The worker's name in the run: as given, or by its number, or random."""
    check(
        workers is None if worker is None else 0 <= worker < (workers or 0),
        f"be worker {worker} of {workers}",
        because="workers of a fixed number are numbered from 0",
        do="pass workers=K and worker=0 to K-1, or neither where workers come and go",
    )
    if identity is None:
        return f"worker-{secrets.token_hex(4)}" if worker is None else f"worker {worker}"
    check(
        worker is None,
        f"call worker {worker} {identity!r}",
        because="workers of a fixed number have numbers for names",
        do="leave identity out",
    )
    check(
        identity.isprintable() and 0 < len(identity) <= _LONGEST_NAME,
        f"call a worker {identity[:50]!r}",
        because="its name is part of the names of objects",
        do=f"pass 1 to {_LONGEST_NAME} printable characters",
    )
    return identity


def _check_unused(
    others: Mapping[str, object], workers: int | None, options: ElasticOptions
) -> None:
    """Refuse arguments that a run of this kind would ignore."""
    given = [name for name, value in others.items() if value is not None]
    if workers is not None:
        own = {name: getattr(options, name) for name in ("patience", "min_workers")}
        given += [n for n, value in own.items() if value != getattr(ElasticOptions(), n)]
    names = ", ".join(given)
    of_run, do = ("without", "pass") if workers is None else ("with", "leave out")
    check(
        not names,
        f"use {names} in a run {of_run} workers=K",
        because="it would change nothing there",
        do=f"leave it out, or {do} workers=K and worker",
    )
