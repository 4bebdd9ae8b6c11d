"""The planner's simulation and its links: against equations, slow references, and properties."""

import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_scenarios import message, one_message, plain, same, streaming, traffic_of
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


def check_wall(scenario: Scenario, *, steps: int) -> None:
    """Seconds of a run of one message and tau < H, by an equation.

        wall = S s + n (encode + decode) + (n - 1) max(0, D - tau s) + max(0, D - r s) + rest
        D    = all that the exchange takes

    n times the message is due; r = min(tau, S - the last of these steps); rest = encode + D +
    decode if steps come after the last, else 0.
    """
    sent, step_s = scenario.traffic, scenario.compute.step_s
    every, (box,) = sent.sync_every, sent.messages
    exchange_s = scenario.transfer_time(0).total_s
    coding_s = scenario.encode_s(0) + scenario.decode_s(0)
    first, last = box.first_due(sync_every=every), box.last_due(steps, sync_every=every)
    wall = steps * step_s
    if last:
        wall += (last - first) // every * max(0.0, exchange_s - sent.tau * step_s)
        wall += max(0.0, exchange_s - min(sent.tau, steps - last) * step_s)
        wall += ((last - first) // every + 1) * coding_s
    wall += coding_s + exchange_s if last < steps else 0.0
    assert same(simulate(scenario, steps=steps).wall_s, wall), steps


WITHOUT = [
    {"exchange": exchange, "workers": workers, "result_nbytes": 4001}
    for exchange in ("gather", "reduce_scatter", "pairs")
    for workers in (1, 2, 3, 8, 13)
]
WITH = [{"tau": t, "offset": o, "first": o or 7} for t in (0, 1, 2, 6) for o in (0, 3)]


@pytest.mark.parametrize("fields", [*WITHOUT, *WITH])
def test_a_run_takes_what_the_equation_says(fields) -> None:
    scenario = one_message(**fields)
    rated = [scenario.at_rate(rate) for rate in (1e4, 3e5, 1e9, math.inf)]
    over = [replace(scenario, topology=topology) for topology in ALL_TOPOLOGIES]
    for one in rated if "tau" in fields else over:
        for steps in (*range(16), 97):
            check_wall(one, steps=steps)


def test_the_equation_without_overlap_is_the_one_on_paper() -> None:
    scenario = one_message()
    hop_s = 0.017 + 8 * 12_347 / 3e5
    coding_s = 1009 * (3e-5 + 3 * 7e-6 + 2e-6)
    assert same(simulate(scenario, steps=14).wall_s, 14 * 0.13 + 2 * (2 * hop_s + coding_s))


@pytest.mark.parametrize(
    "change",
    [
        {"link": Link(up_bits_per_s=1e6, down_bits_per_s=3e5, latency_s=0.017001)},
        {"link": Link(up_bits_per_s=1e6, down_bits_per_s=3.0001e5, latency_s=0.017)},
        {"compute": replace(one_message().compute, encode_s_per_parameter=3.0001e-5)},
        {"compute": replace(one_message().compute, step_s=0.130001)},
        {"topology": Star()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_scenario_takes_another_time(change) -> None:
    scenarios = one_message(), replace(one_message(), **change)
    before, after = (simulate(scenario, steps=97).wall_s for scenario in scenarios)
    assert not same(before, after)


def step_by_step(scenario: Scenario, *, steps: int) -> list[float]:
    """The time at the end of every step, once what is due was encoded."""
    sent = scenario.traffic
    now_s = free_s = 0.0
    answers: list[tuple[int, int, float]] = []  # step that needs it, message, when it is there
    ends = []
    for step in range(1, steps + 1):
        for needed, index, done_s in list(answers):
            if needed == step:
                now_s = max(now_s, done_s) + scenario.decode_s(index)
                answers.remove((needed, index, done_s))
        now_s += scenario.compute.step_s
        for index, box in enumerate(sent.messages):
            if step >= box.first and (step - box.offset) % sent.sync_every == 0:
                now_s += scenario.encode_s(index)
                taken = scenario.transfer_time(index)
                free_s = max(now_s, free_s) + taken.held_s
                answers.append((step + 1 + sent.tau, index, free_s + taken.lag_s))
        ends.append(now_s)
    return ends


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
    ends = step_by_step(scenario, steps=8 * every)
    assert simulate(scenario, steps=8 * every).round_s == pytest.approx(
        ends[every - 1 :: every], rel=1e-12
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    every = draw(st.sampled_from([1, 5, 12]))
    sizes = {"parameters": [11, 1009, 100_003], "layers": [1, 3, 11], "workers": [1, 2, 3, 5]}
    sent = streaming(
        Whole() if every < 4 else draw(st.sampled_from([Whole(), Strided(layers=3)])),
        every=every,
        tau=draw(st.integers(0, min(3, every - 1))),
        **{name: draw(st.sampled_from(values)) for name, values in sizes.items()},
    )
    up, down, latency_s = draw(
        st.tuples(st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.sampled_from([0, 0.01, 0.7]))
    )
    return Scenario(
        traffic=sent,
        compute=Compute(
            step_s=draw(st.floats(0.01, 2)),
            encode_s_per_parameter=draw(st.sampled_from([0, 1e-6])),
        ),
        link=Link(up_bits_per_s=up, down_bits_per_s=down, latency_s=latency_s),
        topology=draw(st.sampled_from(ALL_TOPOLOGIES)),
    )


@settings(max_examples=60)
@given(scenario=scenarios(), steps=st.integers(0, 40), factor=st.floats(1.01, 50))
def test_time_adds_up_and_a_better_link_never_takes_longer(scenario, steps, factor) -> None:
    found, link = simulate(scenario, steps=steps), scenario.link
    # A link carries one exchange at a time.
    for freed_s, begun_s in zip(found.freed_s, found.begun_s[1:], strict=False):
        assert begun_s >= freed_s
    assert len(found.wait_s) == steps + 1
    assert math.isclose(found.seconds.total_s, found.wall_s, rel_tol=1e-9)
    if scenario.compute.encode_s_per_parameter == 0:
        held_back_s = found.seconds.waiting_s
        assert math.isclose(sum(found.wait_s), held_back_s, rel_tol=1e-9, abs_tol=1e-9)
    up, down = factor * link.up_bits_per_s, factor * link.down_bits_per_s
    faster = replace(link, up_bits_per_s=up, down_bits_per_s=down)
    later = replace(link, latency_s=link.latency_s + factor / 100)
    less, more = (simulate(replace(scenario, link=its), steps=steps) for its in (faster, later))
    assert less.wall_s <= found.wall_s * (1 + 1e-12)
    assert more.wall_s >= found.wall_s * (1 - 1e-12)


@settings(max_examples=40)
@given(scenario=scenarios(), factor=st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(scenario, factor) -> None:
    link, topology = scenario.link, scenario.topology
    if isinstance(topology, OverTcp):
        topology = replace(topology, late_s=factor * topology.late_s)
    up, down = link.up_bits_per_s / factor, link.down_bits_per_s / factor
    encode_s = factor * scenario.compute.encode_s_per_parameter
    scaled = replace(
        scenario,
        compute=Compute(step_s=factor * scenario.compute.step_s, encode_s_per_parameter=encode_s),
        topology=topology,
        link=Link(up_bits_per_s=up, down_bits_per_s=down, latency_s=factor * link.latency_s),
    )
    before, after = simulate(scenario, steps=31), simulate(scaled, steps=31)
    assert same(after.wall_s, factor * before.wall_s)
    assert same(after.seconds.utilisation, before.seconds.utilisation)


@settings(max_examples=40)
@given(scenario=scenarios())
def test_nothing_beats_the_bound(scenario) -> None:
    every = scenario.traffic.sync_every
    compute_s = every * scenario.compute.step_s
    assert steady_utilisation(scenario) <= compute_s / least_round_s(scenario) * (1 + 1e-9)
    # What is found in few rounds holds for many.
    round_s = simulate(scenario, steps=192 * every).round_s
    found = compute_s / steady_utilisation(scenario)
    assert found == pytest.approx((round_s[-1] - round_s[-65]) / 64, rel=1e-6)


def test_workers_alone_or_with_nothing_to_say_or_over_a_perfect_link_only_compute() -> None:
    silent = plain(traffic_of(message(payload_nbytes=0)), 1.0)
    alone, perfect = plain(streaming(workers=1), 1.0, latency_s=5), plain(streaming(), math.inf)
    for scenario in (alone, perfect, silent):
        found = simulate(scenario, steps=33)
        assert (found.seconds.utilisation, found.seconds.limit) == (1, "compute")
        assert same(found.wall_s, 3.3)
    late = replace(silent, link=Link.of(1.0, latency_s=0.1))
    assert simulate(late, steps=33).seconds.limit == "latency"  # no bytes, but an answer


def test_the_last_hop_s_latency_does_not_hold_the_link_and_encoding_comes_before_it() -> None:
    scenario = plain(traffic_of(message(), message(), every=1, workers=2), 8 * 12_347, latency_s=10)
    found = simulate(scenario, steps=1)
    assert found.begun_s == pytest.approx((0.1, 1.1))
    assert same(found.wall_s, 0.1 + 2 + 10)
    coded = replace(scenario.compute, encode_s_per_parameter=1 / 1009)
    coded = replace(coded, decode_s_per_parameter=1 / 1009)
    # 0.1 train, 1 encode, then 1 send beside 1 encode, 1 send beside 2 decode, 2 decode.
    found = simulate(replace(scenario, compute=coded, link=Link.of(8 * 12_347)), steps=1)
    assert same(found.wall_s, 0.1 + 2 + 2 + 2)
    assert found.seconds.limit == "coding"


def test_a_long_round_takes_no_longer_to_simulate_than_its_events() -> None:
    scenario = one_message(every=10**6)
    began_s = time.process_time()
    found = simulate(scenario, steps=3 * 10**6)
    assert time.process_time() - began_s < 2.0
    assert found.seconds.compute_s == pytest.approx(3e6 * scenario.compute.step_s, rel=1e-12)
    assert len(found.wait_s) == 3 * 10**6 + 1


def test_a_reduction_is_a_scatter_the_owner_s_work_and_a_gather() -> None:
    scenario = one_message(workers=4, exchange="reduce_scatter", result_nbytes=3000)
    taken = scenario.transfer_time(0)
    # Shards go directly, results around the ring.
    assert same(taken.transfer_s, 3 * 8 * (12_347 / 4 + 3000) / 3e5)
    assert same(taken.latency_s, (1 + 3) * 0.017)
    assert same(taken.coding_s, 1009 / 4 * (4 * 7e-6 + 3e-5))
    assert same(taken.lag_s, 0.017)


def test_pairs_cost_the_same_among_a_thousand_and_a_gather_does_not() -> None:
    def exchange_s(exchange: str, workers: int) -> float:
        scenario = one_message(exchange=exchange, workers=workers, result_nbytes=12_347 // workers)
        return replace(scenario, link=Link.of(1e6)).transfer_time(0).transfer_s

    assert same(exchange_s("pairs", 2), exchange_s("pairs", 1000))
    assert same(exchange_s("gather", 2) * 999, exchange_s("gather", 1000))
    assert exchange_s("reduce_scatter", 1000) < 2 * exchange_s("reduce_scatter", 2)
    for topology in ALL_TOPOLOGIES:
        both = (one_message(workers=2, tau=1, exchange=e) for e in ("pairs", "gather"))
        pair, gather = (simulate(replace(s, topology=topology), steps=70) for s in both)
        assert pair == gather


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


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_required_rate_is_that_of_the_equation(target) -> None:
    scenario = replace(one_message(workers=2), compute=Compute(step_s=0.13))
    allowed_s = 7 * 0.13 * (1 / target - 1) - 0.017
    expected = 8 * 12_347 / allowed_s if allowed_s > 0 else math.inf
    assert required_bandwidth(target, scenario) == pytest.approx(expected, rel=1e-6)
    # It reaches the target and a smaller one does not.
    scenario = plain(streaming())
    rate = required_bandwidth(0.9, scenario)
    assert steady_utilisation(scenario.at_rate(rate)) >= 0.9
    assert steady_utilisation(scenario.at_rate(rate / (1 + 1e-6))) < 0.9
    # Latency and coding can be too much for any.
    assert required_bandwidth(0.999, one_message()) == math.inf
    alone = one_message(workers=1).traffic
    assert required_bandwidth(0.9, replace(one_message(), traffic=alone)) == 0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        *((lambda r=r: Link.of(r), "a rate is above 0") for r in (0, math.nan)),
        (lambda: Link(up_bits_per_s=1, down_bits_per_s=0), "a rate is above 0"),
        *(
            (lambda s=s: Link.of(1, latency_s=s), "a latency finite and not negative")
            for s in (-1, math.nan)
        ),
        *((lambda s=s: Compute(step_s=s), "step time above 0 s") for s in (0, math.nan)),
        (lambda: Compute.of_flops(0, 1e6, 1e15, 0.5), "step time above 0 s"),
        *((lambda t=t: required_bandwidth(t, one_message()), "between 0 and 1") for t in (0, 1)),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, word: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot .*; because .*; do: ") as refused:
        make()
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)


Item = tuple[int, int]  # origin, receiver


def carry(sends, *, workers: int, nbytes: float, link: Link) -> tuple[float, list[set[Item]]]:
    """Message by message: (hop, from, to, items) in order; a hop waits for the one before it."""
    up_free, down_free = [0.0] * workers, [0.0] * workers
    came: dict[tuple[int, Item], float] = {}
    received_s = [0.0] * workers  # of the hop before
    for hop, group in itertools.groupby(sends, key=lambda send: send[0]):
        arrivals = list(received_s)
        for _, source, target, items in group:
            ready = max([came.get((source, item), 0.0) for item in items], default=0.0)
            ready = max(ready, received_s[source] if hop >= 0 else 0.0)
            begin = max(up_free[source], down_free[target], ready)
            end = begin + len(items) * link.seconds(nbytes)
            up_free[source] = down_free[target] = end
            for item in items:
                came[target, item] = end + link.latency_s
            arrivals[target] = max(arrivals[target], end + link.latency_s)
        received_s = arrivals
    held = [{item for (worker, item) in came if worker == w} for w in range(workers)]
    return max(came.values()), held


def passed_on(workers: int):
    """Around the ring; items are (origin, origin)."""
    for hop, w in itertools.product(range(workers - 1), range(workers)):
        yield hop, w, (w + 1) % workers, [((w - hop) % workers,) * 2]


def direct(workers: int):
    """Each to its receiver; hops below 0 do not wait for each other."""
    for distance, w in itertools.product(range(1, workers), range(workers)):
        yield -1, w, (w + distance) % workers, [(w, (w + distance) % workers)]


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_a_ring_takes_as_long_as_its_messages(workers) -> None:
    link = Link(up_bits_per_s=8e3, down_bits_per_s=5e3, latency_s=0.3)
    for taken, sends in ((Ring().gather, passed_on), (Ring().scatter, direct)):
        seconds, held = carry(sends(workers), workers=workers, nbytes=700, link=link)
        assert same(taken(700, workers, link).total_s, seconds)
        for w, mine in enumerate(held):
            others = set(range(workers)) - {w}
            assert {(o, o) if sends is passed_on else (o, w) for o in others} <= mine


def test_a_star_takes_two_hops_and_packets_and_announcements_come_on_top_by_hand() -> None:
    link = Link(up_bits_per_s=80, down_bits_per_s=160, latency_s=1)
    assert Star().gather(10, 5, link).total_s == 1 + 1 + 1 + 2
    assert Star().scatter(10, 5, link).total_s == 1 + 4 + 1 + 2
    link, tcp = Link.of(8 * 1526, latency_s=0.5), OverTcp(late_s=0.25)
    # Two packets of 1448 bytes, each way: a second each, and their receiver is ready after 0.5 s.
    taken = tcp.gather(1448, 3, link)
    assert taken.total_s == 2 * 1 + 2 * 0.5 + 0.5 + 0.25
    assert taken.held_s == 2 * 1 + 0.5
    assert tcp.scatter(1448, 3, link).total_s == 2 * 1 + 0.5 + 0.5 + 0.25
    assert OverTcp(over=Star()).gather(1448, 3, link).total_s == 1 + 2 + 2 * 0.5 + 0.5


def test_large_packets_are_those_of_the_bare_link() -> None:
    link = Link.of(1e6)
    for topology in (Ring(), Star()):
        bare = topology.gather(10**6, 4, link).total_s
        large = OverTcp(over=topology, packet_nbytes=10**12).gather(10**6, 4, link).total_s
        assert large == pytest.approx(bare, rel=1e-9)
        assert OverTcp(over=topology).gather(10**6, 4, link).total_s > 1.05 * bare
    assert math.isclose(OverTcp().gather(1e9, 2, Link.of(math.inf)).total_s, 0)
