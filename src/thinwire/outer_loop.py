"""The loop of every method: it sends what is due, and applies what has arrived."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from thinwire.address import connect as connect_to
from thinwire.codecs.kernels import kernel_backend
from thinwire.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    RoundDiscarded,
    check,
)
from thinwire.following import OptimizerHooks, no_compile
from thinwire.fragment_state import FragmentBuilder, FragmentState, PendingRound
from thinwire.handshake import check_descriptions, check_same_run, digest, encode_description
from thinwire.live_weights import LiveWeights, local_shard
from thinwire.loop_state import (
    LoopState,
    is_of_elastic_run,
    migrate_state,
    next_after,
    record_of,
    snapshot_of,
    without_flights,
)
from thinwire.membership import Membership, Phase, Replay, RoundPlan, Snapshot, WorkerMetrics
from thinwire.method import Method, migrate_names
from thinwire.rejection import ContributionLog
from thinwire.storage import choose_storage
from thinwire.transport import RoundTag, Transport
from thinwire.transport.metered import Metered
from thinwire.transport.replicated import ReplicatedRanks
from thinwire.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters of a worker's outer loop.

    Args:
        rounds: rounds applied, over all fragments.
        sent_bytes: payload bytes passed to the transport, metadata included. A payload counts once,
            however many receive it: through a store these are the bytes up, point to point as many
            as `received_bytes`.
        received_bytes: payload bytes from other workers: the bytes down.
        peak_sent_bytes_per_step: most bytes sent after one inner step. The last round counts each
            fragment alone, because the worker no longer trains.
        wait_s: seconds spent waiting for exchanges.
        overlapped_s: seconds of exchanges during which this worker trained.
        left_out: number of means without a worker's contribution, by rank.
        contributions: by member (in an elastic run the worker's identity), the number of its
            contributions that were left out, by reason, or scaled down ("clipped").
        peak_outer_device_bytes: peak memory of anchors, outer optimizer and feedback on the
            worker's device.
        peak_outer_host_bytes: the same in the host's memory (`outer_device="cpu"`).
        consensus_sent_bytes: bytes sent to average the anchors of all workers for evaluations; not
            in `sent_bytes`.
        consensus_received_bytes: bytes received for the same purpose.
        requests: requests to an object store since the transport was built, by kind; else empty.
        kernels: what encodes and decodes on the worker's device, for codecs that have kernels:
            "torch", or numba or triton with its version. All produce the same bytes.
    """

    rounds: int
    sent_bytes: int
    received_bytes: int
    peak_sent_bytes_per_step: int
    wait_s: float
    overlapped_s: float
    left_out: Mapping[int, int]
    contributions: Mapping[str, Mapping[str, int]]
    peak_outer_device_bytes: int
    peak_outer_host_bytes: int
    consensus_sent_bytes: int
    consensus_received_bytes: int
    requests: Mapping[str, int]
    kernels: str


