"""A job: everything that a forecast depends on besides the method."""

from dataclasses import dataclass, field, replace

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.outer import GradientAveraging
from thinwire.plan.bucket_price import BucketPrice
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.link import Link
from thinwire.plan.money import Prices
from thinwire.plan.scenario import Scenario
from thinwire.plan.shape import Shape
from thinwire.plan.topology import Ring, Topology
from thinwire.plan.traffic import Traffic, traffic

_LARGEST = {"workers": 100_000, "sync_every": 100_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model, the workers that train it, and what joins them.

    Args:
        shape: of the model.
        workers: K.
        compute: an inner step of a worker.
        link: of every worker.
        topology: which worker sends to which; default the ring of `tw.transport.Distributed`.
        coding: what encoding and decoding take.
        sync_every: H of the methods that have rounds; default each one's own.
        tokens_per_step: of one worker in an inner step.
        tokens: of all workers in the whole run.
        added_nbytes: to every message; 28 where they are sealed.
        price: of the object store that the workers exchange over; None without one.
        prices: of workers and of what they send; None: not known.

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
    coding: Coding = field(default_factory=Coding)
    sync_every: int | None = None
    tokens_per_step: int | None = None
    tokens: int | None = None
    added_nbytes: int = 0
    price: BucketPrice | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "sync_every", "tokens_per_step", "tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"plan with {name}={value}",
                    because="it must be at least 1",
                    do=f"pass {name} >= 1",
                )
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if value is not None and value > largest:
                raise ConfigurationError(
                    f"plan with {name}={value}",
                    because="a plan goes through the steps of a round and the workers one by one, "
                    "and would not end",
                    do=f"pass {name} <= {largest}",
                )
        if self.tokens is not None and self.tokens_per_step is None:
            raise ConfigurationError(
                f"plan for {self.tokens} tokens",
                because="the number of steps depends on how many of them a worker takes in each",
                do="pass tokens_per_step as well",
            )

    @property
    def steps(self) -> int | None:
        """Inner steps of the whole run, rounded up; None: not known."""
        if self.tokens is None or self.tokens_per_step is None:
            return None
        return -(-self.tokens // (self.workers * self.tokens_per_step))

    def scheduled(self, method: Method) -> Method:
        """`method` with this job's H, if it has rounds.

        Raises:
            ConfigurationError: it does not fit rounds of that length.
        """
        if self.sync_every is None or isinstance(method.outer, GradientAveraging):
            return method
        return replace(method, sync_every=self.sync_every)

    def traffic(self, method: Method) -> Traffic:
        """What `method` sends.

        Raises:
            ConfigurationError: it does not fit the model or the length of rounds.
        """
        return traffic(
            self.scheduled(method),
            self.shape,
            workers=self.workers,
            added_nbytes=self.added_nbytes,
        )

    def scenario(self, sent: Traffic) -> Scenario:
        """What is simulated for a method that sends `sent`."""
        return Scenario(
            traffic=sent,
            compute=self.compute,
            link=self.link,
            topology=self.topology,
            coding=self.coding,
        )
