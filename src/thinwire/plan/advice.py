"""Advice for a link: the shortest rounds of each preset that keep workers busy."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Final, TypeAlias

from thinwire import presets
from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.forecast import Forecast, bill, forecast
from thinwire.plan.job import Job
from thinwire.plan.simulate import required_bandwidth, steady_utilisation
from thinwire.plan.traffic import Traffic
from thinwire.plan.units import nbytes_text, share_text

LOSSES: Final[Mapping[str, tuple[float, str]]] = {
    "ddp": (0.0, "ddp"),
    "muloco": (-0.0964, "muloco"),
    "muloco:bits=4": (-0.0967, "muloco 4 bit"),
    "muloco:bits=2": (-0.0966, "muloco 2 bit"),
    "muloco:bits=1": (-0.0799, "muloco 1 bit"),
    "muloco:bits=2:exchange=reduce_scatter": (-0.0969, "muloco 2 bit, reduce-scatter"),
    "streaming_muloco": (-0.0705, "streaming_muloco"),
    "streaming_muloco:exchange=reduce_scatter": (-0.0695, "streaming_muloco, reduce-scatter"),
    "sparse_muloco": (0.0141, "sparse_muloco"),
    "sparse_muloco:density=1/8": (-0.0369, "sparse_muloco 1/8"),
    "sparse_muloco:density=1/64": (0.0735, "sparse_muloco 1/64"),
    "sparse_muloco:density=1/128": (0.1601, "sparse_muloco 1/128"),
    "sparseloco": (0.098, "sparseloco"),
    "sparseloco:density=1/8": (0.1805, "sparseloco 1/8"),
    "sparseloco:density=1/64": (0.1078, "sparseloco 1/64"),
    "sparseloco:density=1/128": (0.1291, "sparseloco 1/128"),
    "diloco": (0.1059, "diloco"),
    "streaming_diloco": (0.1213, "streaming_diloco"),
    "streaming_diloco:tau=5": (0.1371, "fragments, tau 5, alpha .5"),  # in fp32
    "noloco": (0.1338, "noloco"),
    "demo": (0.138, "demo"),
    "decoupled_momentum": (0.3435, "decoupled momentum"),
}
"""Loss relative to data-parallel AdamW on the same number of tokens, and the arm that measured it.

Means over the seeds that both arms have in benchmarks/results/claims-small.json: 0.25M parameters,
480 steps, 4 workers, rounds of 10 steps. A test compares them. Settings without a row count as
their preset.
"""
NO_EXCHANGE_LOSS: Final = 0.3382
"""Loss of workers that only average at the end. A method that loses this much is not advised."""
LOSS_SOURCE: Final = (
    "Loss: measured against data-parallel AdamW on as many tokens, with 0.25M parameters, 4 "
    "workers, rounds of 10 steps and three to six seeds. Longer rounds and more workers lose "
    "more. It is no forecast: compare at your own size."
)
"""Source of the losses, printed below their table."""
USED_SHARE: Final = 0.85
"""Share of the rate that hidden exchanges may use: headers take a twentieth, and every delay of a
message that barely fits becomes a wait. Replayed messages as long as the steps that hide them
waited as if at 0.82 to 0.86 of the rate (docs/log.md)."""
Table: TypeAlias = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""A title, headings, and rows of cells."""
INTERVALS: Final = (5, 7, 10, 15, 20, 30, 40, 50, 64, 80, 100, 128, 160, 200, 256)
"""The values of H to try."""
FEWEST_ROUNDS: Final = 10
"""The fewest rounds of an advised run."""

