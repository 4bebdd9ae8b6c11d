"""Payloads that only the workers of a run can read or make, over any transport."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import TypeVar

import torch
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
    wrapped,
)

T = TypeVar("T")

_TO_ALL = -1


class Sealed(WrappedTransport):
    """Wraps a transport and seals every payload with AES-256-GCM, by a key of the run's token.

    A payload is bound to its place: exchange, kind and number of the post in it, K, sender, and
    receiver. One that was changed, cut, sealed with another token, or taken from another place does
    not open. Where the exchange can go on without it, it gets an empty one in its place; otherwise
    that is an error. Answers, and so digests, are those of the wrapped transport.

    All workers wrap theirs, or none does; a `Bucket` takes the token itself. Each payload is 28
    bytes longer. Sizes and times show, and it is not forward secret: what is recorded opens with a
    token that gets out later.

    Args:
        inner: carries what is sealed.
        token: of the run, the same on all workers.
        run: its name, likewise. Exchanges of two runs with one token have equal places, so that a
            payload of one would open in the other: give each run a token or a name of its own.

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
        """Start an exchange of which nothing travels unsealed."""
        if self.world_size == 1:
            return self._inner.run(posts, tag)
        return self._inner.run(wrapped(posts, _SealedExchange(self, self._sealer, tag).carry), tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Announce a card that only workers with the token can read."""
        if self.world_size == 1:
            return self._inner.announce(card, tag)
        exchange, cards = _SealedExchange(self, self._sealer, tag), {self.rank: card}
        sealed = exchange.seal(_tensor(card), "announce", _TO_ALL)
        for rank, theirs in self._inner.announce(_bytes(sealed), tag).items():
            if rank != self.rank:
                found = exchange.open(_tensor(theirs), "announce", rank, _TO_ALL)
                if found is None:
                    raise not_opened(tag, rank)
                cards[rank] = _bytes(found)
        return cards


def sealed_by_default(transport: Transport) -> Transport:
    """`transport`, sealed if the environment variable THINWIRE_TOKEN is set and there are others.

    Raises:
        ConfigurationError: as `Sealed`.
    """
    if transport.world_size == 1 or not os.environ.get(TOKEN_VARIABLE):
        return transport
    return Sealed(transport, find_token())


class _SealedExchange:
    """One exchange: what is posted is sealed, and what comes is opened."""

    def __init__(self, transport: Transport, sealer: Sealer, tag: RoundTag) -> None:
        self._rank, self._workers = transport.rank, transport.world_size
        self._sealer, self._tag, self._number = sealer, tag, 0

    def carry(self, post: Post) -> Generator[Post, Received, Received]:
        self._number += 1
        kind, to = "scatter", self._rank
        if post.is_to_all(self._workers):
            kind, to = "gather", _TO_ALL
            sealed = post.changed(lambda payload: self.seal(payload, kind, to))
        else:
            each = {rank: self.seal(payload, kind, rank) for rank, payload in post.to.items()}
            sealed = post._replace(to=each)
        take = {sender: nbytes + SEAL_NBYTES for sender, nbytes in post.take.items()}
        answer = yield sealed._replace(take=take)
        return self._opened(answer, post, kind, to)

    def _opened(self, answer: Received, post: Post, kind: str, to: int) -> Received:
        opened: dict[int, Tensor] = {}
        for sender, theirs in answer.items():
            if sender == self._rank:
                continue
            found = self.open(theirs, kind, sender, to)
            if found is None and not post.allow_missing:
                raise not_opened(self._tag, sender)
            opened[sender] = torch.empty(0, dtype=torch.uint8) if found is None else found
        return opened

    def seal(self, payload: Tensor, kind: str, to: int) -> Tensor:
        return self._sealer.seal(payload, self._place(kind, self._rank, to))

    def open(self, sealed: Tensor, kind: str, sender: int, to: int) -> Tensor | None:
        return self._sealer.open(sealed, self._place(kind, sender, to))

    def _place(self, kind: str, sender: int, to: int) -> bytes:
        # Not the anchor: of workers that have drifted the message itself says so.
        tag = self._tag
        return place_of(tag.what, tag.round, self._number, kind, self._workers, sender, to)


def not_opened(tag: RoundTag, worker: int) -> ExchangeError:
    """The error of a payload that does not open where it should."""
    return ExchangeError(
        f"use what worker {worker} sent for {tag}",
        because="it does not open: it was sealed with another token or for another round, or "
        "changed on its way",
        do="set THINWIRE_TOKEN to the same on all workers; if it is, find out what changes "
        "messages between them",
    )


def _tensor(raw: bytes) -> Tensor:
    # A buffer of no bytes is refused by torch.
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()


def _bytes(payload: Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()
