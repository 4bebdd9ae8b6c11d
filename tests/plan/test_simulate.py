"""The planner's simulation and its links: against equations, slow references, and properties."""

import math
import time
from dataclasses import replace

import pytest

from plan_scenarios import one_message, plain, same, streaming
from thinwire.errors import ConfigurationError
from thinwire.fragments import At, Sequential, Strided, Whole
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link, OverTcp, Ring, Star
from thinwire.plan.simulate import (
    Scenario,
    least_round_s,
    required_bandwidth,
    simulate,
    steady_utilisation,
)

ALL_TOPOLOGIES = [*TOPOLOGIES.values(), OverTcp(late_s=0.003)]


def step_by_step(scenario: Scenario, *, steps: int) -> tuple[list[float], float]:
    """The time at the end of every step, once what is due was encoded, and at the end of the run.

    `simulate` without its leaps, for tau < H.
    """
    sent, every = scenario.traffic, scenario.traffic.sync_every
    now_s = free_s = 0.0
    answers: list[tuple[int, int, float]] = []  # step that needs it, message, when it is there
    ends = []

    def send(index: int, step: int) -> None:
        nonlocal now_s, free_s
        now_s += scenario.encode_s(index)
        taken = scenario.transfer_time(index)
        free_s = max(now_s, free_s) + taken.held_s
        answers.append((step + 1 + sent.tau, index, free_s + taken.lag_s))

    def use(wanted: list[tuple[int, int, float]]) -> None:
        nonlocal now_s
        for answer in wanted:
            answers.remove(answer)
            now_s = max(now_s, answer[2]) + scenario.decode_s(answer[1])

    for step in range(1, steps + 1):
        use([answer for answer in answers if answer[0] == step])
        now_s += scenario.compute.step_s
        for index, box in enumerate(sent.messages):
            if step >= box.first and (step - box.offset) % every == 0:
                send(index, step)
        ends.append(now_s)
    left = [
        i for i, box in enumerate(sent.messages) if box.last_due(steps, sync_every=every) < steps
    ]
    use([answer for answer in answers if answer[0] == steps + 1 or answer[1] in left])
    for index in left:
        send(index, steps)
    use([*answers])
    return ends, now_s


WITHOUT = [
    {"exchange": exchange, "workers": workers, "result_nbytes": 4001}
    for exchange in ("gather", "reduce_scatter", "pairs")
    for workers in (1, 2, 3, 8, 13)
]
WITH = [{"tau": t, "offset": o, "first": o or 7} for t in (0, 1, 2, 6) for o in (0, 3)]


@pytest.mark.parametrize("fields", [*WITHOUT, *WITH])
def test_a_run_of_any_length_takes_what_its_steps_and_what_is_left_over_take(fields) -> None:
    scenario = one_message(**fields)
    rated = [scenario.at_rate(rate) for rate in (1e4, 3e5, 1e9, math.inf)]
    over = [replace(scenario, topology=topology) for topology in ALL_TOPOLOGIES]
    for one in rated if "tau" in fields else over:
        for steps in (*range(16), 97):
            assert same(simulate(one, steps=steps).wall_s, step_by_step(one, steps=steps)[1])


@pytest.mark.parametrize("rate", [3e4, 3e5, 3e6, 3e8])
@pytest.mark.parametrize("tau", [0, 1, 3, 9])
@pytest.mark.parametrize(
    ("every", "fragments"),
    [
        (1, Whole()),
        (7, Whole()),
        (7, Strided(layers=3)),
        (7, Sequential(layers=2, offsets=At(steps=(0,) * 6))),
        (25, Sequential(layers=2, offsets=At(steps=(20, 3, 3, 24, 0, 9)))),
    ],
)
def test_steps_without_events_may_be_taken_at_once(rate, tau, fragments, every) -> None:
    scenario = replace(
        plain(streaming(fragments, every=every, tau=tau, workers=3), rate, latency_s=0.01),
        compute=Compute(step_s=0.1, encode_s_per_parameter=1e-7, decode_s_per_parameter=3e-7),
    )
    (ends, _), found = step_by_step(scenario, steps=8 * every), simulate(scenario, steps=8 * every)
    assert found.round_s == pytest.approx(ends[every - 1 :: every], rel=1e-12)
    # A link carries one exchange at a time, and time adds up.
    assert all(b >= a for a, b in zip(found.freed_s, found.begun_s[1:], strict=False))
    waits_s = found.bandwidth_s + found.latency_s
    assert same(found.compute_s + found.coding_s + waits_s, found.wall_s)
    assert sum(found.wait_s) == pytest.approx(waits_s, rel=1e-9)
    compute_s = every * scenario.compute.step_s
    assert steady_utilisation(scenario) <= compute_s / least_round_s(scenario) * (1 + 1e-9)