_LONGEST_MEASURED: Final = 30
_ONE_EXCHANGE: Final = ("ddp", "demo", "decoupled_momentum", "noloco")
_MOST: Final = 5
# Each longer than the last by a fiftieth.
_LONGER: Final = tuple(round(INTERVALS[-1] * 1.02**power) for power in range(1, 302))
_NEAR: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A preset and its settings, as in `--method`; None keeps the preset's own.

    Args:
        preset: name of the preset.
        parameters: size of the model, for presets that choose their inner optimizer by it.
        bits: bits of a number on the wire.
        density: share of the numbers that is sent, such as "1/32".
        layers: layers in a fragment.
        tau: inner steps that an exchange may take.
        sync_every: H.
        exchange: gather or reduce_scatter, where the method itself would choose.

    >>> choice = Choice(preset="muloco", bits=1, sync_every=64)
    >>> choice.text, choice.python
    ('muloco:bits=1:sync_every=64', 'tw.presets.muloco(bits=1, sync_every=64)')
    """

    # In the order of `text`.
    preset: str
    parameters: str | None = None
    bits: int | None = None
    density: str | None = None
    layers: int | None = None
    tau: int | None = None
    sync_every: int | None = None
    exchange: str | None = None

    @property
    def text(self) -> str:
        """The value of `--method`."""
        return ":".join((self.preset, *(f"{name}={v}" for name, v in self._arguments().items())))

    @property
    def python(self) -> str:
        """The Python expression, with thinwire as `tw`."""
        name = {"gather": "tw.Gather()", "reduce_scatter": "tw.ReduceScatter()"}.get
        values = self._arguments() | ({"exchange": name(self.exchange)} if self.exchange else {})
        given = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"tw.presets.{self.preset}({given})"

    def method(self) -> Method:
        """The method."""
        return presets.from_text(self.text)

    @property
    def coded(self) -> str:
        """The key into `LOSSES`: codec settings, and whether owners encode again."""
        scatters = self.exchange if self.exchange == "reduce_scatter" else None
        coded = replace(self, parameters=None, layers=None, tau=None, sync_every=None)
        return replace(coded, exchange=scatters).text

    @property
    def loss_share(self) -> float:
        """The measured loss, from `LOSSES`."""
        delayed = LOSSES.get(f"{self.preset}:tau={self.tau}")
        return (delayed or LOSSES.get(self.coded) or LOSSES[self.preset])[0]

    @property
    def has_rounds(self) -> bool:
        """True if the method has an H."""
        return self.preset not in ("ddp", "demo")

    def _arguments(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self)[1:] if (v := getattr(self, f.name)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A choice that reaches the target.

    Args:
        choice: preset and numbers.
        forecast: its bytes and utilisation.
    """

    choice: Choice
    forecast: Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededChange:
    """A change with which a choice would reach the target.

    Args:
        quantity: bandwidth or sync-every.
        value: bit/s or inner steps.
        choice: the choice that would reach the target.
    """

    quantity: str
    value: float
    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Recommended methods for a job.

    Args:
        target: utilisation to reach.
        recommended: choices of up to five presets that reach the target, least measured loss first,
            and data parallelism if it does.
        closest: the busiest choice if none reaches the target; None if none can run.
        changes: changes, each of which would let a choice reach the target; empty if one does.
    """

    target: float
    recommended: tuple[Recommendation, ...]
    closest: Recommendation | None
    changes: tuple[NeededChange, ...]


def choices(parameters: float) -> Iterator[Choice]:
    """All choices for a model of `parameters`, each with its preset's H.

    Leaves out methods that lost as much as workers that do not exchange.
    """
    muon = Choice(preset="muloco")
    if 150e6 <= parameters <= 15e9:  # MuLoCo's inner rates are published for these
        # Three digits and a power of ten that both a command line and Python read.
        power = 9 if parameters >= 1e9 else 6
        text = f"{float(f'{parameters:.3g}') / 10**power:g}e{power}"
        muon = Choice(preset="muloco", parameters=text)
    dense = [Choice(preset="diloco"), muon]
    coded = [replace(muon, bits=bits) for bits in (16, 4, 2, 1)]
    coded += [
        Choice(preset=preset, density=density)
        for preset in ("sparseloco", "sparse_muloco")
        for density in ("1/8", "1/32", "1/64", "1/128")
    ]
    coded += [
        Choice(preset=preset, layers=layers, tau=tau)
        for preset in ("streaming_diloco", "streaming_muloco")
        for layers in (1, 3)
        for tau in (1, 2, 5)
    ]
    alone = [Choice(preset=preset) for preset in _ONE_EXCHANGE]
    gathered = [replace(choice, exchange="gather") for choice in (*dense, *coded)]
    scattered = [replace(choice, exchange="reduce_scatter") for choice in coded]
    scattered = [choice for choice in scattered if choice.coded in LOSSES]
    for choice in (*alone, *dense, *coded, *gathered, *scattered):
        if choice.loss_share < NO_EXCHANGE_LOSS:
            yield choice


def advise(
    job: Job, *, target: float = 0.9, usable: Callable[[Method], None] = lambda _: None
) -> Advice:
    """The choices that keep the workers of `job` busy, least measured loss first.

    For each setting of each preset, takes the shortest rounds that reach the target, because longer
    ones lose more. For each preset, takes the setting with the least measured loss among those
    whose rounds are no longer than was measured, else the one with the shortest rounds. Keeps the
    job's H, and gives a run with a known number of tokens at least 10 rounds.

    Args:
        job: model, workers and link.
        target: utilisation to reach.
        usable: raises ConfigurationError for a method that cannot run; by default all can.

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
    ordered = search.best()
    shown = ordered[:_MOST]
    # A user should know that the link carries plain data parallelism.
    shown += [choice for choice in ordered[_MOST:] if choice.preset == "ddp"]
    closest = None if shown else max(search.longest_rounds(), key=search.utilisation, default=None)
    return Advice(
        target=target,
        recommended=tuple(search.recommend(choice) for choice in shown),
        closest=search.recommend(closest) if closest and search.utilisation(closest) else None,
        changes=() if shown else tuple(search.changes()),
    )


