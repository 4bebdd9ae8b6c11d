"""A worker's fragments: their outer states, exchanges and rounds, made from a method."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.blocks import LazyVector, StreamedVector, all_finite
from thinwire.checksums import anchor_digest
from thinwire.errors import MismatchError
from thinwire.exchange import ExchangeContext, ExchangeState, RoundResult
from thinwire.fragments import Fragment
from thinwire.fragments.layers import parts_of
from thinwire.fragments.layout import Layout, wire_order
from thinwire.fragments.sharding import by_holders, check_placement, sharding_of
from thinwire.handshake import flatten_description
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.optim import parameter_roles
from thinwire.outer import FragmentContext, OuterState
from thinwire.rejection import Consequence
from thinwire.storage import StatePlacement
from thinwire.transport import RoundTag, Transport
from thinwire.transport.base import Round

# Rounds whose contributors are remembered. A worker that missed more rounds than these drops its
# local work rather than have it counted twice.
_ROUNDS_REMEMBERED = 8


@dataclass(slots=True, eq=False)
class PendingRound:
    """A round of a fragment that was sent and not applied yet.

    Args:
        tag: fragment, number and anchor.
        messages: messages that this worker sent, by name: enough to send them again.
        exchange: the exchange under way.
        sent_at_step: inner step after which it was sent.
        due_step: inner step after which it is applied.
        feedback_before: feedback before the messages were encoded, if the round may yet be
            discarded; else None.
    """

    tag: RoundTag
    messages: Mapping[str, Tensor]
    exchange: Round[RoundResult]
    sent_at_step: int
    due_step: int
    feedback_before: Mapping[str, Tensor] | None = None


class FragmentState:
    """A fragment's outer parameters, feedback and pending rounds.

    Args:
        fragment: the fragment's parameters.
        outer: moves its outer parameters.
        exchange: averages its pseudo-gradients.
        transport: the connection to the other workers.
        saved_rounds: number of pending rounds that a checkpoint has room for.
    """

    def __init__(
        self,
        fragment: Fragment,
        outer: OuterState,
        exchange: ExchangeState,
        transport: Transport,
        *,
        saved_rounds: int,
    ) -> None:
        self.fragment, self._transport = fragment, transport
        self.outer, self.exchange = outer, exchange
        self.pending: deque[PendingRound] = deque()
        self.rounds_sent = 0
        # Outer steps contain what was sent up to `applied_at_step`; cancelling goes back there.
        self.sent_at_step = self.applied_at_step = 0
        self.contributors: dict[int, Sequence[str]] = {}
        self._saved_rounds = saved_rounds
        # Number of a round that this worker gave up, and the feedback if it counted after all.
        self._abandoned: tuple[int, Mapping[str, Tensor]] | None = None

    # -- a round -----------------------------------------------------------------------------------

    def send(
        self,
        delta: LazyVector | None,
        *,
        step: int,
        due_step: int,
        anchor: bytes = b"",
        feedback_before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send `delta`, measured from outer parameters with digest `anchor`, after inner `step`.

        A worker that has just joined takes part without a `delta`.
        """
        tag = RoundTag(what=self.fragment.name, round=self.rounds_sent + 1, anchor=anchor)
        if delta is None:
            messages = self.exchange.empty_messages(tag)
        else:
            messages = self.exchange.encode(self.outer.contribution(delta), tag)
        self._start(tag, messages, step, due_step, feedback_before)
        self.rounds_sent, self.sent_at_step = tag.round, step

    def _start(
        self,
        tag: RoundTag,
        messages: Mapping[str, Tensor],
        step: int,
        due_step: int,
        before: Mapping[str, Tensor] | None = None,
    ) -> None:
        exchange = self._transport.run(self.exchange.run(messages, tag), tag)
        self.pending.append(PendingRound(tag, messages, exchange, step, due_step, before))

    def apply(self, pending: PendingRound, result: RoundResult, *, rank: int) -> None:
        """Take the outer step of `pending`, in which this worker has `rank`."""
        self.pending.remove(pending)
        self.applied_at_step = pending.sent_at_step
        self._abandoned = None  # what was abandoned has been sent again since
        mine = result.left_out.get(rank)
        consequence = None if mine is None else mine.consequence()
        # If a later round is on its way, the work is in the next pseudo-gradient or already sent.
        again = consequence is Consequence.SENT_AGAIN and not self.pending
        local_delta = self.outer.pseudo_gradient() if again else None
        self.outer.apply(self.exchange.absorb(result.mean))
        if local_delta is not None:
            self.outer.reset_live(local_delta)
        not_averaged = consequence in (Consequence.SENT_AGAIN, Consequence.LOST)
        # Encoding took the message out of the feedback. No mean has it, so it goes back in.
        if not_averaged and pending.feedback_before is not None and not self.pending:
            self.exchange.load_state_dict(pending.feedback_before)

    # -- rounds that do not count, or counted without this worker ----------------------------------

    def cancel_rounds(self) -> None:
        """Give up the round in flight: the next round sends its work, with what was done since."""
        if not self.pending:
            return
        (sent,) = self.pending  # overlaps with two rounds at once cannot be cancelled
        self._abandoned = sent.tag.round, self.exchange.feedback()
        if sent.feedback_before is not None:
            self.exchange.load_state_dict(sent.feedback_before)
        self.rounds_sent -= 1
        self.sent_at_step = self.applied_at_step
        self.pending.clear()

    def note_contributors(self, round: int, names: Sequence[str]) -> None:
        """Keep the names of the workers whose pseudo-gradients are in the mean of `round`."""
        self.contributors[round] = names
        for old in sorted(self.contributors)[:-_ROUNDS_REMEMBERED]:
            del self.contributors[old]

    def rebase(self, name: str, local_delta: Tensor | None) -> None:
        """Put the local weights on outer parameters that others moved.

        Args:
            name: this worker's name.
            local_delta: its training that is in no outer step it knows of.
        """
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            round, feedback = abandoned
            # If the round is no longer remembered, better lose work than send it twice.
            if round <= self.rounds_sent and name in self.contributors.get(round, (name,)):
                # The others did apply the round. Local steps taken since it was sent cannot be
                # separated from it, so they are dropped.
                self.exchange.load_state_dict(feedback)
                local_delta = None
        finite = local_delta is not None and all_finite(local_delta)
        self.outer.reset_live(local_delta if finite else None)

    def load_feedback(self, feedback: Mapping[str, Tensor]) -> bool:
        """Continue with `feedback`, perhaps of another K, if it fits; returns whether it does.

        Shards of a reduce-scatter are cut by K, so their feedback does not fit another K.
        """
        shapes = {key: value.shape for key, value in self.exchange.state_dict().items()}
        fits = shapes == {key: value.shape for key, value in feedback.items()}
        if fits:
            self.exchange.load_state_dict(feedback)
        return fits

    # -- what all workers share --------------------------------------------------------------------

    def shared(self) -> dict[str, Tensor]:
        """The state that is equal on all workers; it shares memory with this one."""
        return self.outer.state_dict()

    def check_shared(self, shared: Mapping[str, Tensor]) -> None:
        """Raise `MismatchError` unless `shared` has this state's tensors, dtypes and shapes."""
        mine, theirs = _forms(self.shared()), _forms(shared)
        if mine != theirs:
            raise MismatchError(
                f"take over the outer parameters of {self.fragment.name}",
                because=f"they have {theirs} and this worker needs {mine}",
                do="give all workers the same model and method",
            )

    def load_shared(self, shared: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Load the shared state of other workers, perhaps of another K, and facts of its rounds."""
        self.outer.load_state_dict(shared)
        self._load_rounds(facts)
        self.contributors = {int(round): names for round, names in facts.get("counted", [])}

    def _load_rounds(self, facts: Mapping[str, Any]) -> None:
        self.rounds_sent = int(facts["sends"])
        self.sent_at_step = self.applied_at_step = int(facts["sent_at_step"])
        self.pending.clear()

    def shared_facts(self) -> dict[str, Any]:
        """Numbers and contributors of the rounds that counted, for `load_shared`."""
        return {
            "sends": self.rounds_sent - len(self.pending),
            "sent_at_step": self.applied_at_step,
            "counted": list(self.contributors.items()),
        }

    def step_missed(self, mean: StreamedVector, facts: Mapping[str, Any]) -> None:
        """Take the outer step of a round that this worker missed; `rebase` must follow."""
        self.outer.apply(mean)
        self._load_rounds({**facts, "sends": facts["round"]})
        self.note_contributors(self.rounds_sent, facts["counted"])

    def replace_exchange(self, exchange: ExchangeState) -> None:
        """Continue with `exchange`, made for another K or rank, and with the feedback so far."""
        residual = self.exchange.feedback_vector()
        if residual is not None:
            exchange.load_feedback_vector(residual)
        self.exchange = exchange

    def shared_digest(self) -> bytes:
        """Eight bytes that tell the shared states of workers apart.

        Tensors of zeros are left out: they may exist for one number of workers and not for another.
        """
        held = ((key, value.reshape(-1).float()) for key, value in sorted(self.shared().items()))
        parts = (key.encode() + anchor_digest(v) for key, v in held if bool(v.any()))
        return hashlib.sha256(b"".join(parts)).digest()[:8]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self, *, in_flight: bool = True) -> dict[str, Any]:
        """The state that is kept between rounds, and the rounds in flight.

        Args:
            in_flight: if false, return the state as if no round in flight counted.
        """
        if not in_flight:
            # The feedback, as if nothing in flight counted.
            before = self.pending[0].feedback_before if self.pending else None
            feedback = dict(before or self.exchange.feedback(shares_memory=True))
            state = {"outer": self.shared(), "exchange": feedback, "in_flight": []}
            return state | self.shared_facts()
        blanks = (
            {
                "messages": self.exchange.blank(),
                "anchor": torch.zeros(8, dtype=torch.uint8, device="cpu"),
            }
            | {"round": 0, "sent_at_step": 0, "due_step": 0}
            for _ in range(self._saved_rounds)
        )
        saved = [_saved(pending) for pending in self.pending]
        return {
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "sent_at_step": self.sent_at_step,
            "sends": self.rounds_sent,
            # Always equally many: torch.distributed.checkpoint fills existing entries only.
            "in_flight": [*saved, *blanks][: self._saved_rounds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Continue from `state`; returns the saved rounds that are to be sent again."""
        self.outer.load_state_dict(state["outer"])
        self.exchange.load_state_dict(state["exchange"])
        self._load_rounds(state)
        return [saved for saved in state["in_flight"] if int(saved["round"]) > 0]

    def send_again(self, saved: Mapping[str, Any]) -> None:
        """Send what was in flight when the state was saved."""
        anchor = bytes(saved["anchor"].tolist())
        tag = RoundTag(what=self.fragment.name, round=int(saved["round"]), anchor=anchor)
        # The caller may reuse the loaded memory before the messages have left.
        messages = {name: message.clone() for name, message in saved["messages"].items()}
        self._start(tag, messages, int(saved["sent_at_step"]), int(saved["due_step"]))

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor`, `outer state` and `feedback`."""
        feedback = sum(tensor.nbytes for tensor in self.exchange.state_dict().values())
        return {**self.outer.memory(), "feedback": feedback}


class FragmentBuilder:
    """Makes the fragments of one worker, for any number of workers.

    Args:
        method: fills the slots.
        live: the worker's weights.
        transport: the connection to the other workers.
        storage: where the outer state is kept.
        is_fixed: whether the same workers take part to the end.

    Raises:
        ConfigurationError: a parameter is sharded in a way that cannot be exchanged.
    """

    def __init__(
        self,
        method: Method,
        live: LiveWeights,
        transport: Transport,
        storage: StatePlacement,
        *,
        is_fixed: bool,
    ) -> None:
        for name, parameter in live.parameters.items():
            check_placement(parameter, f"exchange parameter {name!r}")
        self.method, self.live, self._is_fixed = method, live, is_fixed
        self._transport, self.storage = transport, storage
        self._shapes = live.shapes()
        self._roles = {n: role.value for n, role in parameter_roles(live.model).items()}

    def fragments(self) -> list[FragmentState]:
        """One state for each fragment of the method, in its order."""
        overlap = self.method.overlap
        late = overlap.steps(sync_every=self.method.sync_every) > 0
        workers, rank = self._transport.world_size, self._transport.rank
        return [
            FragmentState(
                fragment,
                self.outer_state(fragment, workers),
                self.exchange_state(fragment, workers, rank),
                self._transport,
                saved_rounds=overlap.at_once if late else 0,
            )
            for fragment in self.plan()
        ]

    def outer_state(self, fragment: Fragment, workers: int) -> OuterState:
        """A fresh outer state of `fragment` for any number of workers."""
        context = FragmentContext(
            live=self.live,
            names=fragment.names,
            workers=workers,
            storage=self.storage,
            alone=workers == 1 and self._is_fixed,
        )
        return self.method.outer.bind(context, self.method.overlap)

    def exchange_state(self, fragment: Fragment, workers: int, rank: int) -> ExchangeState:
        """A fresh exchange of `fragment` for any number of workers."""
        return self.method.exchange.bind(self.context(fragment, workers, rank))

    def describe(self, fragments: Iterable[Fragment]) -> dict[str, str]:
        """All that must be equal on all workers, and in a checkpoint, as one text per field."""
        parameters = self.live.parameters
        segments = [self.layout(fragment).segments for fragment in fragments]
        shardings = {name: sharding_of(p) for name, p in parameters.items()}
        description = {
            "method": self.method.describe(),
            **({"workers": self._transport.world_size} if self._is_fixed else {}),
            "parameters": {name: str(list(p.shape)) for name, p in parameters.items()},
            # Parameters of equal shapes in another order would be averaged with each other.
            "wire order": [f"{s.name} ({s.role})" for layout in segments for s in layout],
            "fragment sizes": [len(layout) for layout in segments],
            # Shards of equal shapes may be different parts of a parameter.
            "sharding": {name: text for name, text in shardings.items() if text},
        }
        return flatten_description(description)

    def plan(self) -> Iterator[Fragment]:
        """The method's fragments, cut so that the same ranks hold all parameters of each."""
        # All ranks of a worker must plan alike, so the plan sees nothing of this rank's shards.
        parts = list(parts_of(self.live.model).values())
        planned = self.method.fragments.plan(parts, sync_every=self.method.sync_every)
        index = 0
        for fragment in planned:
            for names in by_holders(fragment.names, self.live.parameters):
                ordered = wire_order({name: self._shapes[name] for name in names})
                yield replace(fragment, index=index, names=ordered)
                index += 1

    def layout(self, fragment: Fragment) -> Layout:
        """The places of the parameters of `fragment` in its vector."""
        return Layout.of({name: self._shapes[name] for name in fragment.names}, self._roles)

    def context(self, fragment: Fragment, workers: int, rank: int) -> ExchangeContext:
        """The arguments of an exchange of `fragment`."""
        return ExchangeContext(
            codec=self.method.codec,
            feedback=self.method.feedback,
            aggregate=self.method.aggregate,
            layout=self.layout(fragment),
            fragment=fragment.index,
            workers=workers,
            rank=rank,
            storage=self.storage,
            drops_bad_messages=not self._is_fixed,
            has_own_anchors=self.method.outer.has_own_anchors,
        )


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: f"{value.dtype} {list(value.shape)}" for key, value in tensors.items()}


def _saved(pending: PendingRound) -> dict[str, Any]:
    anchor = list(pending.tag.anchor.ljust(8, b"\0"))
    return {
        "messages": dict(pending.messages),
        "anchor": torch.tensor(anchor, dtype=torch.uint8, device="cpu"),
        "round": pending.tag.round,
        "sent_at_step": pending.sent_at_step,
        "due_step": pending.due_step,
    }
