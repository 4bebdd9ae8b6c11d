"""The simulation: inner steps, what is sent after them, and what they wait for, event by event.

A worker computes step t, encodes what is due after it and sends it; training goes on. Before step
t + 1 + tau it waits for the answer, decodes it and takes the outer step. Exchanges have the link
one after the other, in the order in which they began. All workers are alike and always there, so
one clock stands for all of them. `report/link.js` does the same in a page.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

from thinwire.errors import ConfigurationError
from thinwire.plan.link import TransferTime
from thinwire.plan.scenario import Scenario


@dataclass(kw_only=True, slots=True)  # state: sums
class Seconds:
    """The seconds of a worker, by what it spent them on.

    Args:
        compute_s: inner steps.
        coding_s: encoding, decoding and the outer step.
        bandwidth_s: waiting while bits moved.
        latency_s: waiting while they were on their way.
    """

    compute_s: float = 0.0
    coding_s: float = 0.0
    bandwidth_s: float = 0.0
    latency_s: float = 0.0

    def wait(self, seconds: float, transfer: TransferTime) -> None:
        """Count the last `seconds` of an exchange, in the proportions of the whole of it."""
        share = seconds / transfer.total_s if transfer.total_s else 0.0
        self.bandwidth_s += share * transfer.transfer_s
        self.latency_s += share * transfer.latency_s
        self.coding_s += share * transfer.coding_s

    def since(self, earlier: "Seconds") -> "Seconds":
        """The seconds spent after `earlier`."""
        return Seconds(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )

    @property
    def waiting_s(self) -> float:
        """Waiting of both kinds."""
        return self.bandwidth_s + self.latency_s

    @property
    def total_s(self) -> float:
        """The whole time."""
        return self.compute_s + self.coding_s + self.waiting_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which inner steps are computed."""
        return self.compute_s / self.total_s if self.total_s else 1.0

    def limit(self, *, satisfied: float = 0.99) -> str:
        """What most of the other time goes to; `compute` from a utilisation of `satisfied` on.

        >>> Seconds(compute_s=6, coding_s=1, bandwidth_s=3).limit()
        'bandwidth'
        """
        if self.utilisation >= satisfied:
            return "compute"
        lost = {
            "coding": self.coding_s,
            "bandwidth": self.bandwidth_s,
            "latency": self.latency_s,
        }
        return max(lost, key=lambda reason: lost[reason])


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """A simulated run, as each of its workers sees it.

    Args:
        steps: inner steps.
        wall_s: from the first step to the end.
        seconds: what `wall_s` went to.
        wait_s: before each inner step, and at the end.
        round_s: the time after every H-th inner step.
        begun_s: when each exchange had the link.
        freed_s: when the next one could have it.
    """

    steps: int
    wall_s: float
    seconds: Seconds
    wait_s: tuple[float, ...]
    round_s: tuple[float, ...]
    begun_s: tuple[float, ...]
    freed_s: tuple[float, ...]

    @property
    def utilisation(self) -> float:
        """Share of the time in which inner steps are computed."""
        return self.seconds.utilisation

    @property
    def limit(self) -> str:
        """What most of the other time goes to."""
        return self.seconds.limit()


