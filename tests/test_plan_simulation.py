"""The planner's simulation: against equations, against slow references, and its properties."""

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigurationError
from thinwire.fragments import At, Fragments, Sequential, Strided, Whole
from thinwire.plan.closed_form import least_round_s, wall_s
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.engine import LayerWise, StepWise
from thinwire.plan.ideal import IdealFreight, ideal_freight
from thinwire.plan.link import Link
from thinwire.plan.pace import DrawnSpeeds, Jitter, Pace, Paces, Speeds, Stragglers
from thinwire.plan.patience import Quorum
from thinwire.plan.presence import Churn, Presence
from thinwire.plan.required import grid_reading, required_bandwidth, steady_utilisation
from thinwire.plan.scenario import Scenario
from thinwire.plan.simulate import is_regular, simulate
from thinwire.plan.topology import Mesh, Once, Ring, Star, Topology, Tree

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RING_AND_OTHERS = [Ring(), Mesh(), Tree(), Star(), Star(hub_up_bits_per_s=5e5), Once()]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A message of any kind."""

    payload_nbytes: float = 12_347
    parameters: int = 1009
    offset: int = 0
    first: int = 1
    layers: tuple[int | None, ...] = (0,)
    result_nbytes: float = 0
    sent_nbytes: float = 12_347
    received_nbytes: float = 12_347
    vote_nbytes: float = 0
    exchange: str = "gather"


@dataclass(frozen=True, kw_only=True)
class Boxes:
    messages: tuple[Box, ...]
    sync_every: int = 7
    tau: int = 0
    workers: int = 3


def one_box(*, every: int = 7, tau: int = 0, workers: int = 3, **box: object) -> Scenario:
    message = Box(**{"first": every, **box})  # type: ignore[arg-type]
    return Scenario(
        freight=Boxes(messages=(message,), sync_every=every, tau=tau, workers=workers),
        compute=Compute(step_s=0.13),
        link=Link(up_bits_per_s=1e6, down_bits_per_s=3e5, latency_s=0.017),
        coding=Coding(
            encode_s_per_parameter=3e-5, decode_s_per_parameter=7e-6, outer_s_per_parameter=2e-6
        ),
    )


def streaming(
    fragments: Fragments | None = None, *, every: int = 10, tau: int = 1, workers: int = 2
) -> IdealFreight:
    return ideal_freight(
        Strided(layers=3) if fragments is None else fragments,
        parameters=70_001,
        layers=11,
        bits=16,
        sync_every=every,
        tau=tau,
        workers=workers,
    )


def plain(freight: IdealFreight | Boxes, rate: float = 1e6, latency_s: float = 0.0) -> Scenario:
    return Scenario(
        freight=freight, compute=Compute(step_s=0.1), link=Link.of(rate, latency_s=latency_s)
    )


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)


# -- against equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("topology", RING_AND_OTHERS, ids=repr)
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter", "pairs"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 13])
def test_a_run_without_overlap_takes_what_the_equation_says(topology, exchange, workers) -> None:
    scenario = one_box(exchange=exchange, workers=workers, result_nbytes=4001)
    scenario = replace(scenario, topology=topology)
    # Of an odd number one has no partner and does not wait.
    odd = exchange == "pairs" and workers % 2 and workers > 1
    assert is_regular(scenario) != odd
    for steps in (0, 1, 6, 7, 8, 97):
        found_s, most_s = simulate(scenario, steps=steps).wall_s, wall_s(scenario, steps=steps)
        assert found_s <= most_s * (1 + 1e-9) if odd else same(found_s, most_s)


@pytest.mark.parametrize("tau", [0, 1, 2, 6])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("rate", [1e4, 3e5, 1e9, math.inf])
def test_a_run_with_overlap_takes_what_the_equation_says(tau, offset, rate) -> None:
    scenario = one_box(tau=tau, offset=offset, first=offset or 7).at_rate(rate)
    for steps in (*range(1, 16), 97):
        assert same(simulate(scenario, steps=steps).wall_s, wall_s(scenario, steps=steps)), steps


@pytest.mark.parametrize("tau", [0, 1, 4])
def test_workers_of_different_speed_take_what_the_equation_says(tau) -> None:
    scenario = replace(one_box(tau=tau), pace=Speeds(of=(1, 0.7, 1.3)))
    assert not is_regular(scenario)
    for steps in (1, 7, 12, 97):
        assert same(simulate(scenario, steps=steps).wall_s, wall_s(scenario, steps=steps))


def test_the_equation_without_overlap_is_the_one_on_paper() -> None:
    scenario = one_box()
    hop_s = 0.017 + 8 * 12_347 / 3e5
    coding_s = 1009 * (3e-5 + 3 * 7e-6 + 2e-6)
    assert same(wall_s(scenario, steps=14), 14 * 0.13 + 2 * (2 * hop_s + coding_s))


@pytest.mark.parametrize(
    "change",
    [
        {"link": Link(up_bits_per_s=1e6, down_bits_per_s=3e5, latency_s=0.017001)},
        {"link": Link(up_bits_per_s=1e6, down_bits_per_s=3.0001e5, latency_s=0.017)},
        {"coding": Coding(encode_s_per_parameter=3.0001e-5)},
        {"compute": Compute(step_s=0.130001)},
        {"topology": Mesh()},
    ],
    ids=["latency", "rate", "coding", "step", "topology"],
)
def test_another_scenario_takes_another_time(change) -> None:
    scenario = one_box()
    other = replace(scenario, **change)
    assert not same(simulate(other, steps=97).wall_s, wall_s(scenario, steps=97))


@pytest.mark.parametrize(
    "scenario",
    [
        plain(streaming()),
        replace(one_box(), engine=LayerWise()),
        replace(one_box(), pace=Jitter(sigma=0.1)),
        replace(one_box(), presence=Churn(leave=0.1, come_back=0.1)),
        replace(one_box(), patience=Quorum(share=0.5)),
        one_box(tau=7),
        replace(one_box(exchange="pairs"), pace=Speeds(of=(1, 2, 3))),
    ],
)
def test_what_has_no_equation_is_refused(scenario) -> None:
    with pytest.raises(ConfigurationError, match=r"use thinwire\.plan\.simulate"):
        wall_s(scenario, steps=5)


# -- against slow references -----------------------------------------------------------------------


def paper_simulation(
    freight: IdealFreight, *, layers: int, step_s: float, rate: float, steps: int
) -> list[float]:
    """METHODS in forty lines: the time at the end of every step, node by node of each layer."""
    forward_s, backward_s = step_s / 3 / layers, 2 * step_s / 3 / layers
    now_s = free_s = 0.0
    needed: dict[tuple[int, int], float] = {}
    ends = []
    for step in range(1, steps + 1):
        for layer in range(layers):
            now_s = max(now_s, needed.pop((step, layer), 0.0)) + forward_s
        for layer in reversed(range(layers)):
            now_s += backward_s
            for message in freight.messages:
                due = (step - message.offset) % freight.sync_every == 0
                if due and step >= message.first and layer in message.layers:
                    bits = 8 * message.payload_nbytes / len(message.layers)
                    free_s = max(free_s, now_s) + bits / rate
                    needed[step + 1 + freight.tau, layer] = free_s
        ends.append(now_s)
    return ends


@pytest.mark.parametrize("rate", [3e4, 3e5, 3e6, 3e8])
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize(
    ("every", "fragments"),
    [
        (1, Whole()),
        (7, Whole()),
        (7, Strided(layers=3)),
        (7, Sequential(layers=2, offsets=At(steps=(0,) * 6))),
    ],
)
def test_layers_by_themselves_run_as_in_the_paper(rate, tau, fragments, every) -> None:
    freight = streaming(fragments, every=every, tau=tau)
    scenario = replace(plain(freight, rate), engine=LayerWise(), topology=Once())
    ends = paper_simulation(freight, layers=11, step_s=0.1, rate=rate, steps=5 * every)
    expected = [ends[every * (i + 1) - 1] for i in range(5)]
    assert simulate(scenario, steps=5 * every).round_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("engine", [StepWise(), LayerWise()])
@pytest.mark.parametrize("tau", [0, 2])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_one_clock_stands_for_all_of_equal_workers(engine, tau, workers) -> None:
    freight = streaming(tau=tau, workers=workers)
    scenario = replace(
        plain(freight, 2e6, 0.004), engine=engine, coding=Coding(encode_s_per_parameter=1e-7)
    )
    each = replace(scenario, patience=Quorum(share=1))
    assert is_regular(scenario)
    assert not is_regular(each)
    lone, crowd = (simulate(s, steps=47) for s in (scenario, each))
    for field in dataclasses.fields(lone):
        a, b = getattr(lone, field.name), getattr(crowd, field.name)
        if field.name == "seconds":
            a, b = dataclasses.astuple(a), dataclasses.astuple(b)
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12), field.name


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


def gather_sends(topology: Topology, workers: int):
    """Items are (origin, origin); hops below 0 do not wait for each other."""
    everyone = range(workers)
    if isinstance(topology, Ring):
        for hop in range(workers - 1):
            for w in everyone:
                yield hop, w, (w + 1) % workers, [((w - hop) % workers,) * 2]
    elif isinstance(topology, Mesh):
        for distance in range(1, workers):
            for w in everyone:
                yield -1, w, (w + distance) % workers, [(w, w)]
    else:
        for hop in range((workers - 1).bit_length()):
            count = min(2**hop, workers - 2**hop)
            for w in everyone:
                items = [((w - i) % workers,) * 2 for i in range(count)]
                yield hop, w, (w + 2**hop) % workers, items


def scatter_sends(topology: Topology, workers: int):
    everyone = range(workers)
    if isinstance(topology, Ring | Mesh):
        for distance in range(1, workers):
            for w in everyone:
                yield -1, w, (w + distance) % workers, [(w, (w + distance) % workers)]
        return
    for hop in range((workers - 1).bit_length()):
        for w in everyone:
            # Item (o, r) is at o plus the lower bits of its distance by now.
            items = [
                (o, (o + d) % workers)
                for d in everyone
                if d >> hop & 1
                for o in [(w - (d & (2**hop - 1))) % workers]
            ]
            yield hop, w, (w + 2**hop) % workers, items


@pytest.mark.parametrize("topology", [Ring(), Mesh(), Tree()], ids=repr)
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_topologies_take_as_long_as_their_messages(topology, workers) -> None:
    link = Link(up_bits_per_s=8e3, down_bits_per_s=5e3, latency_s=0.3)
    kinds = {
        "gather": (topology.gather, gather_sends),
        "scatter": (topology.scatter, scatter_sends),
    }
    for name, (crossing, sends) in kinds.items():
        plan = list(sends(topology, workers))
        seconds, held = carry(plan, workers=workers, nbytes=700, link=link)
        assert same(crossing(700, workers, link).total_s, seconds), name
        for w, mine in enumerate(held):
            others = set(range(workers)) - {w}
            wanted = {(o, o) if name == "gather" else (o, w) for o in others}
            assert wanted <= mine, name


def test_a_star_takes_as_long_as_its_slowest_wire() -> None:
    link = Link(up_bits_per_s=80, down_bits_per_s=160, latency_s=1)
    assert Star().gather(10, 5, link).total_s == 1 + 1 + 1 + 2
    narrow = Star(hub_up_bits_per_s=400, hub_down_bits_per_s=100)
    assert narrow.gather(10, 5, link).total_s == 1 + 4 + 1 + 4
    assert narrow.scatter(10, 5, link).total_s == 1 + 16 + 1 + 4
    assert narrow.swap(10, 5, link).total_s == 1 + 4 + 1 + 1


def test_a_reduction_is_a_scatter_the_owner_s_work_and_a_gather() -> None:
    scenario = one_box(workers=4, exchange="reduce_scatter", result_nbytes=3000)
    crossing = scenario.crossing(0, share=1, workers=4)
    # Shards go directly, results around the ring.
    assert same(crossing.transfer_s, 3 * 8 * (12_347 / 4 + 3000) / 3e5)
    assert same(crossing.latency_s, (1 + 3) * 0.017)
    assert same(crossing.coding_s, 1009 / 4 * (4 * 7e-6 + 3e-5))
    assert same(crossing.lag_s, 0.017)
    # Half as many workers have shards twice as large.
    fewer = scenario.crossing(0, share=1, workers=2)
    assert same(fewer.transfer_s, 8 * (12_347 / 2 + 6000) / 3e5)


def test_a_vote_is_one_more_gather() -> None:
    plain, voting = (one_box(workers=4, vote_nbytes=n) for n in (0, 90))
    before, after = (scenario.crossing(0, share=1, workers=4) for scenario in (plain, voting))
    assert same(after.total_s - before.total_s, 3 * (0.017 + 8 * 90 / 3e5))


# -- properties ------------------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    every = draw(st.sampled_from([1, 5, 12]))
    layers = draw(st.sampled_from([1, 3, 11]))
    freight = ideal_freight(
        Whole() if every < 4 else draw(st.sampled_from([Whole(), Strided(layers=3)])),
        parameters=draw(st.sampled_from([11, 1009, 100_003])),
        layers=layers,
        bits=draw(st.sampled_from([0.25, 4, 16])),
        sync_every=every,
        tau=draw(st.integers(0, min(3, every - 1))),
        workers=draw(st.sampled_from([1, 2, 3, 5])),
    )
    paces: list[Pace] = [Speeds(of=(1.0,) * freight.workers), Jitter(sigma=0.2)]
    return Scenario(
        freight=freight,
        compute=Compute(step_s=draw(st.floats(0.01, 2))),
        link=Link(
            up_bits_per_s=draw(st.floats(1e3, 1e7)),
            down_bits_per_s=draw(st.floats(1e3, 1e7)),
            latency_s=draw(st.sampled_from([0, 0.01, 0.7])),
        ),
        topology=draw(st.sampled_from(RING_AND_OTHERS)),
        engine=draw(st.sampled_from([StepWise(), LayerWise()])),
        coding=Coding(encode_s_per_parameter=draw(st.sampled_from([0, 1e-6]))),
        pace=draw(st.sampled_from(paces)),
    )


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), steps=st.integers(0, 40), factor=st.floats(1.01, 50))
def test_a_better_link_never_takes_longer(scenario, steps, factor) -> None:
    wall = simulate(scenario, steps=steps).wall_s
    link = scenario.link
    faster = replace(
        link,
        up_bits_per_s=factor * link.up_bits_per_s,
        down_bits_per_s=factor * link.down_bits_per_s,
    )
    later = replace(link, latency_s=link.latency_s + factor / 100)
    assert simulate(replace(scenario, link=faster), steps=steps).wall_s <= wall * (1 + 1e-12)
    assert simulate(replace(scenario, link=later), steps=steps).wall_s >= wall * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios(), factor=st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(scenario, factor) -> None:
    link, coding = scenario.link, scenario.coding
    hub = scenario.topology
    if isinstance(hub, Star):
        hub = Star(hub_up_bits_per_s=hub.hub_up_bits_per_s / factor)
    scaled = replace(
        scenario,
        compute=Compute(step_s=factor * scenario.compute.step_s),
        topology=hub,
        link=Link(
            up_bits_per_s=link.up_bits_per_s / factor,
            down_bits_per_s=link.down_bits_per_s / factor,
            latency_s=factor * link.latency_s,
        ),
        coding=Coding(encode_s_per_parameter=factor * coding.encode_s_per_parameter),
    )
    before, after = simulate(scenario, steps=31), simulate(scaled, steps=31)
    assert same(after.wall_s, factor * before.wall_s)
    assert same(after.utilisation, before.utilisation)


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), steps=st.integers(0, 40))
def test_a_link_carries_one_exchange_at_a_time_and_time_adds_up(scenario, steps) -> None:
    outcome = simulate(scenario, steps=steps, seed=3)
    for freed_s, begun_s in zip(outcome.freed_s, outcome.begun_s[1:], strict=False):
        assert begun_s >= freed_s
    assert len(outcome.wait_s) == steps + 1
    assert math.isclose(outcome.seconds.total_s, outcome.wall_s, rel_tol=1e-9)
    held_back_s = outcome.seconds.waiting_s
    if scenario.coding.encode_s_per_parameter == 0:
        assert math.isclose(sum(outcome.wait_s), held_back_s, rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_nothing_beats_the_bound(scenario) -> None:
    scenario = replace(scenario, pace=Speeds(of=(0.7,) * scenario.freight.workers))
    every = scenario.freight.sync_every
    compute_s = every * scenario.compute.step_s / 0.7
    assert steady_utilisation(scenario) <= compute_s / least_round_s(scenario) * (1 + 1e-9)
    # What is found in few rounds is what comes of many.
    round_s = simulate(scenario, steps=192 * every).round_s
    found = compute_s / steady_utilisation(scenario)
    assert found == pytest.approx((round_s[-1] - round_s[-65]) / 64, rel=1e-6)


def test_a_link_that_falls_behind_slowly_is_found_out() -> None:
    fragments = Sequential(layers=1, offsets=At(steps=tuple(range(10))))
    freight = ideal_freight(
        fragments, parameters=1000, layers=10, bits=8, sync_every=10, tau=5, workers=2
    )
    scenario = plain(freight, 8 * 100 / 0.1001)
    assert simulate(scenario, steps=100).wait_s[:100] == (0,) * 100
    assert same(steady_utilisation(scenario), 1 / 1.001)


@pytest.mark.parametrize("rate", [1e5, 1.1e6, 1e9])
def test_the_bound_is_reached_where_everything_overlaps(rate) -> None:
    # A whole round for each answer: compute and link each go on without the other.
    scenario = replace(plain(streaming(every=10, tau=10), rate), topology=Once())
    round_s = simulate(scenario, steps=600).round_s
    assert same((round_s[-1] - round_s[-11]) / 10, least_round_s(scenario))


def test_workers_alone_or_with_nothing_to_say_or_over_a_perfect_link_only_compute() -> None:
    alone = plain(streaming(workers=1), 1.0, latency_s=5)
    perfect = plain(streaming(), math.inf)
    silent = plain(Boxes(messages=(Box(payload_nbytes=0, layers=(None,)),)), 1.0)
    for scenario in (alone, perfect, silent):
        outcome = simulate(scenario, steps=33)
        assert outcome.utilisation == 1
        assert outcome.limit == "compute"
        assert same(outcome.wall_s, 3.3)
    assert simulate(alone, steps=33).sent_nbytes == 0
    late = replace(silent, link=Link.of(1.0, latency_s=0.1))
    assert simulate(late, steps=33).limit == "latency"  # no bytes, but an answer


def test_one_layer_by_itself_is_the_whole_step() -> None:
    freight = ideal_freight(
        Whole(), parameters=1009, layers=1, bits=16, sync_every=5, tau=1, workers=3
    )
    scenario = plain(freight, 1e5, 0.02)
    whole, layer = (
        simulate(replace(scenario, engine=engine), steps=23) for engine in (StepWise(), LayerWise())
    )
    assert layer.wall_s == pytest.approx(whole.wall_s, rel=1e-12)
    assert layer.begun_s == pytest.approx(whole.begun_s, rel=1e-12)


def test_the_last_hop_s_latency_does_not_hold_the_link() -> None:
    messages = (Box(first=1), Box(first=1))
    scenario = plain(Boxes(messages=messages, sync_every=1, workers=2), 8 * 12_347, latency_s=10)
    outcome = simulate(scenario, steps=1)
    assert outcome.begun_s == pytest.approx((0.1, 1.1))
    assert same(outcome.wall_s, 0.1 + 2 + 10)


def test_what_encoding_takes_comes_before_the_link_and_not_beside_it() -> None:
    messages = (Box(first=1), Box(first=1))
    scenario = plain(Boxes(messages=messages, sync_every=1, workers=2), 8 * 12_347)
    coding = Coding(encode_s_per_parameter=1 / 1009, decode_s_per_parameter=1 / 1009)
    # 0.1 train, 1 encode, then 1 send beside 1 encode, 1 send beside 2 decode, 2 decode.
    outcome = simulate(replace(scenario, coding=coding), steps=1)
    assert same(outcome.wall_s, 0.1 + 2 + 2 + 2)
    assert outcome.limit == "coding"


# -- workers that differ ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pace",
    [
        DrawnSpeeds(sigma=0.3),
        Jitter(sigma=0.3),
        Stragglers(probability=0.3, slowdown=4),
        Paces(of=(DrawnSpeeds(sigma=0.1), Stragglers(probability=0.1, slowdown=2))),
    ],
    ids=repr,
)
def test_the_same_seed_gives_the_same_run_and_another_one_another(pace) -> None:
    scenario = replace(
        plain(streaming(workers=7), 1e6), pace=pace, presence=Churn(leave=0.2, come_back=0.5)
    )
    one, again, other = (simulate(scenario, steps=60, seed=s) for s in (1, 1, 2))
    assert one == again
    assert one.wall_s != other.wall_s


def test_everyone_waits_for_the_slowest_unless_patience_ends() -> None:
    scenario = replace(one_box(workers=4).at_rate(math.inf), pace=Speeds(of=(1, 1, 1, 0.25)))
    scenario = replace(scenario, link=Link.of(math.inf), coding=Coding())
    waits, leaves = (
        simulate(s, steps=70) for s in (scenario, replace(scenario, patience=Quorum(share=0.75)))
    )
    assert same(waits.wall_s, 4 * 70 * 0.13)
    assert waits.limit == "slowest worker"
    assert same(waits.utilisation, (3 * 0.25 + 1) / 4)
    assert same(leaves.wall_s, 70 * 0.13)
    assert leaves.utilisation == 1
    # The slow one gets a quarter of its steps done.
    assert same(waits.worker_steps, 280)
    assert same(leaves.worker_steps, 3 * 70 + 70 / 4)


def test_who_is_left_out_has_computed_until_then() -> None:
    scenario = replace(one_box(workers=4), coding=Coding(), patience=Quorum(share=0.75))
    scenario = replace(scenario, pace=Speeds(of=(1, 1, 1, 0.25)))
    crossing_s = scenario.crossing(0, share=1, workers=4).total_s
    assert same(simulate(scenario, steps=70).utilisation, 0.91 / (0.91 + crossing_s))


def test_a_pair_is_everyone_of_two() -> None:
    scenario = replace(one_box(workers=2, tau=1), pace=Jitter(sigma=0.5), coding=Coding())
    pair = replace(one_box(workers=2, tau=1, exchange="pairs"), pace=scenario.pace, coding=Coding())
    assert simulate(pair, steps=70) == simulate(scenario, steps=70)


def test_pairs_wait_for_each_other_and_for_nobody_else() -> None:
    slow = Speeds(of=(1, 1, 1, 1, 1, 1, 1, 0.1))
    everyone = replace(one_box(workers=8), pace=slow, link=Link.of(math.inf), coding=Coding())
    pairs = replace(one_box(workers=8, exchange="pairs"), pace=slow, link=everyone.link)
    pairs = replace(pairs, coding=Coding())
    # After two rounds two at least have not met the slow one, nor anyone who has.
    assert (
        simulate(pairs, steps=14).seconds.slowest_s < simulate(everyone, steps=14).seconds.slowest_s
    )
    odd = replace(pairs, freight=replace(pairs.freight, workers=3), pace=Jitter(sigma=0.1))
    assert simulate(odd, steps=50).wall_s > 50 * 0.1


def test_pairs_cost_the_same_among_a_thousand_and_a_gather_does_not() -> None:
    def exchange_s(exchange: str, workers: int) -> float:
        scenario = one_box(exchange=exchange, workers=workers, result_nbytes=12_347 / workers)
        scenario = replace(scenario, topology=Mesh(), link=Link.of(1e6))
        return scenario.crossing(0, share=1, workers=workers).transfer_s

    assert same(exchange_s("pairs", 2), exchange_s("pairs", 1000))
    assert same(exchange_s("gather", 2) * 999, exchange_s("gather", 1000))
    assert exchange_s("reduce_scatter", 1000) < 2 * exchange_s("reduce_scatter", 2)


def test_a_gather_among_fewer_takes_less_and_who_left_is_noticed_once() -> None:
    scenario = replace(one_box(workers=3), coding=Coding(), link=Link.of(1e6))
    scenario = replace(scenario, presence=Churn(leave=1, come_back=0, notice=1000))
    outcome = simulate(scenario, steps=21)
    # Somebody stays: if all were to leave, nobody does.
    undisturbed = simulate(replace(scenario, presence=Churn(leave=0, come_back=0)), steps=21)
    # Steps without events are taken at once where workers are alike: the last bit may differ.
    assert outcome.round_s == pytest.approx(undisturbed.round_s, rel=1e-12)
    assert outcome.wait_s == pytest.approx(undisturbed.wait_s, rel=1e-12)
    assert outcome.sent_nbytes == undisturbed.sent_nbytes
    half = replace(scenario, presence=Churn(leave=0.5, come_back=0, notice=1000))
    ends = simulate(half, steps=21, seed=3)
    assert ends.wall_s > 1000
    assert ends.worker_steps < 63
    assert ends.received_nbytes < outcome.received_nbytes


class Calendar(Presence):
    """Who is there in which round, as given."""

    is_constant, notice_s, heal_s = False, 3.0, 50.0

    def __init__(self, *rounds: tuple[int, ...]) -> None:
        self._present = np.array(rounds, dtype=bool)

    def draw(self, rng, rounds, workers):
        assert self._present.shape == (rounds, workers)
        return self._present


@pytest.mark.parametrize("exchange", ["gather", "pairs"])
def test_leaving_is_noticed_and_healing_takes_time(exchange) -> None:
    scenario = one_box(workers=2, exchange=exchange)
    scenario = replace(scenario, coding=Coding(), presence=Calendar((1, 1), (0, 1), (1, 1)))
    crossing_s = scenario.crossing(0, share=1, workers=2).total_s
    outcome = simulate(scenario, steps=21)
    assert same(outcome.wall_s, 21 * 0.13 + 2 * crossing_s + 3 + 50)
    assert same(outcome.worker_steps, 35)
    # The one that stayed loses 3 s and 50 s; healing is no worker's time.
    worker_s = outcome.worker_steps * 0.13 + 4 * crossing_s + 53
    assert same(outcome.seconds.slowest_s / outcome.wall_s, 53 / worker_s)
    assert outcome.sent_nbytes == 2 * 12_347


def test_a_thousand_workers_for_a_thousand_rounds_take_seconds() -> None:
    freight = ideal_freight(
        Whole(), parameters=10**9, layers=1, bits=2, sync_every=30, workers=1000
    )
    scenario = replace(
        plain(freight, 1e9, 0.02),
        topology=Tree(),
        pace=Paces(of=(DrawnSpeeds(sigma=0.1), Jitter(sigma=0.1))),
        presence=Churn(leave=0.01, come_back=0.1),
    )
    outcome = simulate(scenario, steps=30_000)
    assert len(outcome.round_s) == 1000


# -- bytes -----------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_messages() -> None:
    boxes = (
        Box(first=7, sent_nbytes=5, received_nbytes=10, vote_nbytes=1),
        Box(first=7, offset=3, sent_nbytes=50, received_nbytes=100),
    )
    outcome = simulate(plain(Boxes(messages=boxes)), steps=15)
    # Due after 7 and 14 and left over; after 10 and left over.
    assert outcome.sent_nbytes == 3 * (5 + 1) + 2 * 50
    assert outcome.received_nbytes == 3 * (10 + 2) + 2 * 100
    assert outcome.peak_sent_nbytes_per_step == 50
    assert same(outcome.peak_bits_per_s, 8 * 50 / 0.1)
    together = (boxes[0], replace(boxes[1], offset=0))
    assert simulate(plain(Boxes(messages=together)), steps=15).peak_sent_nbytes_per_step == 55
    assert simulate(plain(Boxes(messages=boxes)), steps=0).sent_nbytes == 0


# -- what is required ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_required_rate_is_that_of_the_equation(target) -> None:
    scenario = replace(one_box(every=7), coding=Coding(), topology=Once())
    allowed_s = 7 * 0.13 * (1 / target - 1) - 0.017
    if allowed_s <= 0:
        assert required_bandwidth(target, scenario) == math.inf
        return
    found = required_bandwidth(target, scenario)
    assert math.isclose(found, 8 * 12_347 / allowed_s, rel_tol=1e-6)


def test_latency_and_coding_can_be_too_much_for_any_rate() -> None:
    scenario = one_box()
    assert required_bandwidth(0.999, scenario) == math.inf
    assert required_bandwidth(0.9, replace(scenario, freight=one_box(workers=1).freight)) == 0
    slow = replace(scenario, pace=Jitter(sigma=1))
    assert required_bandwidth(0.99, slow) == math.inf


def test_the_required_rate_reaches_the_target_and_a_smaller_one_does_not() -> None:
    scenario = replace(plain(streaming()), engine=LayerWise(), pace=Jitter(sigma=0.01))
    rate = required_bandwidth(0.9, scenario)
    assert steady_utilisation(scenario.at_rate(rate)) >= 0.9
    assert steady_utilisation(scenario.at_rate(rate / (1 + 1e-6))) < 0.9


def test_a_grid_is_read_below_the_point_that_reaches() -> None:
    grid = (1.0, 2.0, 4.0)
    assert [grid_reading(x, grid) for x in (0.5, 1, 1.5, 2, 2.1, 4)] == [1, 1, 1, 1, 2, 2]
    assert grid_reading(4.1, grid) == math.inf


# -- published figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "method", "column"),
    [
        ("1B", "Data-Parallel", 4),
        ("10B", "DiLoCo", 2),
        ("1B", "Streaming", 3),
        ("100B", "Streaming + overlap", 1),
        ("10B", "Streaming + overlap + FP4", 4),
    ],
)
def test_published_bandwidths(model, method, column, monkeypatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import streaming_table as table

    published = table.PUBLISHED[model][method][column]
    cell = table.cell(model, method, table.TARGETS[column], published)
    assert cell["grid_steps"] <= 1


def test_published_hours(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import muloco_wall_clock as clock

    rows = [
        clock.row(rate, method, clock.PUBLISHED_H[rate][method])
        for rate, method in [(10, "MuLoCo K=1"), (10, "DiLoCo K=16"), (6400, "MuLoCo K=16")]
    ]
    assert max(abs(row["off"]) for row in rows) <= clock.AT_MOST
    assert all(same(row["hours"], row["closed_form_hours"]) for row in rows)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link.of(0),
        lambda: Link.of(-1e6),
        lambda: Link.of(math.nan),
        lambda: Link(up_bits_per_s=1, down_bits_per_s=0),
        lambda: Link.of(1, latency_s=-1),
        lambda: Link.of(1, latency_s=math.nan),
        lambda: Star(hub_up_bits_per_s=0),
        lambda: Compute(step_s=0),
        lambda: Compute(step_s=math.nan),
        lambda: Compute(step_s=1, forward_share=1.1),
        lambda: Compute.of_flops(1e9, 1e6, 1e15, 1.5),
        lambda: Compute.of_flops(0, 1e6, 1e15, 0.5),
        lambda: Coding(encode_s_per_parameter=-1),
        lambda: Speeds(of=(1, 0)),
        lambda: replace(one_box(workers=3), pace=Speeds(of=(1, 1))),
        lambda: Jitter(sigma=-0.1),
        lambda: DrawnSpeeds(sigma=math.inf),
        lambda: Stragglers(probability=1.5, slowdown=2),
        lambda: Stragglers(probability=0.5, slowdown=0),
        lambda: Churn(leave=-0.1, come_back=0),
        lambda: Churn(leave=0, come_back=0, heal=math.inf),
        lambda: Quorum(share=0),
        lambda: Quorum(share=1.1),
        lambda: plain(Boxes(messages=())),
        lambda: plain(Boxes(messages=(Box(),), workers=0)),
        lambda: plain(Boxes(messages=(Box(),), tau=-1)),
        lambda: plain(Boxes(messages=(Box(exchange="smoke signals"),))),
        lambda: plain(Boxes(messages=(Box(payload_nbytes=-1),))),
        lambda: ideal_freight(Whole(), parameters=3, layers=4, bits=16, sync_every=1),
        lambda: required_bandwidth(1, one_box()),
        lambda: required_bandwidth(math.nan, one_box()),
        lambda: simulate(one_box(), steps=-1),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot .*; because .*; do: ") as refused:
        make()
    assert "\n" not in str(refused.value)


def test_a_long_round_takes_no_longer_to_simulate_than_its_events() -> None:
    scenario = one_box(every=10**6)
    began_s = time.perf_counter()
    outcome = simulate(scenario, steps=3 * 10**6)
    assert time.perf_counter() - began_s < 2.0
    assert outcome.compute_s == pytest.approx(3e6 * scenario.compute.step_s, rel=1e-12)
    assert len(outcome.wait_s) == 3 * 10**6 + 1