class _Search:
    """A search for one job.

    Args:
        job: model, workers and link.
        target: utilisation to reach.
        usable: raises ConfigurationError for a method that cannot run.
    """

    def __init__(self, job: Job, target: float, usable: Callable[[Method], None]) -> None:
        self._target, self._usable = target, usable
        # Each choice has its own H.
        self._job = replace(job, sync_every=None)
        longest = math.inf if job.steps is None else job.steps // FEWEST_ROUNDS
        given = INTERVALS if job.sync_every is None else (job.sync_every,)
        self._intervals = [every for every in given if every <= longest]
        self._longer = [every for every in _LONGER if every <= longest and not job.sync_every]
        self._traffic = cache(self._compute_traffic)
        self.choices = list(choices(job.shape.parameters))

    def best(self) -> list[Choice]:
        """The choice of each preset that reaches the target, least measured loss first."""
        found = self._shortest(self.choices, self._intervals)

        def within_a_preset(choice: Choice) -> tuple[int, float, int, int]:
            every = choice.sync_every or 1
            # Rounded, because seeds differ by more than a fraction of a percent.
            return (
                max(every, _LONGEST_MEASURED),
                round(choice.loss_share, 2),
                choice.tau or 0,
                every,
            )

        best: dict[str, Choice] = {}
        for choice in sorted(found, key=within_a_preset):
            best.setdefault(choice.preset, choice)
        return sorted(best.values(), key=lambda choice: choice.loss_share)

    def recommend(self, choice: Choice) -> Recommendation:
        """A choice and its forecast."""
        job = self._job_of(choice)
        found = forecast(choice.method(), job, target=self._target, utilisations=())
        return Recommendation(choice=choice, forecast=found)

    def changes(self) -> Iterator[NeededChange]:
        """Changes that each help on their own: a faster link, or longer rounds."""
        # One of the choices that are nearly busy enough needs the least rate.
        busiest = sorted(self.longest_rounds(), key=self.utilisation, reverse=True)[:_NEAR]
        rates = dict[Choice, float]()
        for choice in busiest:
            if (sent := self._traffic(choice)) is not None:
                rate = required_bandwidth(self._target, self._job.scenario(sent))
                rates[choice] = rate if choice.tau is None else rate / USED_SHARE
        nearest = min(rates, key=lambda choice: rates[choice], default=None)
        if nearest is not None and rates[nearest] < math.inf:
            yield NeededChange(quantity="bandwidth", value=rates[nearest], choice=nearest)
        longer = self._shortest([choice for choice in busiest if choice.has_rounds], self._longer)
        shortest = min(longer, key=lambda choice: choice.sync_every or 0, default=None)
        if shortest is not None:
            value = shortest.sync_every or 0
            yield NeededChange(quantity="sync-every", value=value, choice=shortest)

    def longest_rounds(self) -> list[Choice]:
        """Every choice that can run, with its longest rounds."""
        return [
            longest
            for choice in self.choices
            for longest in _with_rounds(choice, self._intervals[-1:])
            if self._traffic(longest) is not None
        ]

    def utilisation(self, choice: Choice) -> float:
        """Utilisation of a choice; 0 if it cannot run."""
        sent = self._traffic(choice)
        return 0.0 if sent is None else steady_utilisation(self._job_of(choice).scenario(sent))

    def _shortest(self, choices: Sequence[Choice], intervals: Sequence[int]) -> list[Choice]:
        """Those of `choices` that reach the target, each with its shortest such rounds."""
        found: list[Choice] = []
        for choice in choices:
            rounds = _with_rounds(choice, intervals)
            # Longer rounds wait less, and rounds too short for the fragments count as 0.
            at = bisect_left(rounds, self._target, key=self.utilisation)
            found += rounds[at : at + 1]
        return found

    def _job_of(self, choice: Choice) -> Job:
        """The job, over the share of the link that a choice may use."""
        if choice.tau is None:
            return self._job
        link, share = self._job.link, USED_SHARE
        up, down = share * link.up_bits_per_s, share * link.down_bits_per_s
        return replace(self._job, link=replace(link, up_bits_per_s=up, down_bits_per_s=down))

    def _compute_traffic(self, choice: Choice) -> Traffic | None:
        """Messages of a choice; None if it cannot run, or rounds twice and was not measured so."""
        every = choice.sync_every
        if choice.has_rounds and choice.tau is None and every is not None:
            # A whole model has the same size in rounds of any length, and for a thousand workers it
            # takes long to compute.
            once = self._traffic(replace(choice, sync_every=None))
            if once is None:
                return None
            (message,) = once.messages
            return replace(once, sync_every=every, messages=(replace(message, first=every),))
        try:
            method = choice.method()
            self._usable(method)
            sent = self._job.traffic(method)
        except ConfigurationError:
            return None
        is_dense = choice.preset in ("ddp", "diloco", "muloco", "noloco") and choice.bits is None
        is_measured = is_dense or choice.exchange == "reduce_scatter"
        exchanges = {message.exchange for message in sent.messages}
        return sent if is_measured or "reduce_scatter" not in exchanges else None


