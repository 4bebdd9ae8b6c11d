"""What goes wrong with an elastic worker at a moment that no clock could find from outside."""

import http.client
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from thinwire.course import Course
from thinwire.elastic.healing import HealingServer
from thinwire.elastic.session import ElasticSession
from thinwire.transport import Transport
from thinwire.transport.base import Inspect, Label, accept_all

HEADER_NBYTES = 64


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flip(payload: Tensor) -> Tensor:
    """One bit of the body is another."""
    damaged = payload.clone()
    damaged[HEADER_NBYTES + 1] ^= 4
    return damaged


def fill(payload: Tensor) -> Tensor:
    """The end was lost, and zeros stand there."""
    damaged = payload.clone()
    damaged[len(payload) // 2 :] = 0
    return damaged


def cut(payload: Tensor) -> Tensor:
    """The end was lost."""
    return payload[: len(payload) - 5].clone()


DAMAGES = {"flip": flip, "fill": fill, "cut": cut}


class Meddling(Transport):
    """Wraps an elastic transport: tells what was committed, dies when asked to, damages payloads.

    Args:
        inner: the transport.
        tell: is told who counted in every round.
        die_at: "started", "landed" or "reduced", and in which exchange among `among` workers.
        damage: how, in which rounds; if `from_rank` is given what comes from there, otherwise what
            is sent.
    """

    forgiving = True

    def __init__(
        self,
        inner: Transport,
        tell: Callable[..., None],
        *,
        die_at: tuple[str, int] = ("never", 0),
        among: int = 3,
        damage: dict[str, Any] | None = None,
    ) -> None:
        self._inner, self._tell, self._die_at, self._among = inner, tell, tuple(die_at), among
        self._exchanges = 0
        self._damage = damage or {"how": "flip", "rounds": []}

    rank = property(lambda self: self._inner.rank)
    world_size = property(lambda self: self._inner.world_size)
    norm_limit = property(lambda self: self._inner.norm_limit)

    def introduce(self, card):
        return self._inner.introduce(card)

    def convene(self, ward, occasion):
        return self._inner.convene(ward, occasion)

    def remember(self, record):
        kept = record()
        self._tell(counted=kept.facts["counted"], round=kept.facts["round"], version=kept.version)
        self._inner.remember(lambda: kept)

    def leave(self):
        self._inner.leave()

    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all):
        self._exchanges += self.world_size == self._among
        if self._strikes(label) and "from_rank" not in self._damage:
            payload = DAMAGES[self._damage["how"]](payload)
        pending = self._inner.start(payload, label, self._meddled(inspect, label))
        self._reached("started")
        return pending

    def start_reduce(self, payloads, reduce, label, inspect=accept_all):
        self._exchanges += self.world_size == self._among

        def reduced(received: Sequence[Tensor]) -> Tensor:
            result = reduce(received)
            self._reached("reduced")
            return result

        if self._strikes(label) and "from_rank" not in self._damage:
            payloads = [DAMAGES[self._damage["how"]](payload) for payload in payloads]
        meddled = self._meddled(inspect, label)
        pending = self._inner.start_reduce(payloads, reduced, label, meddled)
        self._reached("started")
        return pending

    def _meddled(self, inspect: Inspect, label: Label) -> Inspect:
        def meddled(messages: Sequence[Tensor]):
            self._reached("landed")
            rank = self._damage.get("from_rank")
            if self._strikes(label) and rank is not None and rank < len(messages):
                messages = list(messages)
                messages[rank] = DAMAGES[self._damage["how"]](messages[rank])
            return inspect(messages)

        return meddled

    def _strikes(self, label: Label) -> bool:
        rounds = self._damage["rounds"]
        if label.round not in rounds or self.world_size == 1:
            return False
        if self._damage.get("once"):
            rounds.remove(label.round)
        return True

    def _reached(self, point: str) -> None:
        if (point, self._exchanges) == self._die_at:
            die()


def die_while(doing: str) -> None:
    """Make this process die the first time that it does something.

    Args:
        doing: "fetching" (a state is on the way), "adopting" (it is here), "serving" (another one
            is about to get this worker's), "connecting" (to the workers of a round).
    """
    if doing == "fetching":
        getresponse = http.client.HTTPConnection.getresponse

        def answered(self):
            answer = getresponse(self)
            if "safetensors" in str(answer.headers) or answer.length > 1500:
                answer.read(700)
                die()
            return answer

        http.client.HTTPConnection.getresponse = answered
        return
    owner, name = {
        "adopting": (Course, "adopt"),
        "serving": (HealingServer, "_answer_state"),
        "connecting": (ElasticSession, "_connect"),
    }[doing]
    setattr(owner, name, lambda *_: die())
