"""Faults of an elastic worker at moments that cannot be hit from outside by time."""

import os
import signal
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from torch import Tensor

from thinwire.elastic.run_objects import RunObjects
from thinwire.loop_state import LoopState
from thinwire.membership import Membership
from thinwire.transport import Elastic, Post, RoundTag, Transport
from thinwire.transport.base import Received, wrapped

HEADER_NBYTES = 64


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def damaged(payload: Tensor, how: str) -> Tensor:
    """One bit of the body is another; the end was lost, and zeros stand there, or nothing."""
    changed = payload.clone()
    if how == "flip":
        changed[HEADER_NBYTES + 1] ^= 4
    elif how == "fill":
        changed[len(payload) // 2 :] = 0
    return changed[:-5] if how == "cut" else changed


class FaultyTransport(Transport, Membership):
    """Wraps an elastic transport: tells what was committed, dies when asked to, damages messages.

    It dies, or stops, at `die_at`: "started", "landed" or "reduced", and in which exchange among
    `among` workers. `damage` says how, and in which rounds; with `from_rank`, what comes from there
    is damaged, otherwise what is sent.
    """

    def __init__(
        self,
        inner: Elastic,
        tell: Callable[..., None],
        *,
        die_at: tuple[str, int] = ("never", 0),
        stops: bool = False,
        among: int = 3,
        damage: dict[str, Any] | None = None,
    ) -> None:
        self._inner, self._tell, self._die_at, self._among = inner, tell, tuple(die_at), among
        self._exchanges, self._stops = 0, stops
        self._damage = damage or {"how": "flip", "rounds": []}

    rank = property(lambda self: self._inner.rank)
    world_size = property(lambda self: self._inner.world_size)
    added_nbytes = property(lambda self: self._inner.added_nbytes)
    service_requests = property(lambda self: self._inner.service_requests)
    is_fixed = False

    def join(self, state):
        self._inner.join(state)

    def begin_round(self, phase):
        return self._inner.begin_round(phase)

    def may_end(self):
        return self._inner.may_end()

    def member(self, rank):
        return self._inner.member(rank)

    def log_round(self, kept):
        self._tell(counted=kept.facts["counted"], round=kept.facts["round"], version=kept.version)
        self._inner.log_round(kept)

    def leave(self):
        self._inner.leave()

    def announce(self, card, tag):
        return self._inner.announce(card, tag)

    def run(self, posts, tag):
        self._exchanges += self.world_size == self._among
        under_way = self._inner.run(wrapped(posts, self._meddled(tag)), tag)
        self._reached("started")
        return under_way

    def _meddled(self, tag: RoundTag):
        """Messages are damaged before they leave or once they are here."""
        strikes, reduced = self._strikes(tag), False
        damage, rank = partial(damaged, how=self._damage["how"]), self._damage.get("from_rank")

        def carry(post: Post) -> Generator[Post, Received, Received]:
            nonlocal reduced
            is_to_all = post.is_to_all(self.world_size)
            is_result = reduced and is_to_all
            if is_result:
                self._reached("reduced")
            if strikes and rank is None and not is_result:
                post = post.changed(damage)
            received = yield post
            if not is_to_all:
                reduced = True
            else:
                self._reached("landed")
                if strikes and rank is not None and rank < self.world_size:
                    by_rank = {self.rank: next(iter(post.to.values())), **received}
                    received = {**received, rank: damage(by_rank[rank])}
            return received

        return carry

    def _strikes(self, tag: RoundTag) -> bool:
        rounds = self._damage["rounds"]
        if tag.round not in rounds or self.world_size == 1:
            return False
        if self._damage.get("once"):
            rounds.remove(tag.round)
        return True

    def _reached(self, point: str) -> None:
        if (point, self._exchanges) == self._die_at:
            self._die_at = ("never", 0)
            (stop if self._stops else die)()


def die_while(doing: str, *, stops: bool = False) -> None:
    """Make this process die, or stop, the first time that it does something.

    `doing` is "adopting" (a snapshot is here) or "called" (the others may read what it says before
    a roll, and there is no roll yet).
    """
    halt = stop if stops else die
    if doing == "adopting":
        LoopState.load = lambda *_, **__: halt()
        return
    put_call = RunObjects.put_call

    async def called(self, number, call, until_s):
        await put_call(self, number, call, until_s)
        RunObjects.put_call = put_call
        halt()

    RunObjects.put_call = called
