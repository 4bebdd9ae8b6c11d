"""Ideal freight: N numbers of so many bits and nothing else, as papers count.

What a run really sends, with headers, scales and both halves of a reduction, is in
`thinwire.plan.traffic`.
"""

from dataclasses import dataclass
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.fragments import Fragments
from thinwire.fragments.layers import Part

__all__ = ["IdealFreight", "IdealMessage", "ideal_freight"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class IdealMessage:
    """A `Parcel` without headers.

    Args:
        offset: t_p.
        first: step.
        layers: of the stack.
        parameters: numbers.
        payload_nbytes: bits / 8 of each number; it need not be whole.
        received_nbytes: from all others.
        exchange: gather or pairs.
    """

    offset: int
    first: int
    layers: tuple[int | None, ...]
    parameters: int
    payload_nbytes: float
    received_nbytes: float
    exchange: str = "gather"

    @property
    def sent_nbytes(self) -> float:
        """The payload, counted once."""
        return self.payload_nbytes

    @property
    def result_nbytes(self) -> float:
        """Nothing is reduced."""
        return 0.0

    @property
    def vote_nbytes(self) -> float:
        """Nobody votes."""
        return 0.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class IdealFreight:
    """A `Freight` of ideal messages.

    Args:
        sync_every: H.
        tau: inner steps that an exchange may take.
        messages: one for each fragment.
        workers: K.
    """

    sync_every: int
    tau: int
    messages: tuple[IdealMessage, ...]
    workers: int


def ideal_freight(
    fragments: Fragments,
    *,
    parameters: int,
    layers: int,
    bits: float,
    sync_every: int,
    tau: int = 0,
    workers: int = 2,
) -> IdealFreight:
    """What everyone's payload of N `bits` comes to, when equal layers are cut into `fragments`.

    Args:
        fragments: what travels together, and when.
        parameters: N; the first layers have one more than the others if it does not come out even.
        layers: L.
        bits: for each number.
        sync_every: H.
        tau: inner steps that an exchange may take.
        workers: K.

    Raises:
        ConfigurationError: L < 1, N < L, K < 1, or fragments that do not fit.

    >>> from thinwire.fragments import Whole
    >>> freight = ideal_freight(Whole(), parameters=7, layers=2, bits=4, sync_every=30)
    >>> freight.messages[0].layers, freight.messages[0].payload_nbytes
    ((0, 1), 3.5)
    """
    if workers < 1 or not 1 <= layers <= parameters:
        raise ConfigurationError(
            f"plan for {workers} workers, {parameters} parameters and {layers} layers",
            because="there is at least one of each, and a parameter in every layer",
            do="pass workers >= 1 and parameters >= layers >= 1",
        )
    each, more = divmod(parameters, layers)
    parts = {
        str(i): Part(name=str(i), aliases=(str(i),), numel=each + (i < more), layer=i)
        for i in range(layers)
    }

    def message(names: tuple[str, ...], offset: int, first: int) -> IdealMessage:
        numel = sum(parts[name].numel for name in names)
        nbytes = bits * numel / 8
        return IdealMessage(
            offset=offset,
            first=first,
            layers=tuple(parts[name].layer for name in names),
            parameters=numel,
            payload_nbytes=nbytes,
            received_nbytes=(workers - 1) * nbytes,
        )

    plan = fragments.plan([*parts.values()], sync_every=sync_every)
    return IdealFreight(
        sync_every=sync_every,
        tau=tau,
        messages=tuple(message(f.names, f.offset_steps, f.first_step) for f in plan),
        workers=workers,
    )
