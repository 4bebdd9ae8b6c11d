"""Simulation of a run, event by event: inner steps, exchanges and waits.

A worker computes step t, encodes and sends what is due, and continues to train. Before step
t + 1 + tau, it waits for the answer, decodes it and takes the outer step. Exchanges use the link
one after the other, in the order of their starts. All workers are alike and always present, so one
clock is enough. `report/link.js` runs the same simulation in a page.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from thinwire.errors import check
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link, Ring, Star, Topology, TransferTime
from thinwire.plan.traffic import Traffic

# Utilisation from which computing counts as the only limit.
BUSY: Final = 0.99
_MOST_ROUNDS: Final = 64
_PRECISION: Final = 1e-9
_SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S = 1e-3, 1e21


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything that a simulation depends on, except its length.

    Args:
        traffic: messages of a method.
        compute: an inner step of every worker, and the coding of its messages.
        link: link of every worker.
        topology: paths of the messages.

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_nbytes(), latency_s=0.5)
    >>> Scenario(traffic=sent, compute=Compute(step_s=1), link=link).transfer_time(0).total_s
    1.5
    """

    traffic: Traffic
    compute: Compute
    link: Link
    topology: Topology = field(default_factory=Ring)

    def transfer_time(self, index: int) -> TransferTime:
        """Seconds of the exchange of message `index`."""
        message, workers, link = self.traffic.messages[index], self.traffic.workers, self.link
        if message.exchange == "server":
            return Star().through(message.sent_nbytes, message.received_nbytes, link)
        if workers == 1:
            return TransferTime()
        if message.exchange != "reduce_scatter":
            # Pairs share no link. With an odd number of workers, the last waits as well.
            together = 2 if message.exchange == "pairs" else workers
            return self.topology.gather(message.payload_nbytes, together, link)
        scattered = self.topology.scatter(message.payload_nbytes / workers, workers, link)
        gathered = self.topology.gather(message.result_nbytes, workers, link)
        shard, compute = message.parameters / workers, self.compute
        between_s = compute.decode_s_per_parameter * shard * workers
        return TransferTime(
            transfer_s=scattered.transfer_s + gathered.transfer_s,
            latency_s=scattered.latency_s + gathered.latency_s,
            lag_s=gathered.lag_s,
            coding_s=between_s + compute.encode_s_per_parameter * shard,
        )

    def encode_s(self, index: int) -> float:
        """Seconds a worker takes to encode message `index`."""
        return self.compute.encode_s_per_parameter * self.traffic.messages[index].parameters

    def decode_s(self, index: int) -> float:
        """Seconds a worker takes to decode the answer and to take the outer step."""
        message, workers, compute = self.traffic.messages[index], self.traffic.workers, self.compute
        payloads = {"gather": workers, "pairs": min(2, workers), "reduce_scatter": 1, "server": 1}
        decode_s = compute.decode_s_per_parameter * message.parameters * payloads[message.exchange]
        return decode_s + compute.outer_s_per_parameter * message.parameters

    def at_rate(self, bits_per_s: float) -> "Scenario":
        """The same scenario over a link of that rate, up and down."""
        return replace(self, link=Link.of(bits_per_s, latency_s=self.link.latency_s))


@dataclass(kw_only=True, slots=True)  # state: grows step by step
class SimulationResult:
    """A simulated run of one worker.

    Args:
        wait_s: waits before each inner step, and at the end.
        wall_s: time from the first step to the end; the sum of the four below.
        compute_s: time in inner steps.
        coding_s: time for encoding, decoding and the outer step.
        bandwidth_s: time spent waiting while bits were sent.
        latency_s: time spent waiting while bits were in flight.
        round_s: clock after every H-th inner step.
        begun_s: start of each exchange on the link.
        freed_s: time from which the next exchange can use the link.
    """

    wait_s: list[float]
    wall_s: float = 0.0
    compute_s: float = 0.0
    coding_s: float = 0.0
    bandwidth_s: float = 0.0
    latency_s: float = 0.0
    round_s: list[float] = field(default_factory=list[float])
    begun_s: list[float] = field(default_factory=list[float])
    freed_s: list[float] = field(default_factory=list[float])

    @property
    def utilisation(self) -> float:
        """Share of the time that goes into inner steps."""
        return self.compute_s / self.wall_s if self.wall_s else 1.0

    def limit(self, *, since: "SimulationResult | None" = None) -> str:
        """The main cause of time outside of inner steps; `compute` if that time is at most 1 %.

        Args:
            since: an earlier state of the run, whose time does not count.

        >>> SimulationResult(wait_s=[], compute_s=6, coding_s=1, bandwidth_s=3).limit()
        'bandwidth'
        """
        parts = {"compute": 0.0, "coding": 0.0, "bandwidth": 0.0, "latency": 0.0}
        for part in parts:
            parts[part] = getattr(self, f"{part}_s") - getattr(since, f"{part}_s", 0.0)
        is_busy = parts["compute"] >= BUSY * sum(parts.values())
        return "compute" if is_busy else max([*parts][1:], key=lambda part: parts[part])


