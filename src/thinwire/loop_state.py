"""The state that all workers of a run share, on this worker: progress, loading, consensus."""

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.aggregate import MeanOverWorkers
from thinwire.blocks import DenseVector
from thinwire.codecs import Identity
from thinwire.errors import CheckpointError, MismatchError, check
from thinwire.exchange import Automatic, RoundResult
from thinwire.feedback import NoFeedback
from thinwire.fragment_state import FragmentBuilder, FragmentState, PendingRound
from thinwire.fragments.sharding import sharded_like
from thinwire.handshake import check_same_run
from thinwire.membership import MALFORMED, Answer, Progress, Replay, RoundRecord, Snapshot
from thinwire.method import migrate_names
from thinwire.outer import ByWorkerCount
from thinwire.outer.overlap import DelayState
from thinwire.rejection import Consequence
from thinwire.storage import StatePlacement
from thinwire.transport import RoundTag, Transport
from thinwire.transport.base import Round
from thinwire.transport.metered import Metered

_TRAFFIC = "consensus_traffic"


class LoopState:
    """The fragments of one worker, and their progress.

    Args:
        builder: makes the fragments, for any number of workers.
        transport: connects the workers; bytes of the consensus are counted here, apart from others.

    `step` counts inner steps of the schedule, `version` outer steps over all fragments, and `dealt`
    data shares handed out. Only the training thread changes the state, and it holds `lock` while it
    does, because snapshots are taken in another thread.
    """

    def __init__(self, builder: FragmentBuilder, transport: Transport) -> None:
        self._builder, self._transport = builder, Metered(transport)
        self._has_own_anchors = builder.method.outer.has_own_anchors
        self.fragments = builder.fragments()
        self.description = builder.describe([each.fragment for each in self.fragments])
        self.step = self.version = self.dealt = 0
        self.ended_at_step = -1
        self.name = ""
        self.lock = threading.RLock()
        # K that the outer optimizers are set to; K and rank that the exchanges are made for.
        self.outer_workers = transport.world_size
        self._exchange_rank = transport.world_size, transport.rank
        self._digest = (-1, "")
        self.consensus_counters = self._transport.counters
        self._under_way: list[Round[RoundResult]] = []
        self._means: list[Tensor] = []
        # The version that the means belong to: a round does not clear them itself.
        self._mean_version = 0

    def fully_synced(self) -> bool:
        """True if all inner steps so far are in the outer parameters."""
        with self.lock:
            return not any(f.pending or f.sent_at_step < self.step for f in self.fragments)

    # -- for reading, from any thread --------------------------------------------------------------

    def progress(self, *, anew: bool = False) -> Progress:
        """Outer step, inner step and digest of this worker; safe from any thread.

        Args:
            anew: compute the digest again, to find out whether the state has drifted during a
                round.
        """
        with self.lock:
            if anew or self._digest[0] != self.version:
                digests = b"".join(fragment.shared_digest() for fragment in self.fragments)
                self._digest = self.version, hashlib.sha256(digests).hexdigest()[:16]
            return Progress(
                version=self.version,
                step=self.step,
                digest=self._digest[1],
                dealt=self.dealt,
                # Read with the version, so that a peer that reads the last one knows it is.
                over=self.ended_at_step == self.step and self.fully_synced(),
            )

    def shared_nbytes(self) -> int:
        """Bytes of a snapshot's tensors."""
        with self.lock:
            return sum(value.nbytes for f in self.fragments for value in f.shared().values())

    def capture(self) -> Snapshot:
        """The shared state between two rounds, as it is now; safe from any thread.

        On a CPU it shares memory with the fragments; a later outer step writes to new memory.
        """
        with self.lock:
            shared = _of_all(fragment.shared() for fragment in self.fragments)
            tensors = {key: value.detach().cpu() for key, value in shared.items()}
            facts = {
                "run": self.description,
                "workers": self.outer_workers,
                "version": self.version,
                "step": self.step,
                "dealt": self.dealt,
                "tracks": [fragment.shared_facts() for fragment in self.fragments],
            }
            return Snapshot(facts=facts, tensors=tensors)

    # -- outer parameters, for evaluations ---------------------------------------------------------

    def own(self) -> dict[str, Tensor]:
        """Outer parameters of this worker, by name; do not write to them."""
        return self._by_name([fragment.outer.flat_anchor() for fragment in self.fragments])

    def _by_name(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: value
            for fragment, vector in zip(self.fragments, vectors, strict=True)
            for name, value in self._builder.live.unflatten(fragment.fragment.names, vector).items()
        }

    def as_state_dict(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the model with `values` as its parameters; buffers are this worker's."""
        live = self._builder.live
        by_identity = {
            id(p := live.parameters[name]): sharded_like(p, value) for name, value in values.items()
        }
        state: dict[str, Tensor] = live.model.state_dict(keep_vars=True)
        if by_identity.keys() <= set(map(id, state.values())):
            return {name: by_identity.get(id(v), v.detach()) for name, v in state.items()}
        # A hook makes other tensors of the parameters, as FSDP1's do: it has to see `values` there.
        put_back = live.swap_in(values)
        try:
            return {name: v.detach().clone() for name, v in live.model.state_dict().items()}
        finally:
            put_back()

    def begin_consensus(self) -> None:
        """Begin to gather the consensus, unless it was gathered since the last outer step."""
        if self.version != self._mean_version:
            self._under_way, self._means, self._mean_version = [], [], self.version
        if self._has_own_anchors and not (self._under_way or self._means):
            self._under_way = [self._send_anchor(fragment) for fragment in self.fragments]

    def _send_anchor(self, fragment: FragmentState) -> Round[RoundResult]:
        workers, rank = self._transport.world_size, self._transport.rank
        context = replace(
            self._builder.context(fragment.fragment, workers, rank),
            codec=Identity(),
            feedback=NoFeedback(),
            aggregate=MeanOverWorkers(),
        )
        exchange = Automatic().bind(context)
        tag = RoundTag(what=f"the outer parameters of {fragment.fragment.name}", round=self.version)
        anchor = fragment.outer.flat_anchor().to(self._builder.storage.device)
        messages = exchange.encode(DenseVector(anchor), tag)
        return self._transport.run(exchange.run(messages, tag), tag)

    @torch.no_grad()
    def consensus(self) -> dict[str, Tensor]:
        """(1/K) sum_k phi_k of the workers' anchors phi_k, by name; all workers must call this.

        Cached until the next outer step. If all workers share an anchor, that is the consensus, and
        nothing is sent.

        Raises:
            ExchangeError: a peer died or stayed silent.
        """
        if not self._has_own_anchors:
            return self.own()
        self.begin_consensus()
        if self._under_way:
            results = [self._transport.wait(exchange) for exchange in self._under_way]
            self._means, self._under_way = [result.mean.whole() for result in results], []
        return self._by_name(self._means)

    def consensus_state(self) -> dict[str, Any]:
        """Counters of the consensus, for a checkpoint; empty if all workers share an anchor."""
        # Methods with a shared anchor have no such key, as in checkpoints of earlier versions.
        return {_TRAFFIC: asdict(self.consensus_counters)} if self._has_own_anchors else {}

    def load_consensus_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counters of a state that has those of `consensus_state()`."""
        self._under_way, self._means = [], []
        self.consensus_counters.restore(state.get(_TRAFFIC, {}))

    def replaced(self) -> list[FragmentState]:
        """Fragments whose outer parameters and local weights differ by more than rounding."""
        live = self._builder.live
        states = [(f, f.outer.state_dict()) for f in self.fragments]
        anchored = [(f, state["anchor"]) for f, state in states if "anchor" in state]
        if not anchored:  # gradients are averaged
            return []
        found = (live.differs_from(live.unflatten(f.fragment.names, a)) for f, a in anchored)
        differ = torch.stack(list(found)).tolist()
        return [f for (f, _), differs in zip(anchored, differ, strict=True) if differs]

    def start_from_weights(self, fragments: Iterable[FragmentState]) -> None:
        """Take the local weights of `fragments` for their outer parameters, before any round."""
        with self.lock:
            for fragment in fragments:
                weights = self._builder.live.read(fragment.fragment.names)
                state = fragment.outer.state_dict()
                fragment.outer.load_state_dict(
                    {key: weights if key.endswith("anchor") else v for key, v in state.items()}
                )
            self._digest, self._under_way, self._means = (-1, ""), [], []

    # -- taking over the state of others -----------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Load a shared state; feedback and local work stay this worker's own.

        Local work that the others have already counted is dropped.

        Raises:
            MismatchError: it is from another model or method; nothing has changed then.
        """
        facts = snapshot.facts
        check_same_run(migrate_names(facts["run"]), self.description)
        shared = [_of_fragment(snapshot.tensors, index) for index in range(len(self.fragments))]
        with self.lock:
            workers = int(facts["workers"])
            list(map(FragmentState.check_shared, self.fragments, shared))
            self.cancel_rounds()
            self.set_outer_workers(workers)
            self._digest = (-1, "")
            known = zip(self.fragments, shared, facts["tracks"], strict=True)
            for fragment, theirs, rounds in known:
                # Measured before loading, from the outer parameters that the local work began at.
                local_delta = fragment.outer.pseudo_gradient()
                fragment.load_shared(theirs, rounds)
                fragment.rebase(self.name, local_delta)
            self.version, self.step = int(facts["version"]), int(facts["step"])
            self.dealt = int(facts["dealt"])

    def replay(self, missed: Replay) -> None:
        """Take the outer steps of rounds that this worker missed.

        Raises:
            MismatchError: they do not follow on this worker's state, or do not lead to that of the
                others. ExchangeError: their messages are damaged.
        """
        try:
            for record in missed.records:
                self.replay_one(record)
        except MALFORMED:
            # This worker has drifted from the others.
            self.drop_local_work()
            raise
        here, there = self.progress(), missed.until
        if here.version == there.version and here.digest != there.digest:
            self.drop_local_work()
            raise MismatchError(
                f"take the outer steps of the rounds up to {there.version}",
                because=f"this worker then has digest {here.digest}, and the others {there.digest}",
                do="take over a snapshot of another worker",
            )

    @torch.no_grad()
    def replay_one(self, record: RoundRecord) -> None:
        """Take the outer step of one round that this worker missed.

        Raises:
            MismatchError: it does not follow on this worker's state.
            ExchangeError: its messages are damaged.
        """
        facts = record.facts
        fragment = self.fragments[int(facts["track"])]
        with self.lock:
            here = f"version {self.version} with digest {fragment.outer.digest().hex()}"
            needed = f"version {record.version - 1} with digest {facts['before']}"
            check(
                here == needed,
                f"take the outer step of {fragment.fragment.name} in a round that was missed",
                because=f"it follows on {needed}, and this worker has {here}",
                do="take over a snapshot of another worker",
                kind=MismatchError,
            )
            # With overlap, its messages were sent before the previous step was applied.
            anchor, round = bytes.fromhex(facts["anchor"]), int(facts["round"])
            tag = RoundTag(what=fragment.fragment.name, round=round, anchor=anchor)
            context = self._builder.context(fragment.fragment, int(facts["workers"]), 0)
            # A placement of its own, since the ledger must not count what is gone in a moment.
            context = replace(context, storage=StatePlacement(context.storage.device))
            reader = self._builder.method.exchange.bind(context)
            left_out = [int(rank) for rank in facts["left_out"]]
            # Computed before anything changes, since the messages may turn out to be unusable.
            mean = reader.replay_mean(record.messages, tag, left_out=left_out)
            self.cancel_rounds()
            local_delta = fragment.outer.pseudo_gradient()
            self.set_outer_workers(int(facts["workers"]))
            fragment.step_missed(mean, facts)
            self.version = record.version
            # A lone newcomer goes on from that step, not from its own first one.
            self.step = max(self.step, int(facts["sent_at_step"]))
            fragment.rebase(self.name, local_delta)

    def drop_local_work(self) -> None:
        """Forget what this worker has trained since its outer parameters last moved."""
        with self.lock:
            self.cancel_rounds()
            for fragment in self.fragments:
                fragment.outer.reset_live(None)

    def cancel_rounds(self) -> None:
        """Give up every round under way: the next one sends its work again."""
        self._builder.storage.put_away()
        for fragment in self.fragments:
            fragment.cancel_rounds()
        # If the last round was one of these, it must begin again.
        self.ended_at_step = -1

    # -- a change of workers -----------------------------------------------------------------------

    def set_outer_workers(self, workers: int) -> None:
        """Continue with the outer settings for `workers` workers, in the same memory."""
        outer = self._builder.method.outer
        if isinstance(outer, ByWorkerCount) and workers != self.outer_workers:
            rule = outer.rule(workers)
            for fragment in self.fragments:
                assert isinstance(fragment.outer, DelayState)  # of elementwise optimizers
                fragment.outer.rule = rule
        self.outer_workers = workers

    def set_exchange_workers(self, workers: int, rank: int) -> None:
        """Continue with exchanges made for rank `rank` of `workers`."""
        if (workers, rank) == self._exchange_rank:
            return
        for fragment in self.fragments:
            state = self._builder.exchange_state(fragment.fragment, workers, rank)
            fragment.replace_exchange(state)
        self._exchange_rank = workers, rank

    def move(self, device: torch.device) -> None:
        """Follow the model to `device`.

        Raises:
            ConfigurationError: a round is under way.
        """
        storage = self._builder.storage
        check(
            not any(fragment.pending for fragment in self.fragments),
            f"follow the model from {str(storage.device)!r} to {str(device)!r}",
            because="a round is under way, and its messages were made for the first",
            do="move the model before you build or load the outer loop",
        )
        storage.move(device)
        for fragment in self.fragments:
            held = fragment.exchange.state_dict()
            # Sizes of batches, and kernels, depend on the device.
            fragment.exchange = self._builder.exchange_state(
                fragment.fragment, *self._exchange_rank
            )
            fragment.exchange.load_state_dict(held)


def record_of(
    state: LoopState,
    fragment: FragmentState,
    pending: PendingRound,
    result: RoundResult,
    names: Sequence[str],
    *,
    before: bytes,
) -> RoundRecord:
    """Record `pending`, which was just applied, for workers that missed it.

    Args:
        state: the state after the round.
        fragment: the round's fragment.
        pending: the round.
        result: result of its exchange.
        names: names of the workers, in rank order.
        before: digest of the fragment's outer parameters before the step.
    """
    consequences = {rank: why.consequence() for rank, why in result.left_out.items()}
    facts = {
        "track": state.fragments.index(fragment),
        "round": pending.tag.round,
        "sent_at_step": pending.sent_at_step,
        "anchor": pending.tag.anchor.hex(),
        "before": before.hex(),
        "workers": len(names),
        "left_out": sorted(result.left_out),
        "clipped": dict(result.clipped),
        # Work that was rejected for good is over, too: its sender must not try again.
        "counted": [
            name
            for rank, name in enumerate(names)
            if consequences.get(rank, Consequence.LOST) is Consequence.LOST
        ],
        # A worker that has just joined did nothing wrong.
        "flaws": {
            rank: str(why)
            for rank, why in result.left_out.items()
            if consequences[rank] is not Consequence.SKIPPED
        },
    }
    return RoundRecord(version=state.version, facts=facts, messages=result.messages)


def next_after(answers: Generator[Answer, None, None], act: Callable[[], None]) -> Answer:
    """Call `act`, then return the next answer; if `act` fails, `answers` gets the error."""
    try:
        act()
    except MALFORMED as error:
        return answers.throw(error)
    return next(answers)


def migrate_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """An outer loop's state, written by any version, in the form of this one.

    Version 0.2 saved an elastic run as a snapshot and error feedback.

    Raises:
        CheckpointError: it is not the state of an outer loop.
    """
    if "shared" not in state:
        check(
            "fragments" in state,
            "load this state",
            because=f"it has {sorted(state)}, not the keys of an outer loop",
            do="pass a state_dict() of an OuterLoop",
            kind=CheckpointError,
        )
        return state
    facts, tensors = state["shared"]["facts"], state["shared"]["tensors"]
    fragments = [
        {**track, "outer": _of_fragment(tensors, index), "exchange": held, "in_flight": []}
        for index, (track, held) in enumerate(zip(facts["tracks"], state["feedback"], strict=True))
    ]
    return {
        "run": {**facts["run"], "workers": str(facts["workers"])},
        "rounds": facts["version"],
        **{key: facts[key] for key in ("step", "dealt")},
        **{"peak_sent_bytes": 0, "traffic": {}, "left_out": {}},
        "fragments": fragments,
    }


def is_of_elastic_run(state: Mapping[str, Any]) -> bool:
    """Whether an outer loop of an elastic run wrote `state`, which then names contributors."""
    return "counted" in state["fragments"][0]


def without_flights(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` as if no round in flight had counted: the next round sends their work."""
    fragments: list[dict[str, Any]] = []
    for saved in state["fragments"]:
        sent = [int(each["sent_at_step"]) for each in saved["in_flight"] if int(each["round"]) > 0]
        dropped = {
            # Dropped: what a message left out is in both the feedback and the local weights.
            "exchange": {},
            "sends": int(saved["sends"]) - len(sent),
            # So that a run that ends here still sends what was dropped.
            "sent_at_step": min([int(saved["sent_at_step"]), *(step - 1 for step in sent)]),
        }
        fragments.append({**saved, **(dropped if sent else {}), "in_flight": []})
    return {**state, "fragments": fragments}


def snapshot_of(state: Mapping[str, Any], *, sync_every: int) -> Snapshot:
    """The part of an outer loop's state that workers share; nothing may be in flight."""
    run, fragments = state["run"], state["fragments"]
    workers, step, dealt = int(run["workers"]), int(state["step"]), int(state["dealt"])
    if not is_of_elastic_run(state):  # a fixed run assigns K shares per round
        dealt += (step // sync_every + 1) * workers
    tracks = [
        {"sends": each["sends"], "sent_at_step": each["sent_at_step"]}
        | {"counted": each.get("counted", [])}
        for each in fragments
    ]
    facts = {"run": run, "workers": workers, "version": int(state["rounds"])}
    tensors = _of_all(saved["outer"] for saved in fragments)
    return Snapshot(facts=facts | {"step": step, "dealt": dealt, "tracks": tracks}, tensors=tensors)


def _of_all(fragments: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{at}.{key}": value for at, its in enumerate(fragments) for key, value in its.items()}


def _of_fragment(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
