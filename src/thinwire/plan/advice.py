"""What to run on a link: of all that can be chosen, what keeps workers busy at the least loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.choice import INTERVALS, Choice, choices
from thinwire.plan.forecast import Forecast, forecast
from thinwire.plan.job import Job
from thinwire.plan.loss import LossEstimate, expected_loss
from thinwire.plan.required import required_bandwidth, steady_utilisation
from thinwire.plan.traffic import Traffic

_MOST: Final = 5
_FEWEST_ROUNDS: Final = 10
_LONGEST: Final = 100_000
_NEAR: Final = 8
USED_SHARE: Final = 0.85
"""Of the rate, where exchanges are hidden behind inner steps: headers take a twentieth, and what
delays a message that just fits is waited for in each of many. Replays of messages that took as long
as the steps that were to hide them waited as if they had 0.82 to 0.86 of the rate (docs/log.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A choice that reaches the target.

    Args:
        choice: preset and numbers.
        forecast: what it sends and how busy it keeps the workers.
        estimate: what it is expected to cost in loss.
    """

    choice: Choice
    forecast: Forecast
    estimate: LossEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededChange:
    """What would have to change for the target to be reached.

    Args:
        quantity: bandwidth, sync-every or workers.
        value: bit/s, inner steps or K that would do.
        choice: with which.
    """

    quantity: str
    value: float
    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to run.

    Args:
        target: utilisation that was to be reached.
        recommended: the best choice of each of five presets that reach it, least expected loss
            first, and data parallelism if it does.
        closest: the busiest choice where none reaches it; None: nothing can be run at all.
        changes: each of which would make one reach it, where none does.
    """

    target: float
    recommended: tuple[Recommendation, ...]
    closest: Recommendation | None
    changes: tuple[NeededChange, ...]


def advise(
    job: Job, *, target: float = 0.9, usable: Callable[[Method], None] | None = None
) -> Advice:
    """The choices that keep the workers of `job` busy, those of the least expected loss first.

    For every preset, width, density, delay, cut and exchange the shortest rounds that reach the
    target are looked for, because longer ones lose more; of those of one preset the one with the
    least expected loss counts. H of the job, if it has one, is kept. A run whose tokens are known
    has 10 rounds or more.

    Args:
        job: model, workers and link.
        target: utilisation to be reached.
        usable: raises ConfigurationError for a method that cannot be run; default: all can.

    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(400 * 10**6, 24),
    ...     workers=4,
    ...     compute=Compute(step_s=1),
    ...     link=Link.of(1e8, latency_s=0.05),
    ... )
    >>> advice = advise(job)
    >>> all(found.forecast.utilisation >= 0.9 for found in advice.recommended)
    True
    >>> advice.changes
    ()
    """
    search = _Search(job, target, usable)
    best: dict[str, tuple[Choice, LossEstimate]] = {}
    for choice in search.choices:
        found = search.shortest(choice)
        if found is None:
            continue
        estimate = search.loss(found)
        known = best.get(choice.preset)
        if known is None or estimate.loss.middle < known[1].loss.middle:
            best[choice.preset] = found, estimate
    ordered = sorted(best.values(), key=lambda found: found[1].loss.middle)
    shown = ordered[:_MOST]
    # Where the link carries plain data parallelism, a user should know it.
    shown += [found for found in ordered[_MOST:] if found[0].preset == "ddp"]
    recommended = tuple(search.recommend(choice) for choice, _ in shown)
    return Advice(
        target=target,
        recommended=recommended,
        closest=None if recommended else search.closest(),
        changes=() if recommended else tuple(search.changes()),
    )


class _Search:
    """A search for one job.

    Args:
        job: model, workers and link.
        target: utilisation to be reached.
        usable: raises ConfigurationError for a method that cannot be run.
        intervals: H that are tried; default those of the job.
    """

    def __init__(
        self,
        job: Job,
        target: float,
        usable: Callable[[Method], None] | None,
        *,
        intervals: Sequence[int] | None = None,
    ) -> None:
        # The choices have an H of their own.
        self._job, self._target = replace(job, sync_every=None), target
        longest = math.inf if job.steps is None else job.steps // _FEWEST_ROUNDS
        given = INTERVALS if job.sync_every is None else (job.sync_every,)
        possible = [every for every in given if every <= longest]
        self._intervals = possible if intervals is None else intervals
        self._longest = longest if job.sync_every is None else 0
        self._usable = usable
        self._known: dict[Choice, Traffic | None] = {}
        self.choices = list(choices(job.shape.parameters))

    def loss(self, choice: Choice) -> LossEstimate:
        """What a choice is expected to cost."""
        shape, workers = self._job.shape, self._job.workers
        return expected_loss(choice, parameters=shape.parameters, workers=workers)

    def recommend(self, choice: Choice) -> Recommendation:
        """A choice, with all that is known of it."""
        method = choice.method()
        return Recommendation(
            choice=choice,
            forecast=forecast(method, self._job_of(choice), target=self._target, utilisations=()),
            estimate=self.loss(choice),
        )

    def shortest(self, choice: Choice) -> Choice | None:
        """`choice` with the shortest rounds that reach the target; None: none do."""
        if not choice.has_rounds:
            return choice if self._utilisation(choice) >= self._target else None
        intervals = self._intervals
        # Longer rounds wait less. One that a method cannot have is too short for its fragments.
        low, high = 0, len(intervals)
        while low < high:
            middle = (low + high) // 2
            if self._reaches(choice, intervals[middle]):
                high = middle
            else:
                low = middle + 1
        return replace(choice, sync_every=intervals[low]) if low < len(intervals) else None

    def closest(self) -> Recommendation | None:
        """The busiest that there is."""
        found = max(self._longest_rounds(), key=self._utilisation, default=None)
        if found is None or not self._utilisation(found):
            return None
        return self.recommend(found)

    def changes(self) -> Iterator[NeededChange]:
        """What would help, each by itself: a faster link, longer rounds, fewer workers."""
        # The least rate is that of one of those that are nearly busy enough.
        busiest = sorted(self._longest_rounds(), key=self._utilisation, reverse=True)[:_NEAR]
        rates = [(self._rate(choice), choice) for choice in busiest]
        rate, choice = min(rates, key=lambda found: found[0], default=(math.inf, None))
        if choice is not None and rate < math.inf:
            yield NeededChange(quantity="bandwidth", value=rate, choice=choice)
        longer = [found for choice in busiest if (found := self._lengthened(choice))]
        if longer:
            shortest = min(longer, key=lambda choice: choice.sync_every or 0)
            value = shortest.sync_every or 0
            yield NeededChange(quantity="sync-every", value=value, choice=shortest)
        if (fewer := self._fewer_workers()) is not None:
            yield fewer

    def _longest_rounds(self) -> list[Choice]:
        """Every choice that can be run, with the longest rounds that it may have."""
        longest = self._intervals[-1] if self._intervals else None
        found = [
            replace(choice, sync_every=longest) if choice.has_rounds else choice
            for choice in self.choices
            if longest is not None or not choice.has_rounds
        ]
        return [choice for choice in found if self._traffic(choice) is not None]

    def _rate(self, choice: Choice) -> float:
        sent = self._traffic(choice)
        if sent is None or self._target >= 1:
            return math.inf
        rate = required_bandwidth(self._target, self._job.scenario(sent))
        return rate if choice.tau is None else rate / USED_SHARE

    def _lengthened(self, choice: Choice) -> Choice | None:
        """With rounds longer than those that are tried, if any reach the target."""
        high = min(_LONGEST, self._longest)
        low = INTERVALS[-1]
        if not choice.has_rounds or high <= low or not self._reaches(choice, int(high)):
            return None
        high = int(high)
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if self._reaches(choice, middle) else (middle, high)
        return replace(choice, sync_every=high)

    def _fewer_workers(self) -> NeededChange | None:
        """Fewer workers, all of which some choice keeps busy: half as many, or half of these."""
        workers = self._job.workers // 2
        while workers > 1:
            job = replace(self._job, workers=workers)
            search = _Search(job, self._target, self._usable, intervals=self._intervals)
            # The fewer they are, the more a gather is the cheaper exchange.
            search.choices = [c for c in self.choices if c.exchange == "gather" or c.is_alone]
            longest = search._longest_rounds()
            if any(search._utilisation(choice) >= self._target for choice in longest):
                found = [one for c in search.choices if (one := search.shortest(c)) is not None]
                best = min(found, key=lambda one: search.loss(one).loss.middle)
                return NeededChange(quantity="workers", value=workers, choice=best)
            workers //= 2
        return None

    def _reaches(self, choice: Choice, sync_every: int) -> bool:
        return self._utilisation(replace(choice, sync_every=sync_every)) >= self._target

    def _utilisation(self, choice: Choice) -> float:
        sent = self._traffic(choice)
        return 0.0 if sent is None else steady_utilisation(self._job_of(choice).scenario(sent))

    def _job_of(self, choice: Choice) -> Job:
        """The job, at the rate that a choice may count on."""
        if choice.tau is None:
            return self._job
        link = self._job.link
        slower = replace(
            link,
            up_bits_per_s=USED_SHARE * link.up_bits_per_s,
            down_bits_per_s=USED_SHARE * link.down_bits_per_s,
        )
        return replace(self._job, link=slower)

    def _traffic(self, choice: Choice) -> Traffic | None:
        """What it sends; None if it cannot be run, or rounds twice."""
        if choice not in self._known:
            self._known[choice] = self._found_traffic(choice)
        return self._known[choice]

    def _found_traffic(self, choice: Choice) -> Traffic | None:
        if choice.has_rounds and choice.tau is None and choice.sync_every is not None:
            # What goes out in one piece has the same sizes in rounds of every length, and takes
            # long to work out for a thousand workers.
            once = self._traffic(replace(choice, sync_every=None))
            return None if once is None else _in_rounds(once, choice.sync_every)
        try:
            method = choice.method()
            if self._usable is not None:
                self._usable(method)
            sent = self._job.traffic(method)
        except ConfigurationError:
            return None
        exchanges = {message.exchange for message in sent.messages}
        return None if choice.is_coded and "reduce_scatter" in exchanges else sent


def _in_rounds(sent: Traffic, sync_every: int) -> Traffic:
    (message,) = sent.messages
    return replace(sent, sync_every=sync_every, messages=(replace(message, first=sync_every),))
