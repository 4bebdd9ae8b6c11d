"""A job: everything that a forecast depends on except the method, and prices."""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from thinwire.errors import check
from thinwire.method import Method
from thinwire.outer import GradientAveraging
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link, Ring, Topology
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import Traffic, traffic

_LARGEST: Final = {"workers": 100_000, "sync_every": 100_000}
_GB, _MILLION = 10**9, 10**6
SIGN_OF_LIFE_S: Final = 10 / 3
"""Seconds between two signs of life of a worker, with the default `least_wait_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of workers, their traffic and an object store, in one currency.

    Not counted: requests for messages that have not arrived (at most one a second per waiting
    worker), the parts of messages above 5 GB (15 puts a GB, less than a hundredth of a cent),
    deletion, which is free, storage of a few rounds, and snapshots of elastic workers.

    Args:
        currency: a code such as USD.
        worker_per_hour: price of a worker with all its accelerators; None if unknown.
        traffic_per_gb: price of 10^9 bytes that a worker sends over its link; None if unknown.
        egress_per_gb: price of 10^9 bytes read from the store over which workers exchange; None if
            unknown, or without a store.
        put_per_million: price of 10^6 objects written there.
        get_per_million: price of 10^6 objects read there.
    """

    currency: str = "USD"
    worker_per_hour: float | None = None
    traffic_per_gb: float | None = None
    egress_per_gb: float | None = None
    put_per_million: float = 5.0
    get_per_million: float = 0.4


def meeting_requests(workers: int) -> tuple[int, int, int]:
    """Puts, gets and lists of all elastic workers to agree on the members of a round.

    Puts: each worker's report, and the roll. Gets: the roll, by all workers but the one that writes
    it, and up to 16 reports, by that one; beyond 16, the names of reports say enough. Lists: the
    reports, by that worker.

    Args:
        workers: number of workers, all of which are in time.

    >>> meeting_requests(4)
    (5, 6, 1)
    """
    return workers + 1, (workers - 1) * (2 if workers <= 16 else 1), 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model, its workers and their network.

    Args:
        shape: shapes of the model's parameters.
        workers: K.
        compute: an inner step of a worker, and the coding of its messages.
        link: link of every worker.
        topology: paths of the messages; default the ring of `tw.transport.Distributed`.
        sync_every: H of the methods that have rounds; default each method's own.
        tokens_per_step: tokens of one worker in an inner step.
        tokens: tokens of all workers in the whole run.
        added_nbytes: bytes added to every message; 28 if sealed.
        prices: prices of workers, traffic and a store; None if unknown.
        elastic: count the requests by which elastic workers agree on the members of each round.

    Raises:
        ConfigurationError: K, H or a number of tokens below 1, K or H above 100,000, or `tokens`
            without `tokens_per_step`.

    >>> from thinwire import presets
    >>> job = Job(
    ...     shape=Shape.of_size(1000, 2), workers=2, compute=Compute(step_s=1), link=Link.of(64)
    ... )
    >>> job.traffic(presets.diloco()).sync_every
    30
    """

    shape: Shape
    workers: int
    compute: Compute
    link: Link
    topology: Topology = field(default_factory=Ring)
    sync_every: int | None = None
    tokens_per_step: int | None = None
    tokens: int | None = None
    added_nbytes: int = 0
    prices: Prices | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "sync_every", "tokens_per_step", "tokens"):
            value: int | None = getattr(self, name)
            # A plan loops over the steps of a round and over the workers.
            what, most = f"plan with {name}={value}", _LARGEST.get(name, math.inf)
            because, do = f"it must lie in [1, {most:,}]", f"pass {name} in that interval"
            check(value is None or 1 <= value <= most, what, because=because, do=do)
        what = f"plan for {self.tokens} tokens"
        because = "the number of steps depends on how many of them a worker takes in each"
        do = "pass tokens_per_step as well"
        check(self.tokens is None or self.tokens_per_step is not None, what, because=because, do=do)

    @property
    def steps(self) -> int | None:
        """Inner steps of the whole run, rounded up; None if unknown."""
        if self.tokens is None or self.tokens_per_step is None:
            return None
        return -(-self.tokens // (self.workers * self.tokens_per_step))

    def store_cost(self, sent: Traffic, seconds: float, steps: int | None = None) -> float | None:
        """The charge of a store for all workers, for a run of `steps` and its end, or for a round.

        Args:
            sent: messages of each worker.
            seconds: length of the run or round, in which elastic workers give signs of life.
            steps: inner steps of the run; None for a round.
        """
        prices = self.prices
        if prices is None or prices.egress_per_gb is None:
            return None
        asked = sent.received_nbytes(steps), sent.puts(steps), sent.gets(steps)
        nbytes, puts, gets = (self.workers * each for each in asked)
        rounds = 1 if steps is None else 1 - (-steps // sent.sync_every)
        if self.elastic:
            # Stores charge as much for a listing as for a put.
            meeting_puts, meeting_gets, lists = meeting_requests(self.workers)
            puts += rounds * (meeting_puts + lists)
            puts += math.ceil(self.workers * seconds / SIGN_OF_LIFE_S)
            gets += rounds * meeting_gets
        requests = puts * prices.put_per_million + gets * prices.get_per_million
        return nbytes / _GB * prices.egress_per_gb + requests / _MILLION

    def traffic(self, method: Method) -> Traffic:
        """Messages of `method`, with this job's H if it has rounds.

        Raises:
            ConfigurationError: the method does not fit the model or the length of rounds.
        """
        if self.sync_every is not None and not isinstance(method.outer, GradientAveraging):
            method = replace(method, sync_every=self.sync_every)
        return traffic(method, self.shape, workers=self.workers, added_nbytes=self.added_nbytes)

    def scenario(self, sent: Traffic) -> Scenario:
        """The simulation of a method with the messages `sent`."""
        return Scenario(traffic=sent, compute=self.compute, link=self.link, topology=self.topology)