def test_a_long_round_takes_no_longer_to_simulate_than_its_events() -> None:
    scenario = one_message(every=10**6)
    began_s = time.process_time()
    found = simulate(scenario, steps=3 * 10**6)
    assert time.process_time() - began_s < 2.0
    assert found.compute_s == pytest.approx(3e6 * scenario.compute.step_s, rel=1e-12)
    assert len(found.wait_s) == 3 * 10**6 + 1


def test_a_reduction_is_a_scatter_the_owner_s_work_and_a_gather() -> None:
    scenario = one_message(workers=4, exchange="reduce_scatter", result_nbytes=3000)
    taken = scenario.transfer_time(0)
    # Shards go directly, results around the ring.
    assert same(taken.transfer_s, 3 * 8 * (12_347 / 4 + 3000) / 3e5)
    assert same(taken.latency_s, (1 + 3) * 0.017)
    assert same(taken.coding_s, 1009 / 4 * (4 * 7e-6 + 3e-5))
    assert same(taken.lag_s, 0.017)


@pytest.mark.parametrize("topology", ALL_TOPOLOGIES)
def test_one_of_a_thousand_pairs_is_a_gather_of_two(topology) -> None:
    pair, two = one_message(workers=1000, exchange="pairs"), one_message(workers=2)
    pair, two = replace(pair, topology=topology), replace(two, topology=topology)
    assert pair.transfer_time(0) == two.transfer_time(0) != one_message().transfer_time(0)
    assert pair.decode_s(0) == two.decode_s(0)


def test_a_link_that_falls_behind_slowly_is_found_out_and_the_bound_is_reached() -> None:
    fragments = Sequential(layers=1, offsets=At(steps=tuple(range(10))))
    sent = streaming(fragments, parameters=1000, layers=10, every=10, tau=5)
    scenario = plain(sent, 8 * 200 / 0.1001)
    assert simulate(scenario, steps=100).wait_s[:100] == [0] * 100
    assert same(steady_utilisation(scenario), 1 / 1.001)
    for rate in (1e5, 1.1e6, 1e9):
        # A whole round for each answer: compute and link each go on without the other.
        scenario = plain(streaming(every=10, tau=10), rate)
        round_s = simulate(scenario, steps=600).round_s
        assert same((round_s[-1] - round_s[-11]) / 10, least_round_s(scenario))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Link.of(math.nan), "a rate is above 0"),
        (lambda: Link(up_bits_per_s=1, down_bits_per_s=0), "a rate is above 0"),
        (lambda: Link.of(1, latency_s=-1), "a latency finite and not negative"),
        (lambda: Compute(step_s=math.nan), "step time above 0 s"),
        (lambda: Compute.of_flops(0, 1e6, 1e15, 0.5), "step time above 0 s"),
        *((lambda t=t: required_bandwidth(t, one_message()), "between 0 and 1") for t in (0, 1)),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, word: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot .*; because .*; do: ") as refused:
        make()
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rings_stars_packets_and_announcements_by_hand() -> None:
    link = Link(up_bits_per_s=8e3, down_bits_per_s=5e3, latency_s=0.3)
    # Around the ring, each of four hops waits for the one before; shards go directly.
    assert same(Ring().gather(700, 5, link).total_s, 4 * (0.3 + 8 * 700 / 5e3))
    assert same(Ring().gather(700, 5, link).lag_s, 0.3)  # the last hop's, in which the link is free
    assert same(Ring().scatter(700, 5, link).total_s, 0.3 + 4 * 8 * 700 / 5e3)
    link = Link(up_bits_per_s=80, down_bits_per_s=160, latency_s=1)
    assert Star().gather(10, 5, link).total_s == 1 + 1 + 1 + 2
    assert Star().scatter(10, 5, link).total_s == 1 + 4 + 1 + 2
    link, tcp = Link.of(8 * 1526, latency_s=0.5), OverTcp(late_s=0.25)
    # Two packets of 1448 bytes, each way: a second each, and their receiver is ready after 0.5 s.
    taken = tcp.gather(1448, 3, link)
    assert taken.total_s == 2 * 1 + 2 * 0.5 + 0.5 + 0.25
    assert taken.held_s == 2 * 1 + 0.5
    assert tcp.scatter(1448, 3, link).total_s == 2 * 1 + 0.5 + 0.5 + 0.25
