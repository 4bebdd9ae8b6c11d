"""What is advised for a link reaches the target and can be pasted, or says what would reach it."""

import shlex
from dataclasses import replace

import pytest
import tyro

import thinwire as tw
from thinwire import presets
from thinwire.cli.command import COMMANDS
from thinwire.errors import ConfigurationError
from thinwire.plan.advice import _Search, advise
from thinwire.plan.advice_text import advice_cells, advice_notes, command_line, pasted_lines
from thinwire.plan.bucket_price import BucketPrice
from thinwire.plan.choice import INTERVALS, Choice, choices
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.money import Prices, bill
from thinwire.plan.required import steady_utilisation
from thinwire.plan.shape import Shape
from thinwire.plan.topology import TOPOLOGIES


def job(parameters=400e6, layers=24, workers=4, bits_per_s=1e8, **fields) -> Job:
    fields = {"compute": Compute(step_s=1), "link": Link.of(bits_per_s, latency_s=0.05), **fields}
    return Job(shape=Shape.of_size(int(parameters), layers), workers=workers, **fields)


def test_every_choice_is_the_same_on_a_command_line_and_in_python():
    for parameters in (1000, 400e6, 70e9):
        for choice in choices(parameters):
            choice = replace(choice, sync_every=40) if choice.has_rounds else choice
            typed = replace(presets.from_text(choice.text), name="same")
            written = replace(eval(choice.python, {"tw": tw}), name="same")
            assert typed == written


def busy(planned: Job, choice: Choice) -> float:
    """By the planner's own account, at the part of the rate that hidden exchanges may count on."""
    link = planned.link
    if choice.tau is not None:
        link = Link.of(0.85 * link.up_bits_per_s, latency_s=link.latency_s)
    sent = planned.traffic(choice.method())
    return steady_utilisation(replace(planned, link=link).scenario(sent))


@pytest.mark.parametrize("workers", [2, 4, 9])
@pytest.mark.parametrize("bits_per_s", [2e7, 1e8, 1e9, 1e12])
def test_what_is_advised_reaches_the_target_by_the_planner_s_own_account(workers, bits_per_s):
    planned = job(workers=workers, bits_per_s=bits_per_s)
    advice = advise(planned, target=0.9)
    assert advice.recommended
    assert (advice.changes, advice.closest) == ((), None)
    for found in advice.recommended:
        assert busy(planned, found.choice) == found.forecast.utilisation >= 0.9
    middles = [found.estimate.loss.middle for found in advice.recommended]
    assert middles == sorted(middles)
    assert len({found.choice.preset for found in advice.recommended}) == len(middles)


def test_what_is_sent_in_rounds_of_another_length_is_what_the_planner_says():
    planned = job(parameters=10_007, layers=5, workers=5)
    search = _Search(planned, 0.9, None)
    for choice in search.choices:
        if choice.has_rounds:
            choice = replace(choice, sync_every=40)
            found = search._traffic(choice)
            assert found is None or found == planned.traffic(choice.method())


def test_no_shorter_round_of_those_tried_reaches_the_target():
    planned = job()
    for found in advise(planned).recommended:
        choice = found.choice
        before = INTERVALS[INTERVALS.index(choice.sync_every) - 1]
        shorter = replace(choice, sync_every=before)
        assert busy(planned, shorter) < 0.9


def test_hidden_exchanges_count_on_a_part_of_the_rate_and_say_so():
    planned = job()
    advice = advise(planned)
    hidden = [found for found in advice.recommended if found.choice.tau]
    assert hidden, "nothing hides its exchanges: the test is void"
    full = planned.scenario(planned.traffic(hidden[0].choice.method()))
    assert steady_utilisation(full) >= hidden[0].forecast.utilisation
    assert any("15 % of the rate is kept" in note for note in advice_notes(advice))


def test_on_a_link_as_fast_as_memory_data_parallelism_is_among_the_advice():
    # Latency alone would still be too long.
    link = Link.of(1e15)
    found = advise(job(bits_per_s=1, workers=2, link=link)).recommended
    assert "ddp" in [one.choice.preset for one in found]


