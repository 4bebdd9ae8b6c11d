"""One fragment on one worker: its outer state, its exchange, and the rounds that are under way."""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.blocks import LazyVector, StreamedVector
from thinwire.checksums import anchor_digest
from thinwire.errors import MismatchError
from thinwire.exchange import ExchangeState, RoundResult
from thinwire.fragments import Fragment
from thinwire.fragments.layout import Layout
from thinwire.outer import OuterState
from thinwire.rejection import Consequence
from thinwire.transport import RoundTag, Transport
from thinwire.transport.base import Round

# Rounds of which it is known who contributed. A worker that missed more of them drops its local
# work rather than have it counted twice.
_ROUNDS_REMEMBERED = 8


@dataclass(kw_only=True, slots=True, eq=False)
class PendingRound:
    """A round of a fragment that was sent and not applied yet.

    Args:
        tag: fragment, number and anchor.
        messages: that this worker sent, by name: enough to send them again.
        exchange: under way.
        sent_at_step: inner step after which it was sent.
        due_step: inner step after which it is applied.
        feedback_before: feedback before the messages were encoded, where the round may yet be
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
        fragment: which parameters.
        layout: of their vector.
        outer: moves them.
        exchange: averages what they moved by.
        transport: to the other workers.
        saved_rounds: pending rounds that a checkpoint has room for.
    """

    def __init__(
        self,
        fragment: Fragment,
        layout: Layout,
        outer: OuterState,
        exchange: ExchangeState,
        transport: Transport,
        *,
        saved_rounds: int,
    ) -> None:
        self.fragment, self.layout = fragment, layout
        self.outer, self.exchange = outer, exchange
        self._transport = transport
        self.pending: deque[PendingRound] = deque()
        self.rounds_sent = 0
        # What was sent up to `applied_at_step` is in outer steps: cancelling goes back there.
        self.sent_at_step = self.applied_at_step = 0
        self.contributors: dict[int, Sequence[str]] = {}
        self._saved_rounds = saved_rounds
        # The number of a round that this worker gave up, and its feedback, had the round counted.
        self._abandoned: tuple[int, Mapping[str, Tensor]] | None = None
        # Of another K's outer optimizer: kept until one without it has taken a step.
        self._unused_optimizer_state: dict[str, Tensor] = {}

    # -- a round -----------------------------------------------------------------------------------

    def send(
        self,
        delta: LazyVector,
        *,
        step: int,
        due_step: int,
        anchor: bytes = b"",
        feedback_before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send `delta`, taken from the outer parameters with digest `anchor` after inner `step`."""
        tag = self._next_tag(anchor)
        messages = self.exchange.encode(self.outer.contribution(delta), tag)
        self._start(messages, tag, step, due_step, feedback_before)

    def send_nothing(self, *, anchor: bytes, step: int, due_step: int) -> None:
        """Take part in a round without a pseudo-gradient, as a worker that has just joined."""
        tag = self._next_tag(anchor)
        messages = self.exchange.empty_messages(tag)
        self._start(messages, tag, step, due_step, self.exchange.feedback())

    def _next_tag(self, anchor: bytes) -> RoundTag:
        return RoundTag(what=self.fragment.name, round=self.rounds_sent + 1, anchor=anchor)

    def _start(
        self,
        messages: Mapping[str, Tensor],
        tag: RoundTag,
        step: int,
        due_step: int,
        feedback_before: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.pending.append(
            PendingRound(
                tag=tag,
                messages=messages,
                exchange=self._transport.run(self.exchange.run(messages, tag), tag),
                sent_at_step=step,
                due_step=due_step,
                feedback_before=feedback_before,
            )
        )
        self.rounds_sent, self.sent_at_step = tag.round, step

    def apply(self, pending: PendingRound, result: RoundResult, *, rank: int) -> None:
        """Take the outer step of `pending`, in which this worker has `rank`."""
        self.pending.remove(pending)
        self.applied_at_step = pending.sent_at_step
        self._abandoned = None  # what was abandoned has been sent again since
        mine = result.left_out.get(rank)
        consequence = None if mine is None else mine.consequence()
        # With a later round on its way the work is in the next pseudo-gradient or already sent.
        again = consequence is Consequence.SENT_AGAIN and not self.pending
        local_delta = self.outer.pseudo_gradient() if again else None
        self.outer.apply(self.exchange.absorb(result.mean))
        self._unused_optimizer_state = {}
        if local_delta is not None:
            self.outer.reset_live(local_delta)
        not_averaged = consequence in (Consequence.SENT_AGAIN, Consequence.LOST)
        # Encoding took the message out of feedback. It is in no mean, so it goes back in.
        if not_averaged and pending.feedback_before is not None and not self.pending:
            self.exchange.load_state_dict(pending.feedback_before)

    # -- rounds that do not count, or counted without this worker ----------------------------------

    def cancel_rounds(self) -> None:
        """Give up what is in flight: the next round sends it with what was done since."""
        if not self.pending:
            return
        first, *later = self.pending
        # Feedback after the first round was encoded is what it was before the second.
        after = later[0].feedback_before if later else self.exchange.feedback()
        self._abandoned = first.tag.round, after or {}
        if first.feedback_before is not None:
            self.exchange.load_state_dict(first.feedback_before)
        self.rounds_sent -= len(self.pending)
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
            name: this worker's.
            local_delta: what it trained that is in no outer step it knows of.
        """
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None and self._may_have_counted(abandoned[0], name):
            # The others did apply the round. Local steps taken since it was sent cannot be
            # separated from it, so they are dropped.
            self.exchange.load_state_dict(abandoned[1])
            local_delta = None
        finite = local_delta is not None and bool(torch.isfinite(local_delta).all())
        self.outer.reset_live(local_delta if finite else None)

    def _may_have_counted(self, round: int, name: str) -> bool:
        # Of a round that is no longer known it is better to lose work than to send it twice.
        return round <= self.rounds_sent and name in self.contributors.get(round, (name,))

    def unsent_feedback(self) -> Mapping[str, Tensor]:
        """Feedback as it is if nothing that is in flight counts."""
        before = self.pending[0].feedback_before if self.pending else None
        return self.exchange.feedback() if before is None else before

    def load_feedback(self, feedback: Mapping[str, Tensor]) -> bool:
        """Continue with `feedback`, perhaps of another K, and return whether it fits.

        Shards of a reduction are cut by K, so their feedback does not.
        """
        shapes = {key: value.shape for key, value in self.exchange.state_dict().items()}
        fits = shapes == {key: value.shape for key, value in feedback.items()}
        if fits:
            self.exchange.load_state_dict(feedback)
        return fits

    # -- what all workers share --------------------------------------------------------------------

    def shared(self) -> dict[str, Tensor]:
        """The state that is equal on all workers; it shares memory with this one."""
        return self._unused_optimizer_state | self.outer.state_dict()

    def check_shared(self, shared: Mapping[str, Tensor], outer: OuterState) -> None:
        """Raise `MismatchError` unless `shared` has what `outer` needs, and in that shape."""
        mine, theirs = _forms(outer.state_dict()), _forms(shared)
        if mine != {key: theirs.get(key) for key in mine}:
            raise MismatchError(
                f"take over the outer parameters of {self.fragment.name}",
                because=f"they have {theirs} and this worker needs {mine}",
                do="give all workers the same model and method",
            )

    def load_shared(self, shared: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take over what was checked, and what is known of rounds; `rebase` must follow."""
        mine = self.outer.state_dict().keys()
        self.outer.load_state_dict({key: value for key, value in shared.items() if key in mine})
        self._unused_optimizer_state = {k: v.clone() for k, v in shared.items() if k not in mine}
        self.rounds_sent = int(facts["sends"])
        self.sent_at_step = self.applied_at_step = int(facts["sent_at_step"])
        self.contributors = {int(round): names for round, names in facts["counted"]}

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
        self._unused_optimizer_state = {}
        self.rounds_sent = int(facts["round"])
        self.sent_at_step = self.applied_at_step = int(facts["sent_at_step"])
        self.note_contributors(self.rounds_sent, facts["counted"])

    def replace_outer(self, outer: OuterState) -> None:
        """Continue with `outer`, made for another number of workers."""
        if outer is self.outer:
            return
        old, new = self.shared(), outer.state_dict()
        local_delta = self.outer.pseudo_gradient()
        # State that only this K's outer optimizer has begins as in a new run.
        outer.load_state_dict({key: old.get(key, value) for key, value in new.items()})
        self._unused_optimizer_state = {k: v.clone() for k, v in old.items() if k not in new}
        self.outer = outer
        self.outer.reset_live(local_delta)

    def replace_exchange(self, exchange: ExchangeState) -> None:
        """Continue with `exchange`, made for other workers, and with the feedback so far."""
        residual = self.exchange.feedback_vector()
        if residual is not None:
            exchange.load_feedback_vector(residual)
        self.exchange = exchange

    def digest(self) -> bytes:
        """Eight bytes that tell the outer parameters of two workers apart."""
        return self.outer.digest()

    def shared_digest(self) -> bytes:
        """Eight bytes that tell the shared states of workers apart.

        A buffer of zeros may be there for one number of workers and not for another.
        """
        held = ((key, value.reshape(-1).float()) for key, value in sorted(self.shared().items()))
        parts = (key.encode() + anchor_digest(v) for key, v in held if bool(v.any()))
        return hashlib.sha256(b"".join(parts)).digest()[:8]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self, *, in_flight: bool = True) -> dict[str, Any]:
        """Everything that is kept between rounds, and the rounds in flight.

        Args:
            in_flight: false returns the state as if no round in flight counted.
        """
        if not in_flight:
            feedback = dict(self.unsent_feedback())
            return {
                "outer": self.shared(),
                "exchange": feedback,
                **self.shared_facts(),
                "in_flight": [],
            }
        blanks = (self._blank() for _ in range(self._saved_rounds))
        saved = [_saved(pending) for pending in self.pending]
        return {
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "sent_at_step": self.sent_at_step,
            "sends": self.rounds_sent,
            # Always as many: torch.distributed.checkpoint fills existing entries only.
            "in_flight": [*saved, *blanks][: self._saved_rounds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Continue from `state`; returns the saved rounds that are to be sent again."""
        self.outer.load_state_dict(state["outer"])
        self.exchange.load_state_dict(state["exchange"])
        self.sent_at_step = self.applied_at_step = int(state["sent_at_step"])
        self.rounds_sent = int(state["sends"])
        self.pending.clear()
        return [saved for saved in state["in_flight"] if int(saved["round"]) > 0]

    def load_from_other_worker_count(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a run with another K that has nothing in flight."""
        # Outer settings by number of workers may have momentum for one and none for another.
        fresh = self.outer.state_dict()
        self.outer.load_state_dict({k: state["outer"].get(k, value) for k, value in fresh.items()})
        self.sent_at_step = self.applied_at_step = int(state["sent_at_step"])
        self.rounds_sent = int(state["sends"])
        self.pending.clear()

    def send_again(self, saved: Mapping[str, Any]) -> None:
        """Send what was in flight when the state was saved."""
        anchor = bytes(saved["anchor"].tolist())
        tag = RoundTag(what=self.fragment.name, round=int(saved["round"]), anchor=anchor)
        # The caller may reuse the memory of what was loaded before the messages have left.
        messages = {name: message.clone() for name, message in saved["messages"].items()}
        sent, step = self.rounds_sent, self.sent_at_step
        self._start(messages, tag, int(saved["sent_at_step"]), int(saved["due_step"]))
        self.rounds_sent, self.sent_at_step = sent, step  # both count it already

    def _blank(self) -> dict[str, Any]:
        anchor = torch.zeros(8, dtype=torch.uint8)
        steps = {"round": 0, "sent_at_step": 0, "due_step": 0}
        return {"messages": self.exchange.blank(), "anchor": anchor, **steps}

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor`, `outer state` and `feedback`."""
        feedback = sum(tensor.nbytes for tensor in self.exchange.state_dict().values())
        return {**self.outer.memory(), "feedback": feedback}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: f"{value.dtype} {list(value.shape)}" for key, value in tensors.items()}


def _saved(pending: PendingRound) -> dict[str, Any]:
    anchor = list(pending.tag.anchor.ljust(8, b"\0"))
    return {
        "messages": dict(pending.messages),
        "anchor": torch.tensor(anchor, dtype=torch.uint8),
        "round": pending.tag.round,
        "sent_at_step": pending.sent_at_step,
        "due_step": pending.due_step,
    }
