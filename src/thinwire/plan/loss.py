"""What a method is expected to cost in loss, from runs that were made: a range, never a promise.

Two sources. This project's runs (`loss_evidence.json`, written by benchmarks/loss_evidence.py) are
of 0.25M parameters over 480 and 1,600 steps, three seeds. MuLoCo's paper (arXiv 2505.23725) gives
the losses of DiLoCo and MuLoCo at 150M to 15B, one seed. A model of 100M parameters or more takes
what dense methods cost from the paper, a smaller one from the runs; what rounds of another length,
fewer bits, sparsity, fragments and delay cost is from the runs in both cases.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final, Self

from thinwire.plan.choice import Choice

_LARGE: Final = 100_000_000
_LONG: Final = 1_600
_FOUR: Final = 4.0
_ONE_BIT: Final = "muloco:bits=1"
# Whose short runs stand for methods that were measured at one H only.
_DENSE_OF: Final = {"streaming_diloco": "adamw", "streaming_muloco": "muon", "noloco": "adamw"}
_OWN_INTERVAL, _PUBLISHED_INTERVAL = 10, 30

# Final losses of arXiv 2505.23725, H = 30: parameters -> data-parallel AdamW, DiLoCo with K = 1 and
# 16, MuLoCo with K = 1 and 16.
_PUBLISHED: Final[Mapping[float, tuple[float, float, float, float, float]]] = {
    150e6: (3.158, 3.142, 3.326, 3.120, 3.222),
    416e6: (2.682, 2.650, 2.808, 2.638, 2.713),
    914e6: (2.440, 2.411, 2.522, 2.400, 2.448),
    1.76e9: (2.266, 2.265, 2.348, 2.238, 2.291),
    3.1e9: (2.145, 2.136, 2.215, 2.122, 2.165),
    15e9: (1.887, 1.891, 1.906, 1.884, 1.917),
}
_PUBLISHED_COLUMNS: Final = {"adamw": (1, 2), "muon": (3, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRange:
    """A difference to the loss of data-parallel AdamW on as many tokens, as a share of it.

    Args:
        low: the least that the evidence allows.
        middle: by which choices are ordered.
        high: the most.

    >>> LossRange.measured(0.02, 0.005) + LossRange.measured(0.01, 0.0)
    LossRange(low=0.02, middle=0.03, high=0.04)
    """

    low: float
    middle: float
    high: float

    @classmethod
    def measured(cls, share: float, standard_error: float) -> Self:
        """A mean, and two standard errors to both sides."""
        return cls(low=share - 2 * standard_error, middle=share, high=share + 2 * standard_error)

    def __add__(self, other: "LossRange") -> "LossRange":
        return LossRange(
            low=self.low + other.low,
            middle=self.middle + other.middle,
            high=self.high + other.high,
        )

    def spanning(self, *others: "LossRange") -> "LossRange":
        """This middle, and a range that holds those of `others`, too."""
        every = (self, *others)
        return replace(self, low=min(r.low for r in every), high=max(r.high for r in every))


_NOTHING: Final = LossRange(low=0.0, middle=0.0, high=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossEstimate:
    """What a choice is expected to cost.

    Args:
        loss: against data-parallel AdamW.
        beyond: what of the choice no run had, in words; empty: all of it was measured, if not all
            together.
    """

    loss: LossRange
    beyond: tuple[str, ...]


def expected_loss(choice: Choice, *, parameters: float, workers: int) -> LossEstimate:
    """What `choice` is expected to cost in loss.

    loss = dense method of the same inner optimizer at K, + rounds of H steps, + bits, sparsity,
    fragments and delay

    Differences that were measured in the short runs only count half, within a range from nothing to
    all of them: of five losses that both lengths have, four came down to 0.33 to 0.55 of it in the
    longer runs.

    Args:
        choice: a preset and its numbers.
        parameters: of the model.
        workers: K.

    >>> found = expected_loss(Choice(preset="ddp"), parameters=4e8, workers=8)
    >>> found.loss.middle, found.beyond
    (0.0, ())
    """
    beyond: list[str] = []
    if choice.preset == "ddp":
        return LossEstimate(loss=_NOTHING, beyond=())
    if choice.preset == "demo":
        return LossEstimate(loss=_term("method", "demo", _FOUR), beyond=("at other sizes",))
    inner = "muon" if choice.preset.endswith("muloco") else "adamw"
    is_large = parameters >= _LARGE
    base = _published if is_large else _own
    loss, alone = (base(inner, parameters, k) for k in (workers, 1))
    usual = _PUBLISHED_INTERVAL if is_large else _OWN_INTERVAL
    loss += _interval(_rounds_of(choice, inner), choice.sync_every or usual, usual, beyond)
    loss += _method(choice, workers, beyond)
    # One worker that exchanges with none loses nothing to exchanges: what short runs gained over
    # it is within the range, and not expected.
    loss = replace(loss, middle=max(loss.middle, alone.middle), high=max(loss.high, alone.high))
    return LossEstimate(loss=loss, beyond=tuple(beyond))


# -- the terms -------------------------------------------------------------------------------------


def _own(inner: str, _: float, workers: int) -> LossRange:
    """The dense method in our own runs."""
    more = {1: _term("workers", inner, 1), _FOUR: _NOTHING}
    more |= {k: _term("workers", inner, k) for k in (8, 16)}
    return _term("base", inner, _FOUR) + _at(more, workers)


def _published(inner: str, parameters: float, workers: int) -> LossRange:
    """The dense method in the paper: at the nearest size, and the range over all of them."""
    one, sixteen = _PUBLISHED_COLUMNS[inner]

    def share(row: tuple[float, ...]) -> float:
        alone, many = (row[column] / row[0] - 1 for column in (one, sixteen))
        return alone + (many - alone) * math.log2(workers) / 4

    shares = {size: share(row) for size, row in _PUBLISHED.items()}
    nearest = min(shares, key=lambda size: abs(math.log(size / parameters)))
    every = shares.values()
    return LossRange(low=min(every), middle=shares[nearest], high=max(every))


def _rounds_of(choice: Choice, inner: str) -> str:
    """Whose runs tell what rounds of another length cost."""
    if choice.density is not None:
        return "sparse"
    if choice.preset in _DENSE_OF:
        return choice.preset
    return _ONE_BIT if choice.bits == 1 else inner


def _interval(of: str, sync_every: int, usual: int, beyond: list[str]) -> LossRange:
    """Rounds of H steps in place of the usual ones."""
    long: dict[float, LossRange] = {_OWN_INTERVAL: _NOTHING}
    # Of the longer runs only those of 1-bit MuLoCo had rounds of several lengths.
    rows = _measured_rounds(_ONE_BIT, long=True)
    long |= {every: _raw("interval", _ONE_BIT, every, long=True) for every in rows}
    short: dict[float, LossRange] = {_OWN_INTERVAL: _NOTHING}
    rows = _measured_rounds(_DENSE_OF.get(of, of), long=False)
    short |= {every: _raw("interval", _DENSE_OF.get(of, of), every, long=False) for every in rows}
    longest = max([_OWN_INTERVAL, *_measured_rounds(of, long=True), *_measured_rounds(of)])
    if sync_every > longest:
        beyond.append(f"rounds of more than {longest:g} steps by this method")
    # The longer runs had no rounds below 10 steps: half of what the short ones gained.
    long[5] = _halved(short.get(5, _NOTHING))
    found = _at(long, sync_every).spanning(_at(short, sync_every))
    reference = _at(long, usual)
    return LossRange(
        low=found.low - reference.middle,
        middle=found.middle - reference.middle,
        high=found.high - reference.middle,
    )


def _method(choice: Choice, workers: int, beyond: list[str]) -> LossRange:
    """Everything but the dense method and the length of its rounds."""
    preset = choice.preset
    found = _NOTHING
    if preset in ("sparseloco", "sparse_muloco", "noloco", "streaming_diloco", "streaming_muloco"):
        found = _no_gain(_term("method", preset, _FOUR))
    if choice.density is not None and choice.density != 1 / 32:
        found += _term("density", preset, choice.density)
    if choice.bits in (1, 2, 4):
        found += _term("bits", "muloco", choice.bits)
    if choice.tau is not None and choice.tau > 2:
        found += _term("tau", "streaming", 5)
    key = _ONE_BIT if choice.bits == 1 else preset
    more = {at: _term("method_workers", key, at) for at in (8, 16) if _is_known(key, at)}
    if more and workers > _FOUR:
        found += _at({_FOUR: _NOTHING, **more}, workers)
    largest = max(more, default=16)
    if workers > largest:
        beyond.append(f"more than {largest} workers")
    return found


def _no_gain(found: LossRange) -> LossRange:
    """What a code gained over the dense method is within its range, and not expected."""
    return replace(found, middle=max(0.0, found.middle), high=max(0.0, found.high))


# -- reading the evidence --------------------------------------------------------------------------


@cache
def _rows() -> Mapping[tuple[str, str, float, bool], Mapping[str, Any]]:
    """The rows of the file, by term, of what, at which value, and whether of the longer runs."""
    text = files("thinwire.plan").joinpath("loss_evidence.json").read_text()
    return {
        (row["term"], row["of"], float(row["at"]), row["steps"] == _LONG): row
        for row in json.loads(text)["rows"]
    }


def _measured_rounds(of: str, *, long: bool = False) -> list[float]:
    """H other than the usual one that were measured, in the short or in the longer runs."""
    return [
        at
        for term, whose, at, is_long in _rows()
        if (term, whose, is_long) == ("interval", of, long)
    ]


def _is_known(term_of: str, at: float) -> bool:
    return ("method_workers", term_of, float(at), False) in _rows()


def _raw(term: str, of: str, at: float, *, long: bool) -> LossRange:
    row = _rows()[term, of, float(at), long]
    return LossRange.measured(row["share"], row["standard_error"])


def _term(term: str, of: str, at: float) -> LossRange:
    """A difference by the longer runs, within a range that holds that of the short ones."""
    is_short = (term, of, float(at), False) in _rows()
    if (term, of, float(at), True) not in _rows():
        return _halved(_raw(term, of, at, long=False))
    long = _raw(term, of, at, long=True)
    return long.spanning(_raw(term, of, at, long=False)) if is_short else long


def _halved(short: LossRange) -> LossRange:
    half = short.middle / 2
    return LossRange(low=half, middle=half, high=half).spanning(short, _NOTHING)


def _at(points: Mapping[float, LossRange], value: float) -> LossRange:
    """Between what was measured linearly in the logarithm; beyond it as between the last two, by
    half as much to twice as much.
    """
    known = sorted(points)
    if len(known) == 1 or value in points:
        return points.get(value, points[known[0]])
    right = min(max(1, sum(at < value for at in known)), len(known) - 1)
    before, after = known[right - 1], known[right]
    share = math.log(value / before) / math.log(after / before)
    first, last = points[before], points[after]
    if 0 <= share <= 1:
        return LossRange(
            **{
                name: (1 - share) * getattr(first, name) + share * getattr(last, name)
                for name in ("low", "middle", "high")
            }
        )
    edge, over = (last, share - 1) if share > 1 else (first, share)
    step = over * (last.middle - first.middle)
    ends = sorted((step / 2, 2 * step))
    return edge + LossRange(low=ends[0], middle=step, high=ends[1])