class OuterLoop:
    """Connects a worker's training loop to those of the other workers.

    Call `step()` after every inner step. Or use the loop as a context manager: it then counts the
    steps of the (last) optimizer itself, and exchanges what is left at the end of the block.

    Args:
        model: this worker's model; all workers start from the same weights. It may be moved to
            another device later, unless a round is under way.
        optimizer: the model's optimizer, or a list of optimizers in the order they are stepped.
        method: how the workers train together.
        connect: address of the run, as `tw.connect` takes it; default the environment variable
            THINWIRE_AT. Without either, the workers are the ranks of the default process group, or
            this process alone.
        transport: a connection, instead of an address.
        outer_device: where anchors, outer optimizer and feedback are between rounds: None is the
            model's device, "cpu" the host's memory. Workers may differ in it.
        resume: a `state_dict()`, if the model already has the weights of the same checkpoint. Those
            differ between workers in the middle of a round, and are not compared.
        ddp_group: process group of this worker's ranks, if each of them has all parameters (DDP):
            each rank then sends its part of every payload. Ranks that shard parameters need none.

    Attributes:
        method: how the workers train together.
        transport: the connection to the other workers.
        is_elastic: whether workers join and leave.

    Raises:
        MismatchError: the workers differ in method, parameters, weights or number.
        ConfigurationError: the model or the optimizer does not fit the method, or the method's
            outer optimizer is for asynchronous training.

    >>> import thinwire as tw
    >>> model = nn.Linear(2, 1)
    >>> method = tw.presets.diloco(sync_every=2)
    >>> with OuterLoop(model, method.inner.build(model), method) as outer:
    ...     pass
    >>> outer.stats.rounds
    0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        *,
        connect: str | None = None,
        transport: Transport | None = None,
        outer_device: torch.device | str | None = None,
        resume: Mapping[str, Any] | None = None,
        ddp_group: "ProcessGroup | DeviceMesh | None" = None,
    ) -> None:
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        method.outer.check_rounds()
        self.method = method
        self._live = LiveWeights(model, optimizers)
        check(
            connect is None or transport is None,
            "connect the workers",
            because="both connect and transport are given",
            do="leave one of them out",
        )
        transport = connect_to(connect) if transport is None else transport
        # An elastic transport decides who takes part.
        membership = transport if isinstance(transport, Membership) else Membership()
        self._membership = membership
        self.transport, self.is_elastic = transport, not membership.is_fixed
        self._meter = Metered(transport)
        self._transport: Transport = self._meter
        self._counters = self._meter.counters
        if self.is_elastic:
            method.check_elastic(is_divided=ddp_group is not None)
        self._parts = 1
        if ddp_group is not None:
            self._transport = divided = ReplicatedRanks(self._meter, ddp_group)
            self._parts = divided.parts
        self._storage = choose_storage(outer_device, self._live.device)
        builder = FragmentBuilder(
            method, self._live, self._transport, self._storage, is_fixed=membership.is_fixed
        )
        self._state = LoopState(builder, transport)
        self._plan: RoundPlan | None = None
        self._delay_steps = method.overlap.steps(sync_every=method.sync_every)
        self._peak_sent_bytes = 0
        self._contributions = ContributionLog(self._membership.member)
        self._hooks = OptimizerHooks(self._live.optimizers)
        self._hooks.before_first_step(self._start)
        self._metrics = WorkerMetrics()
        self._has_joined = self._is_closed = False
        try:
            in_flight = [] if resume is None else self._load(resume)
            self._check_all_run_the_same(is_resumed=resume is not None)
            self._send_again(in_flight)
        except BaseException:
            self.close()
            raise

    def _check_all_run_the_same(self, *, is_resumed: bool) -> None:
        description = self._state.description | {"thinwire version": __version__}
        if self._parts > 1:
            description["ranks of ddp_group"] = str(self._parts)
        # A newcomer to an elastic run loads the weights of the others, but not frozen ones. In a
        # resumed model these may differ, for example if they are a running average of weights.
        is_fixed = self._membership.is_fixed
        if is_fixed:  # versions may differ in what `Automatic` is
            found = [fragment.exchange.sizes.pattern for fragment in self._state.fragments]
            description["wire exchanges"] = ", ".join(found)
        weights = self._state.own() if is_fixed else None
        frozen = None if is_fixed and is_resumed else self._live.frozen()
        tag = RoundTag(what="the workers' descriptions", round=0)
        mine = encode_description(description, weights, frozen)
        check_descriptions(self._transport.announce(mine, tag))

    # -- a round -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Exchange what is due: `begin()` and `finish()`. Call it after every inner step.

        Raises:
            ConfigurationError: the loop follows the optimizer and steps itself.
        """
        self._hooks.check_counts_once()
        self.begin()
        self.finish()

    @no_compile
    def begin(self, *, last: bool = False) -> None:
        """Count an inner step, and send every fragment that is due.

        Args:
            last: training has ended. Count no step, send every fragment that was trained since it
                was last sent, and make all rounds in flight due.

        Raises:
            NonFiniteError: a pseudo-gradient is not finite; the error names parameter and step.
            ConfigurationError: the loop is closed, or an inner optimizer keeps a copy of the
                weights.
        """
        self._check_open()
        if last:
            # What was prefetched is for the next step's fragment; another may be sent first now.
            self._storage.put_away()
        self._join()
        if self._state.step == 0:
            self._hooks.forget_first_step()
        state = self._state
        if last:
            if state.ended_at_step != state.step or not self._membership.may_end():
                self._begin_round(Phase.LAST)
            self._send_for(Phase.LAST if self._plan is None else self._plan.phase)
            return
        state.step += 1
        if self._live.unsearched and state.step > 2:
            self._live.check_no_copies()
        is_round = state.step % self.method.sync_every == 0
        plan = self._begin_round(Phase.ROUND) if is_round else None
        self._send_for(Phase.ROUND if plan is None else plan.phase)

    @no_compile
    def finish(self) -> None:
        """Wait for the payloads of the rounds that are due, and take their outer steps.

        Raises:
            ExchangeError: a peer died, timed out, or sent an invalid payload.
            MismatchError: a peer's outer parameters differ from this worker's.
        """
        step = self._state.step
        self._apply_all(
            [(f, p) for f in self._state.fragments for p in f.pending if p.due_step <= step]
        )
        self._prefetch()

    def flush(self) -> bool:
        """Exchange what was trained since the last round. Call it after the last inner step.

        A round that is discarded is repeated until it counts.

        Returns:
            True if training is over. False if an elastic run went on without this worker's last
            steps, which puts it back at an earlier `inner_step`: train on from there, and call this
            again.
        """
        while True:
            self.begin(last=True)
            self.finish()
            if self._plan is not None and self._plan.phase is Phase.ROUND:
                _LOG.warning("back at inner step %d of the run: train on from it", self.inner_step)
                return False
            if self._state.fully_synced() and self._membership.may_end():
                return True

    def _send_for(self, phase: Phase) -> None:
        if phase is Phase.LAST:
            self._send_left_over()
        elif phase is not Phase.DONE:
            due = self._due_at(self._state.step)
            self._send_all(due)
            self._note_peak(due)

    def _send_left_over(self) -> None:
        fragments = [f for f in self._state.fragments if f.sent_at_step < self._state.step]
        # A pseudo-gradient is measured from the anchor after its last update, so rounds beyond the
        # overlap's limit are applied first.
        full = [f for f in fragments if len(f.pending) >= self.method.overlap.at_once]
        self._apply_all([(fragment, pending) for fragment in full for pending in fragment.pending])
        self._send_all(fragments)
        # The worker no longer trains, so the last exchanges need not be sent at once.
        for each in fragments:
            self._note_peak([each])
        for fragment in self._state.fragments:
            for pending in fragment.pending:
                pending.due_step = self._state.step

    @torch.no_grad()
    def _send_all(self, fragments: Sequence[FragmentState]) -> None:
        if fragments:
            self._live.check_unchanged()
        for fragment in fragments:
            self._send(fragment)

    def _send(self, fragment: FragmentState) -> None:
        step = self._state.step
        if len(fragment.pending) >= self.method.overlap.at_once:
            raise ConfigurationError(
                f"send {fragment.fragment.name} again at inner step {step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        due_step = step + self._delay_steps
        # A snapshot taken meanwhile must not contain half of this send.
        with fragment.outer.measure() as delta, self._state.lock:
            # A lone worker cannot drift from others.
            anchor = b"" if self._transport.world_size == 1 else fragment.outer.digest()
            joins = self._plan is not None and self._plan.joins
            # If the round is discarded, its feedback is restored.
            before = None if self._membership.is_fixed else fragment.exchange.feedback()
            sent = None if joins else delta
            try:
                fragment.send(
                    sent, step=step, due_step=due_step, anchor=anchor, feedback_before=before
                )
            except NonFiniteError:  # from a codec, which does not know the parameters
                self._live.check_finite(fragment.fragment.names, delta, when=f"inner step {step}")
                raise
            if not joins:
                fragment.outer.on_sent(delta)

    def _apply_all(self, due: list[tuple[FragmentState, PendingRound]]) -> None:
        # All workers must wait in one order: the sort is stable, and fragments are in plan order.
        for fragment, pending in sorted(due, key=lambda fp: (fp[1].due_step, fp[1].sent_at_step)):
            # Discarding a round also discards those in flight beside it.
            if any(other is pending for other in fragment.pending):
                self._apply(fragment, pending)

    def _apply(self, fragment: FragmentState, pending: PendingRound) -> None:
        try:
            with torch.no_grad():
                result = self._meter.wait(pending.exchange)
        except RoundDiscarded as discarded:
            self._membership.discard_round(discarded.because)
            with self._state.lock:
                self._state.cancel_rounds()
            return
        # Only now: a checkpoint written after a failure must still have the round.
        with self._state.lock:
            before = b"" if self._plan is None else fragment.outer.digest()
            fragment.apply(pending, result, rank=self._transport.rank)
            self._state.version += 1
            if result.left_out or result.clipped:
                self._contributions.note(result.left_out, result.clipped, pending.tag)
            if self._plan is None:
                return
            names = self._plan.names
            record = record_of(self._state, fragment, pending, result, names, before=before)
            fragment.note_contributors(pending.tag.round, record.facts["counted"])
            self._membership.log_round(record)
            self.report()

    def _due_at(self, step: int) -> list[FragmentState]:
        return [
            each
            for each in self._state.fragments
            if each.fragment.is_due(step=step, sync_every=self.method.sync_every)
        ]

    def _note_peak(self, fragments: Sequence[FragmentState]) -> None:
        nbytes = count = 0
        for fragment in fragments:
            nbytes += fragment.exchange.sizes.sent_nbytes
            count += fragment.exchange.sizes.sent_count
        own_bytes = -(-nbytes // self._parts) + self._transport.added_nbytes * count
        self._peak_sent_bytes = max(self._peak_sent_bytes, own_bytes)

    def _prefetch(self) -> None:
        """Start loading what the next step needs first, for one fragment: memory is scarce."""
        step = self._state.step + 1
        if due := self._due_at(step):
            due[0].outer.prefetch(for_step=False)
            due[0].exchange.prefetch()
            return
        for fragment in self._state.fragments:
            if any(pending.due_step <= step for pending in fragment.pending):
                fragment.outer.prefetch(for_step=True)
                return

    # -- who takes part ----------------------------------------------------------------------------

    def join(self) -> None:
        """Join the other workers; later calls do nothing.

        In an elastic run a newcomer loads the outer parameters of the others. `begin()` calls this;
        call it yourself before the first inner step if you need `share`.

        Raises:
            ExchangeError: the run cannot be reached. MismatchError: it is another run.
            ConfigurationError: another outer loop trains one of the parameters, or the model was
            moved to another device while a round was under way.
        """
        self._start()
        self._join()

    def _join(self) -> None:
        self._follow_model()
        if self._has_joined:
            return
        # Without an anchor, gradients are averaged, and another loop may exchange the same weights.
        if self.memory()["anchor"]:
            self._live.claim()
        else:
            self._live.unsearched.clear()
        self._membership.join(self._state)
        plan = self._begin_round(Phase.JOIN)
        self._has_joined = True
        if plan is not None and plan.joins:
            try:
                self._send_for(plan.phase)
            finally:
                # Later rounds need this worker's contribution.
                self._plan = replace(plan, joins=False)
            self.finish()

    def _start(self) -> None:
        """Begin at the weights there are: trainers load some after the loop was built."""
        # After the first step of an optimizer, weights that differ are trained ones.
        if not self._hooks.awaits_first_step or self._state.step or self._state.version:
            return
        self._follow_model()
        replaced = self._state.replaced()
        check(
            not (replaced and self.is_elastic and self._has_joined),
            "train from weights that were loaded after this worker had joined",
            because="the other workers have those of before",
            do="load them before join(), and before a `with` block of the outer loop",
        )
        self._state.start_from_weights(replaced)

    def _follow_model(self) -> None:
        # Trainers move the model to the device when they are built, or when training begins.
        if self._live.device != self._storage.device:
            self._state.move(self._live.device)

    def _begin_round(self, phase: Phase) -> RoundPlan | None:
        if self._membership.is_fixed:
            return None
        started_s = time.perf_counter()
        try:
            answers = self._membership.begin_round(phase)
            answer = next(answers)
            while True:
                match answer:
                    case Snapshot():
                        answer = next_after(answers, partial(self._state.load, answer))
                    case Replay():
                        answer = next_after(answers, partial(self._state.replay, answer))
                    case RoundPlan():
                        if answer.phase is Phase.DONE:
                            # What this worker trained since the last round is lost.
                            self._state.drop_local_work()
                        return self._follow_plan(answer)
        finally:
            self._counters.wait_s += time.perf_counter() - started_s
            if self._plan is not None:
                self.report()

    def _follow_plan(self, plan: RoundPlan) -> RoundPlan:
        state, workers = self._state, self._transport.world_size
        with state.lock:
            if plan.changed:
                state.cancel_rounds()
                state.set_exchange_workers(workers, self._transport.rank)
            state.set_outer_workers(workers)
            self._plan, state.step = plan, plan.step
            state.name = plan.names[self._transport.rank]
            state.dealt = plan.dealt + len(plan.names)
        if plan.phase in (Phase.LAST, Phase.DONE):
            state.ended_at_step = state.step
        if plan.phase is Phase.DONE:
            for fragment in state.fragments:
                fragment.sent_at_step = state.step
        return plan

    @property
    def inner_step(self) -> int:
        """Inner step of the schedule; the other workers' step after catching up with them."""
        return self._state.step

    @property
    def workers(self) -> int:
        """K, the number of workers in the current round."""
        return self._transport.world_size

    @property
    def share(self) -> int:
        """Number of this round's data share, which no other worker has or had.

        With fixed K it is round * K + rank. It changes when a round begins, every H inner steps.

        Raises:
            ConfigurationError: this worker of an elastic run has not joined.
        """
        if self._plan is not None:
            return self._plan.dealt + self._transport.rank
        if self.is_elastic:
            raise ConfigurationError(
                "get the data share of this worker",
                because="it has not joined the others, which assign the shares",
                do="call outer.join() before the first inner step",
            )
        rounds = self._state.step // self.method.sync_every
        # A checkpoint of an elastic run had assigned `dealt` shares.
        first = self._state.dealt + rounds * self._transport.world_size
        return first + self._transport.rank

    # -- results -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Rounds, bytes and seconds so far."""
        ledger = self._storage.ledger
        return Stats(
            rounds=self._state.version,
            **asdict(self._counters),
            peak_sent_bytes_per_step=self._peak_sent_bytes,
            left_out=dict(self._contributions.left_out),
            contributions=self._contributions.counts(),
            peak_outer_device_bytes=ledger.peak_device_bytes,
            peak_outer_host_bytes=ledger.peak_host_bytes,
            consensus_sent_bytes=self._state.consensus_counters.sent_bytes,
            consensus_received_bytes=self._state.consensus_counters.received_bytes,
            requests=self.transport.service_requests,
            kernels=kernel_backend(self._live.device),
        )

    def report(
        self, *, loss: float | Tensor | None = None, tokens_per_s: float | None = None
    ) -> None:
        """Publish measurements of this worker in an elastic run.

        `thinwire status` and its metrics show them, beside bytes and waits. They are sent with the
        worker's next sign of life, so you may call this after every step.

        Args:
            loss: mean loss of the last training steps; reading a tensor waits for its device.
                Default the last value.
            tokens_per_s: tokens per second that this worker reads; default the last value.
        """
        known = self._metrics
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        self._metrics = WorkerMetrics(
            # Sent as JSON, which takes no torch or numpy numbers.
            loss=known.loss if loss is None else float(loss),
            tokens_per_s=known.tokens_per_s if tokens_per_s is None else float(tokens_per_s),
            sent_bytes=self._counters.sent_bytes,
            received_bytes=self._counters.received_bytes,
            wait_s=self._counters.wait_s,
        )
        self._membership.report(self._metrics)

    def memory(self) -> dict[str, int]:
        """Bytes of each state of this worker between rounds.

        Returns:
            `live weights`, `inner state` (of the optimizers), `anchor`, `outer state` (momentum)
            and `feedback`.
        """
        fragments = [fragment.memory() for fragment in self._state.fragments]
        return {
            "live weights": sum(local_shard(p).nbytes for p in self._live.parameters.values()),
            "inner state": sum(tensor.nbytes for tensor in self._live.inner_state()),
            **{state: sum(held[state] for held in fragments) for state in fragments[0]},
        }

    def consensus(self) -> dict[str, Tensor]:
        """Outer parameters as a state dict of the model.

        Values are fp32, and DTensors where the parameter is one; buffers are this worker's. They
        may share memory with the loop until the next round: copy them to keep them. If hooks of the
        model build its state dict, they see these values, rounded to the parameters' dtypes.

        If each worker has an anchor of its own (`method.outer.has_own_anchors`), this is the mean
        of all anchors, gathered at most once per outer step, and all workers must call it. `stats`
        counts these bytes separately. Otherwise nothing is sent.

        Raises:
            ExchangeError: a peer died, or did not call this.
            NonFiniteError: the outer parameters of this worker are not finite.
        """
        self._start()
        return self._state.as_state_dict(self._state.consensus())

    def digest(self) -> str:
        """SHA-256 of this worker's outer parameters.

        Equal on all workers after every round, unless `method.outer.has_own_anchors`.
        """
        return digest(self._state.own())

    def evaluating(self) -> AbstractContextManager[None]:
        """Put `consensus()` into the model for the duration of a block.

        The call begins to gather the consensus, if needed, and entering the block waits for it. If
        workers share a thread, call this for all of them before you enter the first block. A block
        that is never left leaves the outer parameters in the model.

        >>> import thinwire as tw
        >>> model = nn.Linear(2, 1)
        >>> outer = OuterLoop(model, [], tw.presets.diloco())
        >>> with outer.evaluating():
        ...     y = model(torch.zeros(2))
        """
        self._start()
        self._state.begin_consensus()
        return _Evaluation(lambda: self._live.swap_in(self._state.consensus()))

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is needed to resume bit for bit, besides model and optimizer: tensors and numbers.

        It contains the messages in flight, and resuming sends them again. In an elastic run it has
        none: the other workers continue without what this one trained since its last round, as if
        it had been killed. The tensors share memory with the loop: copy or save them before the
        next step.

        Raises:
            CheckpointError: called between `begin()` and `finish()`.
        """
        state = self._state
        with state.lock:
            check(
                self.is_elastic
                or all(p.due_step > state.step for f in state.fragments for p in f.pending),
                "save the outer loop between begin() and finish()",
                because="a round that is due was not applied yet",
                do="save after finish()",
                kind=CheckpointError,
            )
            # A fixed number of workers is in the description already.
            workers = {"workers": str(state.outer_workers)} if self.is_elastic else {}
            keep = not self.is_elastic
            return {
                "run": state.description | workers,
                "step": state.step,
                "rounds": state.version,
                "dealt": state.dealt,
                "peak_sent_bytes": self._peak_sent_bytes,
                "traffic": asdict(self._counters),
                **state.consensus_state(),
                **self._contributions.state_dict(workers=self._transport.world_size),
                "fragments": [f.state_dict(in_flight=keep) for f in state.fragments],
            }

    def load_state_dict(self, state: Mapping[str, Any], *, with_feedback: bool = True) -> None:
        """Resume from `state_dict()` of a loop over the same model and method.

        With the same number of workers, a fixed run continues bit for bit: load model and
        optimizer, too. With another number, or from an elastic run, outer parameters and outer
        optimizer continue. Rounds in flight are dropped; the next round sends their work, which is
        in the local weights of the checkpoint. In an elastic run the local weights are set to the
        outer parameters, and joining catches up with the other workers.

        Args:
            state: state of any rank, of a fixed or an elastic run.
            with_feedback: where the run does not continue bit for bit, and nothing was in flight,
                continue with the error feedback in `state`, if it fits. Pass false if another
                worker of this run does so from the same state.

        Raises:
            MismatchError: it is from another model or method; the error names the field.
            CheckpointError: it is not the state of an outer loop.
            ConfigurationError: the method's overlap cannot drop rounds in flight.
        """
        self._send_again(self._load(state, with_feedback=with_feedback))

    def _load(
        self, state: Mapping[str, Any], *, with_feedback: bool = True
    ) -> list[tuple[FragmentState, Mapping[str, Any]]]:
        """Resume from `state`; returns the rounds in flight, which must be sent again."""
        self._follow_model()
        state, mine = migrate_state(state), self._state
        check_same_run(migrate_names(state["run"]), mine.description)
        self._peak_sent_bytes = int(state["peak_sent_bytes"])
        self._contributions.load_state_dict(state, workers=self._transport.world_size)
        workers = mine.description.get("workers")
        is_same = state["run"].get("workers", workers) == workers
        is_same = is_same and not (self.is_elastic or is_of_elastic_run(state))
        again: list[tuple[FragmentState, Mapping[str, Any]]] = []
        if not is_same:
            self.method.overlap.check_cancellable()
            state = without_flights(state)
        pairs = list(zip(mine.fragments, state["fragments"], strict=True))
        if self.is_elastic:
            mine.load(snapshot_of(state, sync_every=self.method.sync_every))
            mine.drop_local_work()
        else:
            mine.step, mine.version = int(state["step"]), int(state["rounds"])
            mine.dealt = int(state["dealt"])
            for fragment, saved in pairs:
                if is_same:
                    again += [(fragment, each) for each in fragment.load_state_dict(saved)]
                else:
                    fragment.load_shared(saved["outer"], saved)
        # Shards of a reduce-scatter are cut by K, and so is their feedback: it may not fit.
        if not is_same and with_feedback:
            fits = [fragment.load_feedback(saved["exchange"]) for fragment, saved in pairs]
            if not all(fits):
                _LOG.warning("the error feedback of this checkpoint does not fit, and is dropped")
        self._counters.restore(state["traffic"])
        mine.load_consensus_state(state)
        return again

    def _send_again(self, rounds: list[tuple[FragmentState, Mapping[str, Any]]]) -> None:
        counted = asdict(self._counters)
        for fragment, round in sorted(rounds, key=lambda found: int(found[1]["sent_at_step"])):
            fragment.send_again(round)
        # These messages were counted when they were first sent.
        self._counters.restore(counted)

    # -- with an optimizer -------------------------------------------------------------------------

    def save_with_optimizer(self) -> torch.optim.Optimizer:
        """Add the outer state to the state dict of the (last) optimizer, under `thinwire`.

        Whatever saves and loads the optimizer then resumes both. Build the loop before you load the
        optimizer; a state dict without the outer state raises `CheckpointError`.

        Returns:
            The optimizer.

        Raises:
            ConfigurationError: the loop has no optimizer.
        """
        return self._hooks.carry(self)

    def __enter__(self) -> Self:
        self._check_open()
        self._hooks.follow(self.step)
        # Join first, so that the first inner step starts from the others' outer parameters.
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hooks.unfollow()
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Leave the run, and remove all hooks from the optimizers."""
        self._is_closed = True
        self._hooks.remove()
        self._storage.put_away()
        self._live.close()
        self._membership.leave()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(
                "use a closed outer loop",
                because="closing it gave the optimizers back, and ended the exchanges",
                do="build a new OuterLoop, and load the state with load_state_dict()",
            )


class _Evaluation(AbstractContextManager[None]):
    # Not a generator: collecting an unfinished one would put the local weights back.
    def __init__(self, swap_in: Callable[[], Callable[[], None]]) -> None:
        self._swap_in = swap_in

    def __enter__(self) -> None:
        self._restore = self._swap_in()

    def __exit__(self, *_: object) -> None:
        self._restore()
