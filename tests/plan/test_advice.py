"""What is advised for a link reaches the target and can be pasted, or says what would reach it."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

import thinwire as tw
from thinwire import presets
from thinwire.errors import ConfigurationError
from thinwire.plan import advice as planner
from thinwire.plan.advice import (
    INTERVALS,
    LOSSES,
    NO_EXCHANGE_LOSS,
    Choice,
    advise,
    choices,
)
from thinwire.plan.compute import Compute
from thinwire.plan.forecast import bill, forecast
from thinwire.plan.job import Job
from thinwire.plan.link import Link, Star
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import steady_utilisation


def job(parameters=400e6, layers=24, workers=4, bits_per_s=1e8, **fields) -> Job:
    fields = {"compute": Compute(step_s=1), "link": Link.of(bits_per_s, latency_s=0.05), **fields}
    return Job(shape=Shape.of_size(int(parameters), layers), workers=workers, **fields)


def busy(planned: Job, choice: Choice) -> float:
    """By the planner's own account, at the part of the rate that hidden exchanges may count on."""
    link = planned.link
    if choice.tau is not None:
        link = Link.of(0.85 * link.up_bits_per_s, latency_s=link.latency_s)
    sent = planned.traffic(choice.method())
    return steady_utilisation(replace(planned, link=link).scenario(sent))


def test_losses_are_those_of_their_arms():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    rows = json.loads((results / "claims-small.json").read_text())["rows"]
    losses = {arm: row["val_loss_by_seed"] for arm, row in rows.items()}
    none = "no exchange but a mean at the end"
    for share, arm in (*LOSSES.values(), (NO_EXCHANGE_LOSS, none)):
        # Of the same seeds: some arms have more.
        seeds = losses[arm].keys() & losses["ddp"].keys()
        found, base = (mean(losses[each][seed] for seed in seeds) for each in (arm, "ddp"))
        assert share == round(found / base - 1, 4)
    assert {name.partition(":")[0] for name in LOSSES} == set(presets.names())


def test_what_loses_as_much_as_no_exchange_is_never_advised(monkeypatch):
    assert "decoupled_momentum" not in {choice.preset for choice in choices(400e6)}
    monkeypatch.setattr(planner, "LOSSES", LOSSES | {"sparseloco:density=1/64": (0.48, "")})
    found = {choice.text for choice in choices(400e6)}
    assert "sparseloco:density=1/64" not in found
    assert "sparseloco:density=1/32" in found


def test_every_choice_is_the_same_on_a_command_line_in_python_and_for_the_planner():
    planned = job(parameters=10_007, layers=5, workers=5)
    search = planner._Search(planned, 0.9, lambda method: None)
    for choice in (*search.choices, *choices(1000), *choices(400e6), *choices(70e9)):
        choice = replace(choice, sync_every=40) if choice.has_rounds else choice
        typed = replace(presets.from_text(choice.text), name="same")
        assert typed == replace(eval(choice.python, {"tw": tw}), name="same")
    for choice in search.choices:
        if choice.has_rounds:
            choice = replace(choice, sync_every=40)
            found = search._traffic(choice)
            assert found is None or found == planned.traffic(choice.method())


@pytest.mark.filterwarnings("error")  # as of one bit, whose owners lose much of a mean
def test_owners_encode_again_only_by_codes_that_were_measured_so_and_more_than_two() -> None:
    owned = {choice.coded for choice in choices(400e6) if choice.exchange == "reduce_scatter"}
    assert owned == {name for name in LOSSES if name.endswith(OWNED)}
    assert "muloco:bits=1" + OWNED not in owned
    for workers, wanted in ((2, False), (8, True), (64, True)):
        (first, *_) = advise(job(workers=workers, parameters=1e9, bits_per_s=2e8)).recommended
        assert first.choice.preset == "muloco"
        assert (first.choice.exchange == "reduce_scatter") == wanted
        search = planner._Search(job(workers=workers), 0.9, lambda _: None)
        for choice in search.choices:
            if (sent := search._traffic(choice)) and choice.exchange != "reduce_scatter":
                patterns = {message.exchange for message in sent.messages}
                is_code = choice.bits or choice.density or choice.preset == "streaming_muloco"
                assert not (is_code and "reduce_scatter" in patterns)


def test_data_parallelism_is_advised_on_a_link_as_fast_as_memory():
    recommended = advise(job(workers=2, bits_per_s=1e12), target=0.9).recommended
    assert "ddp" in {found.choice.preset for found in recommended}