def test_what_would_have_to_change_does_change_it():
    slow = job(bits_per_s=1e6)
    advice = advise(slow)
    assert advice.recommended == ()
    assert advice.closest is not None
    changes = {change.quantity: change for change in advice.changes}
    assert {"bandwidth", "sync-every"} <= set(changes)
    rate = changes["bandwidth"].value
    assert advise(replace(slow, link=Link.of(rate * 1.01, latency_s=0.05))).recommended
    assert not advise(replace(slow, link=Link.of(rate * 0.9, latency_s=0.05))).recommended
    longer = changes["sync-every"]
    assert busy(slow, longer.choice) >= 0.9
    many = job(workers=64, bits_per_s=1e7)
    fewer = {change.quantity: change for change in advise(many).changes}["workers"]
    assert advise(replace(many, workers=int(fewer.value))).recommended


def test_a_link_that_nothing_helps_says_so_without_an_error():
    # Every exchange takes a day of latency.
    advice = advise(job(workers=2, link=Link.of(1e9, latency_s=1e6)), target=0.9)
    assert advice.recommended == ()
    assert list(advice_notes(advice))


def test_h_of_the_user_is_kept_and_short_runs_have_ten_rounds():
    for found in advise(job(sync_every=64)).recommended:
        assert found.forecast.sync_every_steps in (64, 1)
    short = job(tokens_per_step=1000, tokens=4 * 1000 * 200)  # 200 steps
    for found in advise(short, target=0.5).recommended:
        assert found.forecast.sync_every_steps <= 20


def test_methods_that_cannot_be_run_are_not_advised():
    def only_streaming(method):
        if not method.name.startswith("streaming"):
            raise ConfigurationError("run it", because="of the test", do="nothing")

    found = advise(job(), usable=only_streaming).recommended
    assert {one.choice.preset for one in found} == {"streaming_diloco", "streaming_muloco"}


@pytest.mark.parametrize("accelerators", [1, 8])
@pytest.mark.parametrize("price", [None, BucketPrice(egress_per_gb=0.09)])
@pytest.mark.parametrize("bits_per_s", [1e8, 1e15])
def test_lines_that_are_pasted_are_read_by_the_command_line(accelerators, price, bits_per_s):
    topology = TOPOLOGIES["ring" if price is None else "star"]
    planned = job(bits_per_s=bits_per_s, price=price, topology=topology)
    advice = advise(planned)
    lines = list(
        pasted_lines(advice, lambda c: command_line(c, planned, accelerators=accelerators))
    )
    assert len(lines) == 2 * len(advice.recommended)
    for line in lines[::2]:
        words = shlex.split(line)
        name, *arguments = words[words.index("thinwire") + 1 :]
        read = repr(tyro.cli(COMMANDS[name], args=arguments))
        assert arguments[arguments.index("--method") + 1] in read
    for line in lines[1::2]:
        assert isinstance(eval(line.partition("= ")[2], {"tw": tw}), tw.Method)


def test_bills_add_up():
    prices = Prices(currency="EUR", worker_per_hour=2, traffic_per_gb=0.5)
    planned = job(prices=prices, tokens_per_step=1000, tokens=4_000_000)
    (first, *_) = advise(planned).recommended
    costs = bill(first.forecast, planned)
    assert costs.is_of_run
    assert costs.worker_hours == pytest.approx(4 * first.forecast.wall_s / 3600)
    busy_hours = 4 * first.forecast.steps * planned.compute.step_s / 3600
    assert costs.waiting_hours == pytest.approx(costs.worker_hours - busy_hours)
    traffic = 4 * first.forecast.received_bytes
    assert costs.cost == pytest.approx(2 * costs.worker_hours + 0.5 * traffic / 1e9)
    daily = bill(replace(first.forecast, wall_s=None), planned)
    assert daily.hours == 24
    assert advice_cells(advise(planned), planned)[0][-2] != "-"