def simulate(scenario: Scenario, *, steps: int) -> SimulationResult:
    """A run of `steps` inner steps, and the exchange at its end.

    Args:
        scenario: messages, workers and link of the run.
        steps: inner steps, 0 or more.

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_nbytes())  # a second for each exchange
    >>> result = simulate(Scenario(traffic=sent, compute=Compute(step_s=1), link=link), steps=6)
    >>> result.wall_s, result.utilisation, result.limit()
    (8.0, 0.75, 'bandwidth')
    """
    run, traffic = _Run(scenario, steps), scenario.traffic
    every, result, before = traffic.sync_every, run.result, 0
    due: dict[int, list[int]] = defaultdict(list)
    for index, message in enumerate(traffic.messages):
        for step in range(message.first_due(sync_every=every), steps + 1, every):
            due[step].append(index)
    events = {*due, *(step + 1 + traffic.tau for step in due), *range(every, steps + 1, every)}
    # Take all steps between two events at once.
    for step in sorted(event for event in events if event <= steps):
        run.train(step - 1 - before)
        result.wait_s[step - 1] = run.use(run.pending.pop(step, ()))
        run.train(1)
        for index in due.get(step, ()):
            run.send(index, step)
        if step % every == 0:
            result.round_s.append(result.wall_s)
        before = step
    run.train(steps - before)
    result.wait_s[steps] = run.finish(steps)
    return result


class _Run:
    """State of a simulated run."""

    def __init__(self, scenario: Scenario, steps: int) -> None:
        self._scenario = scenario
        count = range(len(scenario.traffic.messages))
        self._transfers = [scenario.transfer_time(index) for index in count]
        self._encode_s = [scenario.encode_s(index) for index in count]
        self._decode_s = [scenario.decode_s(index) for index in count]
        # Messages and the times of their answers, by the step that needs them.
        self.pending: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.result = SimulationResult(wait_s=[0.0] * (steps + 1))

    def train(self, steps: int) -> None:
        self.result.wall_s += steps * self._scenario.compute.step_s
        self.result.compute_s += steps * self._scenario.compute.step_s

    def send(self, index: int, step: int) -> None:
        """Encode a message and send it as soon as the link is free."""
        self._code(self._encode_s[index])
        transfer, freed_s = self._transfers[index], self.result.freed_s
        begun_s = max(self.result.wall_s, freed_s[-1] if freed_s else 0.0)
        self.result.begun_s.append(begun_s)
        freed_s.append(begun_s + transfer.held_s)
        answer = index, freed_s[-1] + transfer.lag_s
        self.pending[step + 1 + self._scenario.traffic.tau].append(answer)

    def use(self, answers: Iterable[tuple[int, float]]) -> float:
        """Wait for `answers`, decode them and take outer steps; returns seconds waited."""
        waited_s = 0.0
        for index, done_s in answers:
            if (wait_s := done_s - self.result.wall_s) > 0:
                self.result.wall_s = done_s
                self._wait(wait_s, self._transfers[index])
                waited_s += wait_s
            self._code(self._decode_s[index])
        return waited_s

    def finish(self, steps: int) -> float:
        """Send what has not been sent, and use all answers; returns seconds waited."""
        traffic = self._scenario.traffic
        waited_s = self.use(self.pending.pop(steps + 1, ()))
        lasts = [m.last_due(steps, sync_every=traffic.sync_every) for m in traffic.messages]
        left_over = [index for index, last in enumerate(lasts) if last < steps]
        # A message's answer is used before it is sent again, unless tau spans a whole round.
        if traffic.tau < traffic.sync_every:
            for step, pending in sorted(self.pending.items()):
                waited_s += self.use(answer for answer in pending if answer[0] in left_over)
                self.pending[step] = [a for a in pending if a[0] not in left_over]
        for index in left_over:
            self.send(index, steps)
        for step in sorted(self.pending):
            waited_s += self.use(self.pending.pop(step))
        return waited_s

    def _wait(self, seconds: float, transfer: TransferTime) -> None:
        """Count the last `seconds` of an exchange, split by cause as the whole exchange is."""
        share = seconds / transfer.total_s if transfer.total_s else 0.0
        self.result.bandwidth_s += share * transfer.transfer_s
        self.result.latency_s += share * transfer.latency_s
        self.result.coding_s += share * transfer.coding_s

    def _code(self, seconds: float) -> None:
        self.result.wall_s += seconds
        self.result.coding_s += seconds


