"""Encryption of payloads between the workers of a run, over any transport."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Mapping
from functools import partial
from typing import TypeVar

from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.security.sealing import SEAL_NBYTES, Sealer, place_of
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    Transport,
    WrappedTransport,
    bytes_tensor,
    wrapped,
)

T = TypeVar("T")

_TO_ALL = -1


class Sealed(WrappedTransport):
    """A transport that seals every payload with AES-256-GCM, with a key from the run's token.

    A payload is bound to its place: exchange, kind and number of the post in it, K, sender, and
    receiver. A payload that was changed, cut, sealed with another token, or taken from another
    place does not open, which is an error. Answers, and so digests, are the wrapped transport's.

    All workers wrap their transport, or none does; `Elastic` takes the token itself. Each payload
    is 28 bytes longer. Sizes and times stay visible. There is no forward secrecy: a token that
    leaks later opens recorded payloads.

    Args:
        inner: carries the sealed payloads.
        token: the run's token, the same on all workers.
        run: name of the run, the same on all workers. Payloads of one run open in another with the
            same token and name.

    Raises:
        ConfigurationError: the package cryptography is missing, or the token is too short.

    Source: NIST SP 800-38D (GCM), RFC 5869 (HKDF).

    >>> from thinwire.transport import in_process
    >>> Sealed(in_process(2)[1], "a secret of many characters").added_nbytes
    28
    """

    def __init__(self, inner: Transport, token: Token | str, *, run: str = "") -> None:
        super().__init__(inner)
        self.added_nbytes += SEAL_NBYTES  # a nonce and a tag
        self._sealer = Sealer(Token(token) if isinstance(token, str) else token, run)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange whose payloads are sealed."""
        numbers = itertools.count(1)

        def carry(post: Post) -> Generator[Post, Received, Received]:
            is_to_all = post.is_to_all(self.world_size)
            place = partial(self._place, tag, next(numbers), "gather" if is_to_all else "scatter")

            def seal(payload: Tensor, to: int) -> Tensor:
                return self._sealer.seal(payload, place(self.rank, to))

            if is_to_all:
                sealed = post.changed(partial(seal, to=_TO_ALL))
            else:
                sealed = post._replace(to={to: seal(each, to) for to, each in post.to.items()})
            take = {sender: nbytes + SEAL_NBYTES for sender, nbytes in post.take.items()}
            answer = yield sealed._replace(take=take)
            to = _TO_ALL if is_to_all else self.rank
            return {
                sender: must_open(self._sealer.open(theirs, place(sender, to)), tag, sender)
                for sender, theirs in answer.items()
                if sender != self.rank
            }

        return self._inner.run(wrapped(posts, carry), tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Announce a card that only workers with the token can read."""
        place, cards = partial(self._place, tag, 0, "announce"), {self.rank: card}
        sealed = self._sealer.seal(bytes_tensor(card), place(self.rank, _TO_ALL))
        for rank, theirs in self._inner.announce(sealed.numpy().tobytes(), tag).items():
            if rank != self.rank:
                found = self._sealer.open(bytes_tensor(theirs), place(rank, _TO_ALL))
                cards[rank] = must_open(found, tag, rank).numpy().tobytes()
        return cards

    def _place(self, tag: RoundTag, number: int, kind: str, sender: int, to: int) -> bytes:
        # Leaves out the anchor: the message's header shows if workers have drifted.
        return place_of(tag.what, tag.round, number, kind, self.world_size, sender, to)


def sealed_by_default(transport: Transport) -> Transport:
    """Seal `transport` if the environment variable THINWIRE_TOKEN is set and K is above 1.

    Raises:
        ConfigurationError: as for `Sealed`.
    """
    if transport.world_size == 1 or not os.environ.get(TOKEN_VARIABLE):
        return transport
    return Sealed(transport, find_token())


def must_open(payload: Tensor | None, tag: RoundTag, worker: int) -> Tensor:
    """Return the opened payload of `worker`.

    Raises:
        ExchangeError: `payload` is None, because it did not open.
    """
    if payload is None:
        raise ExchangeError(
            f"use what worker {worker} sent for {tag}",
            because="it does not open: it was sealed with another token or for another round, or "
            "changed on its way",
            do="set THINWIRE_TOKEN to the same on all workers; if it is, find out what changes "
            "messages between them",
        )
    return payload
