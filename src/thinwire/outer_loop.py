"""The one loop: what is due is sent, what has arrived is applied. It never asks for the method."""

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from thinwire.address import connect as connect_to
from thinwire.codecs.kernels import kernel_backend
from thinwire.contributions import ContributionLog
from thinwire.errors import CheckpointError, ConfigurationError, RoundDiscarded, check
from thinwire.exchange import RoundResult
from thinwire.following import OptimizerHooks
from thinwire.fragment_builder import FragmentBuilder
from thinwire.fragment_state import FragmentState, PendingRound
from thinwire.handshake import check_descriptions, check_same, digest, encode_description
from thinwire.live_weights import LiveWeights, local_shard
from thinwire.loop_state import (
    LoopState,
    check_keys,
    check_shared_keys,
    next_after,
    record_of,
)
from thinwire.membership import (
    FixedMembership,
    Go,
    Load,
    Membership,
    Over,
    Phase,
    Replay,
    RoundPlan,
    Snapshot,
    WorkerMetrics,
)
from thinwire.method import Method, migrate_names
from thinwire.no_compile import no_compile, prepare_no_compile
from thinwire.outer_parameters import OuterParameters
from thinwire.stats import Stats
from thinwire.storage import choose_storage
from thinwire.transport import Metered, ReplicatedRanks, RoundTag, Transport
from thinwire.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_LOG = logging.getLogger(__name__)