# -- in the long run -------------------------------------------------------------------------------


def steady_utilisation(scenario: Scenario) -> float:
    """Share of the time in which workers compute, without the beginning and end of a run.

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_nbytes())
    >>> steady_utilisation(Scenario(traffic=sent, compute=Compute(step_s=1), link=link))
    0.75
    """
    every = scenario.traffic.sync_every
    round_s = steady_round_s(
        lambda rounds: simulate(scenario, steps=rounds * every).round_s,
        least_s=least_round_s(scenario),
    )
    return min(1.0, every * scenario.compute.step_s / round_s)  # but for rounding


def steady_round_s(ends_s: Callable[[int], Sequence[float]], *, least_s: float) -> float:
    """Seconds of a round, without the beginning and end of a run.

    Simulates until two consecutive rounds take the same time, at least `least_s`: over a link that
    is a little too slow, many equal rounds pass before workers wait. If none of `_MOST_ROUNDS` do,
    it is the mean of their second half.

    Args:
        ends_s: maps a number of rounds to the time at the end of each.
        least_s: a lower bound.
    """
    rounds, round_s = 4, (0.0,)
    while rounds <= _MOST_ROUNDS:
        round_s = ends_s(rounds)
        before_s, last_s = round_s[-2] - round_s[-3], round_s[-1] - round_s[-2]
        if math.isclose(before_s, last_s, rel_tol=1e-12) and last_s > least_s * (1 - 1e-9):
            return last_s
        rounds *= 2
    # Rounds that differ may repeat with a period of several.
    half = len(round_s) // 2
    return max(least_s, (round_s[-1] - round_s[half - 1]) / (len(round_s) - half))


def least_round_s(scenario: Scenario) -> float:
    """A lower bound on the seconds of a round, reached if everything overlaps.

    round >= max(H s + sum_p (encode_p + decode_p), sum_p held_p)
    """
    busy_s, held_s = scenario.traffic.sync_every * scenario.compute.step_s, 0.0
    for index in range(len(scenario.traffic.messages)):
        busy_s += scenario.encode_s(index)
        busy_s += scenario.decode_s(index)
        held_s += scenario.transfer_time(index).held_s
    return max(busy_s, held_s)


def required_bandwidth(target: float, scenario: Scenario) -> float:
    """The least rate, up and down, at which workers compute for a share `target` of the time.

    Args:
        target: compute utilisation, in (0, 1).
        scenario: messages, workers and link of the run; the rates of the link do not matter.

    Returns:
        Bits per second, to a relative 1e-9; 0 if any rate will do, infinity if no rate will,
        because latency or coding takes more than the rest of the time.

    Raises:
        ConfigurationError: a target outside of (0, 1).

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> scenario = Scenario(traffic=sent, compute=Compute(step_s=1), link=Link.of(1))
    >>> round(required_bandwidth(0.75, scenario)) == 8 * sent.sent_nbytes()
    True
    """
    what = f"find the bandwidth for a utilisation of {target:g}"
    because = "it is a share of the time, and an exchange takes some"
    check(0 < target < 1, what, because=because, do="pass a target between 0 and 1")
    return least_rate(lambda rate: steady_utilisation(scenario.at_rate(rate)) >= target)


def least_rate(reaches: Callable[[float], bool]) -> float:
    """The least rate for which `reaches` is true, in bit/s.

    It is 0 if the slowest rate that is tried suffices, and infinity if the fastest does not.

    Args:
        reaches: false up to some rate, and true above it.
    """
    low, high = _SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S
    if not reaches(math.inf):
        return math.inf
    if reaches(low):
        return 0.0
    if not reaches(high):
        return math.inf
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