def simulate(scenario: Scenario, *, steps: int) -> SimulationResult:
    """A run of `steps` inner steps, at the end of which all that was trained is exchanged.

    Args:
        scenario: what is simulated.
        steps: inner steps; 0 is a run without any.

    Raises:
        ConfigurationError: fewer than 0 steps.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_per_round)  # a second for each exchange
    >>> result = simulate(Scenario(traffic=sent, compute=Compute(step_s=1), link=link), steps=6)
    >>> result.wall_s, result.utilisation, result.limit
    (8.0, 0.75, 'bandwidth')
    """
    if steps < 0:
        raise ConfigurationError(
            f"simulate {steps} inner steps", because="a run has 0 or more", do="pass steps >= 0"
        )
    return _Simulation(scenario).run(steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """An exchange under way: of which message, and when its answer is there."""

    message: int
    done_s: float


class _Simulation:
    """A run under way.

    Args:
        scenario: what is simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._traffic, self._step_s = scenario.traffic, scenario.compute.step_s
        count = range(len(self._traffic.messages))
        self._transfers = [scenario.transfer_time(index) for index in count]
        self._encode_s = [scenario.encode_s(index) for index in count]
        self._decode_s = [scenario.decode_s(index) for index in count]
        # A message is due after step t if t is at its place in the round and it has begun by then.
        self._at_place: dict[int, list[int]] = defaultdict(list)
        for index, message in enumerate(self._traffic.messages):
            self._at_place[message.offset % self._traffic.sync_every].append(index)
        self._places = sorted(self._at_place)
        self._now_s = self._link_free_s = 0.0
        self._pending: dict[int, list[_Pending]] = defaultdict(list)  # by step that needs them
        self._seconds = Seconds()
        self._wait_s: list[float] = []
        self._round_s: list[float] = []
        self._begun_s: list[float] = []
        self._freed_s: list[float] = []

    def run(self, steps: int) -> SimulationResult:
        """Step by step where something happens, and all at once where nothing does."""
        step = 1
        while step <= steps:
            event = min(self._next_event(step), steps + 1)
            if event > step:
                self._train(event - step)
                self._wait_s.extend([0.0] * (event - step))
            if event <= steps:
                self._take(event)
            step = event + 1
        self._wait_s.append(self._finish(steps))
        return SimulationResult(
            steps=steps,
            wall_s=self._now_s,
            seconds=self._seconds,
            wait_s=tuple(self._wait_s),
            round_s=tuple(self._round_s),
            begun_s=tuple(self._begun_s),
            freed_s=tuple(self._freed_s),
        )

    def _next_event(self, step: int) -> int:
        """The first step from `step` on after which something is due or a round ends, or before
        which something is needed.
        """
        round_end = step + -step % self._traffic.sync_every
        return min(self._next_due(step), min(self._pending, default=round_end), round_end)

    def _next_due(self, step: int) -> int:
        every = self._traffic.sync_every
        while True:
            begin, place = step - step % every, step % every
            later = bisect_left(self._places, place)
            wraps = later == len(self._places)
            step = begin + (self._places[0] + every if wraps else self._places[later])
            if self._due(step):
                return step
            step += 1

    def _due(self, step: int) -> list[int]:
        messages = self._traffic.messages
        at_place = self._at_place.get(step % self._traffic.sync_every, ())
        return [index for index in at_place if step >= messages[index].first]

    def _take(self, step: int) -> None:
        """Inner step `step`, counted from 1, and all that happens in it."""
        self._wait_s.append(self._use(self._pending.pop(step, ())))
        self._train(1)
        for index in self._due(step):
            self._send(index, step)
        if step % self._traffic.sync_every == 0:
            self._round_s.append(self._now_s)

    def _train(self, steps: int) -> None:
        self._now_s += steps * self._step_s
        self._seconds.compute_s += steps * self._step_s

    def _code(self, seconds: float) -> None:
        self._now_s += seconds
        self._seconds.coding_s += seconds

    def _send(self, index: int, step: int) -> None:
        """Encode a message and send it as soon as the link is free."""
        self._code(self._encode_s[index])
        transfer = self._transfers[index]
        begun_s = max(self._now_s, self._link_free_s)
        self._link_free_s = begun_s + transfer.held_s
        self._begun_s.append(begun_s)
        self._freed_s.append(self._link_free_s)
        pending = _Pending(message=index, done_s=self._link_free_s + transfer.lag_s)
        self._pending[step + 1 + self._traffic.tau].append(pending)

    def _use(self, answers: Iterable[_Pending]) -> float:
        """Wait for `answers` one by one, decode them and take the outer step; seconds waited."""
        waited_s = 0.0
        for answer in answers:
            wait_s = max(0.0, answer.done_s - self._now_s)
            if wait_s > 0:
                self._now_s = answer.done_s
                self._seconds.wait(wait_s, self._transfers[answer.message])
                waited_s += wait_s
            self._code(self._decode_s[answer.message])
        return waited_s

    def _finish(self, steps: int) -> float:
        """Exchange what was trained since it was last sent and use all answers; seconds waited."""
        traffic = self._traffic
        waited_s = self._use(self._pending.pop(steps + 1, ()))
        left_over = [
            index
            for index, message in enumerate(traffic.messages)
            if message.last_due(steps, sync_every=traffic.sync_every) < steps
        ]
        # A message is not sent again before its answer was used, unless tau spans a whole round.
        if traffic.tau < traffic.sync_every:
            for step, pending in sorted(self._pending.items()):
                waited_s += self._use(p for p in pending if p.message in left_over)
                self._pending[step] = [p for p in pending if p.message not in left_over]
        for index in left_over:
            self._send(index, steps)
        for step in sorted(self._pending):
            waited_s += self._use(self._pending.pop(step))
        return waited_s