class OuterLoop:
    """Connects a worker's training loop to those of the others.

    Call `step()` after every inner step, or use the loop as a context manager: it then follows the
    (last) optimizer by itself and sends what is left over at the end.

    Args:
        model: the worker's model; all workers start from the same weights.
        optimizer: what steps it, or a list of optimizers, stepped in that order.
        method: the description of what happens.
        connect: address of the run, as `tw.connect` takes it; default the environment variable
            THINWIRE_AT, and without one the ranks of the default process group, or this process
            alone.
        transport: a connection in place of an address.
        membership: who takes part in which round; default the transport if it decides that, too
            (`Elastic` does), else the same workers to the end.
        outer_device: where anchors, outer optimizer and feedback rest between rounds: None is the
            model's device, "cpu" the host's memory. Workers may differ in it.
        resume: what `state_dict()` returned, where the model has its checkpoint's weights already:
            in the middle of a round these differ from worker to worker, and are not compared.
        ddp_group: of this worker's ranks, where all of them hold all parameters (DDP): each sends
            its part of every payload, and together they send it once. Ranks that shard the
            parameters need none.

    Raises:
        MismatchError: the workers differ in method, parameters, weights or world.
        ConfigurationError: the model or the optimizer does not fit the method, or its outer
            optimizer is for asynchronous training.

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
        membership: Membership | None = None,
        outer_device: torch.device | str | None = None,
        resume: Mapping[str, Any] | None = None,
        ddp_group: "ProcessGroup | DeviceMesh | None" = None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        method.outer.check_rounds()
        prepare_no_compile()
        self.method = method
        self._live = LiveWeights(model, optimizers)
        check(
            connect is None or transport is None,
            "connect the workers",
            because="both connect and transport are given",
            do="leave one of them out",
        )
        transport = connect_to(connect) if transport is None else transport
        if membership is None:
            # An elastic transport decides by itself who takes part.
            membership = transport if isinstance(transport, Membership) else FixedMembership()
        self._membership = membership
        self.transport = transport
        metered = Metered(transport)
        self._transport: Transport = metered
        self._counters = metered.counters
        if self.is_elastic:
            method.check_elastic(is_divided=ddp_group is not None)
        self._parts = 1
        if ddp_group is not None:
            self._transport = divided = ReplicatedRanks(metered, ddp_group)
            self._parts = divided.parts
        self._storage = choose_storage(outer_device, self._live.device)
        builder = FragmentBuilder(
            method,
            self._live,
            self._transport,
            self._storage,
            is_fixed=self._membership.is_fixed,
        )
        self._state = LoopState(builder, workers=transport.world_size, rank=transport.rank)
        self._outer = OuterParameters(builder, self._live, self._state.fragments, transport)
        self._plan: RoundPlan | None = None
        self._rounds_at_once = method.overlap.at_once
        self._delay_steps = method.overlap.steps(sync_every=method.sync_every)
        self._peak_sent_bytes = 0
        self._contributions = ContributionLog(self._membership.member)
        self._hooks = OptimizerHooks(self._live.optimizers)
        self._evaluation = ExitStack()
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
        # Where workers come and go, the others may have moved on: a newcomer takes their weights,
        # but not what is frozen. In a model under way that may be a worker's own, as a running
        # average of its weights is.
        is_fixed = self._membership.is_fixed
        weights = self._outer.own() if is_fixed else None
        frozen = None if is_fixed and is_resumed else self._live.frozen()
        tag = RoundTag(what="the workers' descriptions", round=0)
        mine = encode_description(description, weights, frozen)
        check_descriptions(self._transport.announce(mine, tag))

    # -- a round -----------------------------------------------------------------------------------

    def step(self) -> None:
        """`begin()` and `finish()`: call it after every inner step.

        Raises:
            ConfigurationError: the loop follows an optimizer and does this by itself.
        """
        self._hooks.check_may_step()
        self.begin()
        self.finish()

    @no_compile
    def begin(self) -> None:
        """Count an inner step and send every fragment that is due.

        Raises:
            NonFiniteError: something to be sent is not finite; names parameter and step.
            ConfigurationError: the loop is closed.
        """
        self._check_open()
        self.join()
        state = self._state
        state.step += 1
        plan = None
        if state.step % self.method.sync_every == 0:
            plan = self._begin_round(Phase.ROUND)
        self._send_for(Phase.ROUND if plan is None else plan.phase)

    @no_compile
    def begin_last(self) -> None:
        """Send every fragment that was trained since it was sent; all pending rounds are due."""
        # Another fragment than the one that the next step would have needed may come first.
        self._storage.put_away()
        self.join()
        if self._state.ended_at_step != self._state.step or not self._membership.may_end():
            self._begin_round(Phase.LAST)
        is_over = self._plan is not None and self._plan.phase is Phase.DONE
        self._send_for(Phase.DONE if is_over else Phase.LAST)

    @no_compile
    def finish(self) -> None:
        """Apply what is due: wait for all workers' payloads and take the outer step.

        Raises:
            ExchangeError: a peer died or stayed silent, or sent what cannot be used.
            MismatchError: a peer's outer parameters are not this worker's.
        """
        step = self._state.step
        self._apply_all(
            [(f, p) for f in self._state.fragments for p in f.pending if p.due_step <= step]
        )
        self._prefetch()

    def flush(self) -> None:
        """`begin_last()` and `finish()`: call it after the last inner step.

        A round that is discarded is repeated until it counts.
        """
        self.begin_last()
        self.finish()
        while not (self._state.fully_synced() and self._membership.may_end()):
            self.begin_last()
            self.finish()

    def _send_for(self, phase: Phase) -> None:
        if phase is Phase.DONE:
            return
        if phase is Phase.LAST:
            self._send_left_over()
            return
        due = [f for f in self._state.fragments if self._is_due(f, self._state.step)]
        self._send_all(due)
        self._note_peak(due)

    def _send_left_over(self) -> None:
        fragments = [f for f in self._state.fragments if f.sent_at_step < self._state.step]
        # A pseudo-gradient is measured from the anchor after its last update, so what would be one
        # round too many is applied first.
        full = [f for f in fragments if len(f.pending) >= self._rounds_at_once]
        self._apply_all([(fragment, pending) for fragment in full for pending in fragment.pending])
        self._send_all(fragments)
        # No training goes on beside the last exchanges: they need not be carried at once.
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
        if len(fragment.pending) >= self._rounds_at_once:
            raise ConfigurationError(
                f"send {fragment.fragment.name} again at inner step {step}",
                because="its last exchange was begun and not finished",
                do="call finish() after every begin()",
            )
        due_step = step + self._delay_steps
        # A healing server must not take what is sent for what has come back.
        with fragment.outer.measure() as delta, self._state.lock:
            # A lone worker cannot drift from others.
            anchor = b"" if self._transport.world_size == 1 else fragment.digest()
            if self._plan is not None and self._plan.joins:
                fragment.send_nothing(anchor=anchor, step=step, due_step=due_step)
                return
            # What a round took out of feedback is put back if the round is discarded.
            before = None if self._membership.is_fixed else fragment.exchange.feedback()
            names, when = fragment.fragment.names, f"inner step {step}"
            with self._live.naming_what_is_not_finite(names, delta, when=when):
                fragment.send(
                    delta, step=step, due_step=due_step, anchor=anchor, feedback_before=before
                )
            fragment.outer.on_sent(delta)

    def _apply_all(self, due: list[tuple[FragmentState, PendingRound]]) -> None:
        # All workers must wait in one order: a sort is stable, and fragments have the plan's order.
        for fragment, pending in sorted(due, key=lambda fp: (fp[1].due_step, fp[1].sent_at_step)):
            # A round that is discarded takes those with it that are under way beside it.
            if any(other is pending for other in fragment.pending):
                self._apply(fragment, pending)

    def _apply(self, fragment: FragmentState, pending: PendingRound) -> None:
        try:
            with torch.no_grad():
                result = pending.exchange.wait()
        except RoundDiscarded as discarded:
            _LOG.info("%s", discarded)
            with self._state.lock:
                self._state.cancel_rounds()
            return
        # Not before: a round that failed must neither be passed over nor left out of a checkpoint.
        with self._state.lock:
            before = b"" if self._plan is None else fragment.digest()
            fragment.apply(pending, result, rank=self._transport.rank)
            self._state.version += 1
            self._note(fragment, pending, result, before)

    def _note(
        self,
        fragment: FragmentState,
        pending: PendingRound,
        result: RoundResult,
        before: bytes,
    ) -> None:
        self._contributions.note(result.left_out, result.clipped, pending.tag)
        if self._plan is None:
            return
        record = record_of(self._state, fragment, pending, result, self._plan.names, before=before)
        fragment.note_contributors(pending.tag.round, record.facts["counted"])
        self._membership.log_round(record)
        self.report()

    def _is_due(self, fragment: FragmentState, step: int) -> bool:
        return fragment.fragment.is_due(step=step, sync_every=self.method.sync_every)

    def _note_peak(self, fragments: Sequence[FragmentState]) -> None:
        sizes = [fragment.exchange.sizes for fragment in fragments]
        own_bytes = -(-sum(size.sent_nbytes for size in sizes) // self._parts)
        own_bytes += self._transport.added_nbytes * sum(size.sent_count for size in sizes)
        self._peak_sent_bytes = max(self._peak_sent_bytes, own_bytes)

    def _prefetch(self) -> None:
        """Begin to bring what the next step needs first: one fragment's, for room is scarce."""
        step = self._state.step + 1
        for fragment in self._state.fragments:
            if self._is_due(fragment, step):
                fragment.outer.prefetch(for_step=False)
                fragment.exchange.prefetch()
                return
        for fragment in self._state.fragments:
            if any(pending.due_step <= step for pending in fragment.pending):
                fragment.outer.prefetch(for_step=True)
                return

    # -- who takes part ----------------------------------------------------------------------------

    def join(self) -> None:
        """Take a place among the workers, which may be under way already; once.

        Where workers come and go, a newcomer then has the others' outer parameters. `begin()` does
        it by itself; call it earlier to know `share` before the first inner step.

        Raises:
            ExchangeError: the run cannot be reached. MismatchError: it is another run.
            ConfigurationError: another outer loop trains one of the parameters.
        """
        if self._has_joined:
            return
        # Not where gradients are averaged: another loop may exchange what is trained with these.
        if self.memory()["anchor"]:
            self._live.claim()
        self._membership.join(self._state)
        plan = self._begin_round(Phase.JOIN)
        self._has_joined = True
        if plan is not None and plan.joins:
            try:
                self._send_for(plan.phase)
            finally:
                # Only this once: a later round must not go without this worker's work.
                self._plan = replace(plan, joins=False)
            self.finish()

    def _begin_round(self, phase: Phase) -> RoundPlan | None:
        started_s = time.perf_counter()
        try:
            answers = self._membership.begin_round(phase)
            answer = next(answers)
            while True:
                match answer:
                    case Load(snapshot):
                        answer = next_after(answers, partial(self._state.load, snapshot))
                    case Replay():
                        answer = next_after(answers, partial(self._state.replay, answer))
                    case Go(plan):
                        return None if plan is None else self._follow_plan(plan)
                    case Over(plan):
                        # What this worker trained is in no round, and there will be none any more.
                        self._state.drop_local_work()
                        return self._follow_plan(plan)
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
        """Inner steps by the schedule: of a worker that was healed, those of the others."""
        return self._state.step

    @property
    def workers(self) -> int:
        """K: the workers of the current round."""
        return self._transport.world_size

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go, and not the same take part to the end."""
        return not self._membership.is_fixed

    @property
    def share(self) -> int:
        """Number of the data share of this round, which no other worker has or had.

        With K fixed it is round K + rank. It changes when a round begins, every H inner steps.

        Raises:
            ConfigurationError: workers come and go, and this one has not joined them.
        """
        if self._plan is not None:
            return self._plan.dealt + self._transport.rank
        if self.is_elastic:
            raise ConfigurationError(
                "say which data share is this worker's",
                because="it has not joined the others, who hand out the shares",
                do="call outer.join() before the first inner step",
            )
        rounds = self._state.step // self.method.sync_every
        return rounds * self._transport.world_size + self._transport.rank

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that were given, in the order in which they are stepped."""
        return self._live.optimizers

    # -- results -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Rounds, bytes and seconds so far."""
        counters, ledger = self._counters, self._storage.ledger
        return Stats(
            rounds=self._state.version,
            sent_bytes=counters.sent_bytes,
            received_bytes=counters.received_bytes,
            peak_sent_bytes_per_step=self._peak_sent_bytes,
            wait_s=counters.wait_s,
            overlapped_s=counters.overlapped_s,
            left_out=dict(self._contributions.left_out),
            contributions=self._contributions.counts(),
            peak_outer_device_bytes=ledger.peak_device_bytes,
            peak_outer_host_bytes=ledger.peak_host_bytes,
            consensus_sent_bytes=self._outer.counters.sent_bytes,
            consensus_received_bytes=self._outer.counters.received_bytes,
            requests=self.transport.service_requests,
            kernels=kernel_backend(self._live.device),
        )

    def report(
        self, *, loss: float | Tensor | None = None, tokens_per_s: float | None = None
    ) -> None:
        """Say what this worker measured, for people who watch an elastic run.

        `thinwire status` and its metrics show it, with bytes and waits, which are
        known without this call. It sends nothing by itself and may be called after every step.

        Args:
            loss: of the last training steps, from a tensor only once its device has it; what is
                left out stays as it was.
            tokens_per_s: that this worker reads.
        """
        known = self._metrics
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        self._metrics = WorkerMetrics(
            # Heartbeats are JSON, which takes no numbers of torch or numpy.
            loss=known.loss if loss is None else float(loss),
            tokens_per_s=known.tokens_per_s if tokens_per_s is None else float(tokens_per_s),
            sent_bytes=self._counters.sent_bytes,
            received_bytes=self._counters.received_bytes,
            wait_s=self._counters.wait_s,
        )
        self._membership.report(self._metrics)

    def memory(self) -> dict[str, int]:
        """Bytes of every state this worker holds between rounds.

        Returns:
            `live weights`, `inner state` (the optimizers'), `anchor`, `outer state` (momentum) and
            `feedback`.
        """
        fragments = [fragment.memory() for fragment in self._state.fragments]
        return {
            "live weights": sum(local_shard(p).nbytes for p in self._live.parameters.values()),
            "inner state": sum(tensor.nbytes for tensor in self._live.inner_state()),
            **{state: sum(held[state] for held in fragments) for state in fragments[0]},
        }

    def anchor(self) -> dict[str, Tensor]:
        """The outer parameters as a state dict of the model (fp32; buffers are this worker's).

        They are this worker's, too, where `method.outer.has_own_anchors`. Where a parameter is a
        DTensor, so is its value.

        The tensors may share memory with the loop's state until the next round: copy them to keep
        them.
        """
        return self._outer.as_state_dict(self._outer.own())

    def begin_consensus(self) -> None:
        """Begin to gather what `consensus()` and `evaluating()` need, if anything.

        They do it by themselves. Where several workers share a thread, call this on all of them
        first, as with `begin()` and `finish()`.
        """
        self._outer.begin_consensus(version=self._state.version)

    def consensus(self) -> dict[str, Tensor]:
        """The mean of all workers' outer parameters, as a state dict like that of `anchor()`.

        Where all workers share an anchor it is the anchor, and nothing is sent. Where
        `method.outer.has_own_anchors` it is gathered, once after every outer step: all workers must
        ask for it. `stats` counts its bytes apart.

        Raises:
            ExchangeError: a peer died, or did not ask. NonFiniteError: a worker's are not finite.
        """
        return self._outer.as_state_dict(self._outer.consensus(version=self._state.version))

    def flat_anchors(self) -> list[Tensor]:
        """This worker's outer parameters, one fp32 [numel] for each fragment, to be read only."""
        return self._outer.flat()

    def digest(self) -> str:
        """SHA-256 of this worker's outer parameters.

        Equal on all workers after every round, unless `method.outer.has_own_anchors`.
        """
        return digest(self._outer.own())

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Hold the outer parameters in the model for an evaluation, then the local weights again.

        They are those of `consensus()`: where `method.outer.has_own_anchors`, all workers must
        evaluate, or none.
        """
        self.begin_evaluation()
        try:
            yield
        finally:
            self.end_evaluation()

    def begin_evaluation(self) -> None:
        """Hold the outer parameters in the model until `end_evaluation()`, as `evaluating()` does.

        For callbacks, which are told when an evaluation begins and when it has ended.
        """
        self.end_evaluation()
        consensus = self._outer.consensus(version=self._state.version)
        # Not a context: what ends without end_evaluation() leaves the outer parameters in place.
        self._evaluation.callback(self._live.swap_in(consensus))

    def end_evaluation(self) -> None:
        """Put the local weights back; nothing if no evaluation was begun."""
        self._evaluation.close()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume bit for bit besides model and optimizer: plain tensors and numbers.

        What is in flight is saved as it was sent; resuming sends it again. The tensors share memory
        with the loop: copy or save them before the next step.

        Where workers come and go it is `shared_state()` and this worker's error feedback: the
        others go on without what it trained since its last round, as if it had been killed.

        Raises:
            CheckpointError: between `begin()` and `finish()`.
        """
        if self.is_elastic:
            feedback = [dict(held) for held in self.unsent_feedback()]
            return {"shared": self.shared_state(), "feedback": feedback}
        state = self._state
        if any(p.due_step <= state.step for f in state.fragments for p in f.pending):
            raise CheckpointError(
                "save the outer loop between begin() and finish()",
                because="a round is due that was not applied yet",
                do="save after finish()",
            )
        return {
            "run": state.description,
            "step": state.step,
            "rounds": state.version,
            "dealt": state.dealt,
            "peak_sent_bytes": self._peak_sent_bytes,
            "traffic": asdict(self._counters),
            **self._outer.state_dict(),
            **self._contributions.state_dict(workers=self._transport.world_size),
            "fragments": [fragment.state_dict() for fragment in state.fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, with_feedback: bool = True) -> None:
        """Continue from `state_dict()` of a loop over the same model and method.

        With as many workers as then, bit for bit. With another number of them, outer parameters and
        outer optimizers go on as they were; what was in flight is dropped, and the next round sends
        it, for the local weights still hold it: load those, too. Where workers come and go the live
        weights become the outer parameters, and joining then catches up with the others.

        Args:
            state: to continue from.
            with_feedback: with another number of workers, whether this one goes on with the error
                feedback in `state`; false where it shares `state` with a worker that does.

        Raises:
            MismatchError: it is from another one; names the field and both values.
            CheckpointError: it is of a fixed number of workers and these come and go, or the other
                way round.
            ConfigurationError: the method's overlap does not let rounds in flight be dropped.
        """
        self._send_again(self._load(state, with_feedback=with_feedback))

    def _load(
        self, state: Mapping[str, Any], *, with_feedback: bool = True
    ) -> list[tuple[FragmentState, Mapping[str, Any]]]:
        """Continue from `state`; returns the rounds that were in flight, to be sent again."""
        check_keys(state, is_elastic=self.is_elastic)
        if self.is_elastic:
            self.load_shared_state(state["shared"])
            if with_feedback and not self.load_feedback(state["feedback"]):
                _LOG.warning("going on without error feedback: it is of another number of workers")
            return []
        saved, present = migrate_names(state["run"]), self._state.description
        other_count = saved.get("workers") != present.get("workers") and "workers" in saved
        if other_count:
            self.method.overlap.check_cancellable()
            saved = {**saved, "workers": present["workers"]}
        check_same(
            saved,
            present,
            cannot="load this checkpoint",
            whose="the checkpoint",
            do="resume with the model and method that wrote it",
        )
        self._peak_sent_bytes = int(state["peak_sent_bytes"])
        self._contributions.load_state_dict(state, workers=self._transport.world_size)
        self._state.step, self._state.version = int(state["step"]), int(state["rounds"])
        self._state.dealt = int(state["dealt"])
        self._state.reset_digest()
        fragments = list(zip(self._state.fragments, state["fragments"], strict=True))
        again: list[tuple[FragmentState, Mapping[str, Any]]] = []
        if other_count:
            for fragment, each in fragments:
                fragment.load_from_other_worker_count(each, with_feedback=with_feedback)
        else:
            again = [(f, saved) for f, each in fragments for saved in f.load_state_dict(each)]
        self._counters.restore(state["traffic"])
        self._outer.load_state_dict(state)
        return again

    def _send_again(self, rounds: list[tuple[FragmentState, Mapping[str, Any]]]) -> None:
        counted = asdict(self._counters)
        for fragment, round in sorted(rounds, key=lambda found: int(found[1]["sent_at_step"])):
            fragment.send_again(round)
        # What is sent again was counted when it was sent first.
        self._counters.restore(counted)

    def shared_state(self) -> dict[str, Any]:
        """What all workers share, whatever their number: plain tensors and numbers.

        Outer parameters, outer optimizers and where the schedule is, after the last round.
        """
        snapshot = self._state.capture()
        return {"facts": dict(snapshot.facts), "tensors": dict(snapshot.tensors)}

    def unsent_feedback(self) -> list[Mapping[str, Tensor]]:
        """Every fragment's error feedback, as it is if nothing that is in flight counts."""
        return [fragment.unsent_feedback() for fragment in self._state.fragments]

    def load_feedback(self, feedback: Sequence[Mapping[str, Tensor]]) -> bool:
        """Go on with what `unsent_feedback()` returned, on a worker of any world.

        Returns:
            whether all of it fits: a fragment keeps its own where the feedback is of shards, which
            are cut by the number of workers.

        Raises:
            CheckpointError: it is of another number of fragments.
        """
        return self._state.load_feedback(feedback)

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Start from `shared_state()` of any worker; the local weights become the anchor.

        Raises:
            MismatchError: it is of another model or method; names the field and both values.
        """
        check_shared_keys(state)
        self._state.load(Snapshot(facts=state["facts"], tensors=state["tensors"]))
        self._state.drop_local_work()

    # -- with an optimizer -------------------------------------------------------------------------

    def follow(self) -> None:
        """Call `step()` by itself after every step of the (last) optimizer, as a with block does.

        Raises:
            ConfigurationError: there is no optimizer, it is followed already, or this is closed.
        """
        self._check_open()
        self._hooks.follow(self.step)
        # Before the first inner step, which then starts from what the others have.
        self.join()

    def unfollow(self) -> None:
        """Count no more steps by itself; `flush()` sends what was trained since the last round."""
        self._hooks.unfollow()

    def save_with_optimizer(self) -> None:
        """Keep the outer state in the (last) optimizer's state dict, under `thinwire`.

        What saves and loads the optimizer then resumes both, bit for bit; build the loop before its
        state is loaded. A state without the outer one is refused (`CheckpointError`).

        Raises:
            ConfigurationError: there is no optimizer, or this was called before.
        """
        self._hooks.carry(self)

    def __enter__(self) -> Self:
        self.follow()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.unfollow()
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Give the optimizers back as they were: `step()` of this loop must not be called again."""
        self._is_closed = True
        self._hooks.remove()
        self._storage.put_away()
        self._live.close()
        self._membership.leave()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(
                "use a closed outer loop",
                because="closing it gave the optimizers back, and nothing is exchanged any more",
                do="build a new OuterLoop; load_state_dict() carries its state over",
            )