# Parameters, layers, workers, step, Mbit/s and ms one way, as in benchmarks/advice_check.py; the
# first advice and the bytes that a worker receives in a round.
OWNED = ":exchange=reduce_scatter"
SITUATIONS = [
    (50e6, 12, 2, 4.0, 20, 30, "muloco:bits=2:sync_every=15", 12_597_728),
    (150e6, 12, 4, 1.0, 10, 50, "sparseloco:density=1/128:sync_every=40", 5_273_643),
    (1e9, 24, 8, 2.0, 200, 60, f"muloco:parameters=1e9:bits=2:sync_every=100{OWNED}", 441_387_296),
    (10e9, 48, 2, 0.8, 10_000, 50, "muloco:parameters=10e9:bits=2:sync_every=30", 2_519_531_320),
    (70e9, 80, 2, 10.0, 10_000, 40, "muloco:bits=2:sync_every=15", 17_636_718_816),
]


@pytest.mark.parametrize(
    ("n", "layers", "workers", "step_s", "mbit", "ms", "text", "nbytes"), SITUATIONS
)
def test_situations_by_arithmetic(n, layers, workers, step_s, mbit, ms, text, nbytes):
    link, compute = Link.of(mbit * 1e6, latency_s=ms / 1e3), Compute(step_s=step_s)
    planned = job(n, layers, workers, compute=compute, link=link)
    advice = advise(planned, target=0.9)
    assert (advice.changes, advice.closest) == ((), None)
    for found in advice.recommended:
        assert busy(planned, found.choice) == found.forecast.utilisation >= 0.9
    losses = [found.choice.loss_share for found in advice.recommended]
    assert losses == sorted(losses)
    advised = {found.choice.preset for found in advice.recommended}
    assert len(advised) == len(losses)
    assert "ddp" not in advised
    (first, *_) = advice.recommended
    found = (first.choice.text, first.forecast.down_bytes_per_round)
    assert found == (text, nbytes)
    # A gather is K - 1 messages, and owners have had all shards at once before theirs.
    latencies = workers - 1 + text.endswith(OWNED)
    exchange_s = latencies * ms / 1e3 + 8 * nbytes / (mbit * 1e6)

    def share(every: int) -> float:
        return every * step_s / (every * step_s + exchange_s)

    every = first.choice.sync_every
    # Shards of others are not all as large as a worker's own.
    rel = 1e-4 if text.endswith(OWNED) else 1e-12
    assert first.forecast.utilisation == pytest.approx(share(every), rel=rel)
    assert share(INTERVALS[INTERVALS.index(every) - 1]) < 0.9 <= share(every)


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
    assert busy(slow, replace(longer.choice, sync_every=int(longer.value / 1.03))) < 0.9


def test_h_of_the_user_is_kept_and_methods_that_cannot_be_run_are_not_advised():
    for found in advise(job(sync_every=64)).recommended:
        assert found.forecast.sync_every_steps in (64, 1)
    # Short runs have ten rounds: this one has 200 steps.
    short = job(tokens_per_step=1000, tokens=4 * 1000 * 200)
    for found in advise(short, target=0.5).recommended:
        assert found.forecast.sync_every_steps <= 20
    # Where every exchange takes a day of latency, nothing helps.
    advice = advise(job(workers=2, link=Link.of(1e9, latency_s=1e6)), target=0.9)
    assert (advice.recommended, advice.changes) == ((), ())

    def only_streaming(method):
        if not method.name.startswith("streaming"):
            raise ConfigurationError("run it", because="of the test", do="nothing")

    found = advise(job(), usable=only_streaming).recommended
    assert {one.choice.preset for one in found} == {"streaming_diloco", "streaming_muloco"}


def test_bills_count_time_and_what_leaves_a_worker():
    planned = job(tokens_per_step=1000, tokens=4_000_000)
    (first, *_) = advise(planned).recommended
    row, costs = first.forecast, bill(first.forecast, planned)
    assert costs.is_of_run
    assert (costs.cost, costs.waiting_cost) == (None, None)
    assert costs.worker_hours == pytest.approx(4 * row.wall_s / 3600)
    busy_hours = 4 * row.steps * planned.compute.step_s / 3600
    assert costs.waiting_hours == pytest.approx(costs.worker_hours - busy_hours)
    assert costs.traffic_bytes == 4 * row.up_bytes
    day = bill(replace(row, wall_s=None), planned)
    assert (day.hours, day.traffic_bytes) == (24, 4 * row.up_bytes_per_day)
    # Through a store, a worker uploads each message once, whoever reads it.
    assert row.up_bytes_per_day == row.down_bytes_per_day
    row = forecast(first.choice.method(), replace(planned, topology=Star()))
    # Of owners: three shards to others and a mean, for three shards and three means.
    assert first.choice.exchange == "reduce_scatter"
    assert row.down_bytes_per_day == pytest.approx(6 / 4 * row.up_bytes_per_day)