def _with_rounds(choice: Choice, intervals: Sequence[int]) -> list[Choice]:
    """`choice` with each of these H, or itself if it has none."""
    if not choice.has_rounds:
        return [choice]
    return [replace(choice, sync_every=every) for every in intervals]


# -- for a terminal or a page ----------------------------------------------------------------------


def advice_table(advice: Advice, job: Job) -> Table:
    """A row for each recommendation, or for the busiest choice where none reaches the target."""
    busy, rows = share_text(advice.target), list[tuple[str, ...]]()
    title = f"what to run: busy {busy} of the time or more, least measured loss first"
    if not advice.recommended:
        title = f"nothing tried is busy {busy} of the time; the busiest"
    head: tuple[str, ...] = ("", "method", "H", "up + down", "busy", "loss")
    if job.prices is not None:
        per = "run" if job.tokens is not None else "day"
        head = (*head, f"{per}, {job.prices.currency}")
        if job.prices.worker_per_hour is not None:
            head = (*head, "waiting")
    closest = () if advice.closest is None else (advice.closest,)
    for number, row in enumerate(advice.recommended or closest, start=1):
        found, share = row.forecast, row.choice.loss_share
        cells = (
            str(number),
            # H has a column, and the rest is in the line to paste.
            replace(row.choice, sync_every=None, parameters=None, exchange=None).text,
            str(found.sync_every_steps),
            nbytes_text(found.up_bytes_per_round + found.down_bytes_per_round),
            share_text(found.utilisation),
            f"{round(100 * share):+d} %".replace("+0", "0"),
        )
        costs = bill(found, job)
        money = (money_text(costs.cost), money_text(costs.waiting_cost))
        rows.append((*cells, *money)[: len(head)])
    return title, head, rows


def money_text(cost: float | None) -> str:
    """A sum in three digits, or in full from 1,000 on; "-" if unknown.

    >>> money_text(12.345), money_text(12345.6), money_text(None)
    ('12.3', '12,346', '-')
    """
    if cost is None:
        return "-"
    return f"{cost:,.3g}" if cost < 1000 else f"{cost:,.0f}"
