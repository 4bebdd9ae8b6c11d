import inspect
import math
from dataclasses import replace

import pytest

from thinwire import presets
from thinwire.cli.plan import job_text, link_text
from thinwire.elastic import alive
from thinwire.elastic.transport import Elastic
from thinwire.errors import ConfigurationError
from thinwire.exchange import Gather
from thinwire.plan.compute import PEAK_TFLOPS_PER_S, Compute, peak_flops_per_s
from thinwire.plan.forecast import UTILISATIONS, Forecast, RefusedMethod, forecast, forecasts
from thinwire.plan.job import SIGN_OF_LIFE_S, Job, Prices
from thinwire.plan.link import Link, Ring, Star
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import simulate
from thinwire.plan.traffic import traffic

ALL = [presets.from_text(name) for name in presets.names()]


def job(**changes) -> Job:
    given = {"shape": Shape.of_size(10_007, 5), "workers": 2, "compute": Compute(step_s=0.1)}
    given |= {"link": Link.of(1e6, latency_s=0.01), "tokens_per_step": 100, "tokens": 30_011}
    return Job(**(given | changes))


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("method", ALL, ids=presets.names())
def test_a_forecast_says_what_traffic_and_simulation_say(method, workers: int) -> None:
    asked = job(workers=workers)
    found, sent = forecast(method, asked), traffic(method, asked.shape, workers=workers)
    every, steps = sent.sync_every, -(-30_011 // (workers * 100))
    assert found.steps == steps
    assert found.down_bytes_per_round == sent.received_per_round
    assert found.down_bytes == sent.received_after(steps)
    assert found.peak_up_bits_per_s == 80 * found.peak_up_bytes_per_step
    # In a ring, workers forward what others receive; a store or a server takes a message once.
    star, by_server = forecast(method, replace(asked, topology=Star())), "server" in found.exchanges
    for each, is_relayed in ((star, True), (found, by_server)):
        peak = sent.on_links(relayed=is_relayed).peak_sent_per_step
        ups = (each.up_bytes_per_round, each.up_bytes, each.peak_up_bytes_per_step)
        once = (sent.sent_per_round, sent.sent_after(steps), sent.peak_sent_per_step)
        often = (sent.received_per_round, sent.received_after(steps), peak)
        assert ups == (once if is_relayed else often)
    # Ten thousand rounds forget how the first began and the last ended.
    rounds = 10_000 // every
    long_s = simulate(asked.scenario(sent), steps=rounds * every).wall_s / (rounds * every)
    assert found.step_s == pytest.approx(long_s, rel=1e-3)
    assert found.utilisation == pytest.approx(0.1 / found.step_s)
    down_per_day = 86_400 / found.step_s / every * sent.received_per_round
    assert found.down_bytes_per_day == pytest.approx(down_per_day)
    assert found.tokens_per_day == pytest.approx(86_400 / found.step_s * 100 * workers)
    for steps in (1, 29, 31, 2_000, 4_003):
        wall_s = simulate(asked.scenario(sent), steps=steps).wall_s
        short = forecast(method, job(workers=workers, tokens=steps * 100 * workers))
        assert short.wall_s == pytest.approx(wall_s, rel=1e-9)


@pytest.mark.parametrize("method", ALL, ids=presets.names())
def test_the_bandwidth_that_is_required_is_enough_and_less_is_not(method) -> None:
    def of(rate: float, target: float = 0.7) -> Forecast:
        return forecast(method, job(link=Link.of(rate, latency_s=1e-4)), target=target)

    found = of(1e6)
    assert tuple(found.required_bits_per_s) == UTILISATIONS
    rates = list(found.required_bits_per_s.values())
    assert rates == sorted(rates)
    assert rates[0] <= found.target_bits_per_s <= rates[1]
    for share, rate in (*found.required_bits_per_s.items(), (0.7, found.target_bits_per_s)):
        assert of(rate * 1.001, share).fits
        assert not of(rate * 0.98, share).fits


def test_bytes_of_a_round_on_paper() -> None:
    # 8 workers; 30,021 numbers in fp32 and a header of 64 bytes for each of the 7 others.
    asked, payload = job(workers=8, shape=Shape.of_size(30_021, 1)), 4 * 30_021 + 64
    gather = replace(presets.diloco(), exchange=Gather())
    ring, star = (forecast(gather, replace(asked, topology=of)) for of in (Ring(), Star()))
    assert (ring.up_bytes_per_round, ring.down_bytes_per_round) == (7 * payload, 7 * payload)
    assert (star.up_bytes_per_round, star.down_bytes_per_round) == (payload, 7 * payload)
    # 30 steps of 2 x 7/8 of the vector in 16 bits, up and as much down.
    all_reduce = 30 * 2 * 7 / 8 * 2 * 30_021
    assert ring.times_fewer == pytest.approx(2 * all_reduce / (14 * payload))
    assert star.times_fewer == pytest.approx(2 * all_reduce / (8 * payload))


def test_what_limits() -> None:
    method = presets.diloco()
    assert forecast(method, job(link=Link.of(1e3))).limit == "bandwidth"
    assert forecast(method, job(link=Link.of(1e12, latency_s=9))).limit == "latency"
    assert forecast(method, job(link=Link.of(1e12))).limit == "compute"
    slow = Compute(step_s=0.1, encode_s_per_parameter=1e-3)
    assert forecast(method, job(link=Link.of(1e12), compute=slow)).limit == "coding"
    far = forecast(presets.ddp(), job(link=Link.of(1e9, latency_s=1)))
    assert set(far.required_bits_per_s.values()) == {math.inf}
    alone = forecast(presets.ddp(), job(workers=1))
    assert set(alone.required_bits_per_s.values()) == {0.0}
    assert (alone.utilisation, alone.limit, alone.up_bytes) == (1.0, "compute", 0)
    assert alone.times_fewer is None
    up_slow = Link(up_bits_per_s=1e5, down_bits_per_s=1e9, latency_s=0)
    ring, star = (job(workers=5, link=up_slow, topology=t) for t in (Ring(), Star()))
    assert forecast(presets.ddp(), ring).utilisation != forecast(presets.ddp(), star).utilisation


def test_sync_every_acts_on_methods_that_have_rounds_only() -> None:
    rows = forecasts(ALL, job(sync_every=1))
    found = {row.method: row for row in rows}
    assert found["ddp"] == forecast(presets.ddp(), job())
    assert isinstance(found["diloco"], Forecast)
    assert found["diloco"].sync_every_steps == 1
    refused = found["streaming_diloco"]
    assert isinstance(refused, RefusedMethod)
    assert refused.error.startswith("cannot ")


@pytest.mark.parametrize(
    "fields",
    [{"workers": 0}, {"sync_every": 0}, {"tokens": 0}, {"tokens_per_step": None}],
)
def test_jobs_that_cannot_be(fields) -> None:
    with pytest.raises(ConfigurationError, match=f"{'|'.join(fields)}"):
        job(**fields)


def test_words() -> None:
    asked = job(workers=1, link=Link(up_bits_per_s=1e6, down_bits_per_s=2e6))
    assert job_text(asked) == "10k in 5 layers on 1 worker, 100 ms a step"
    assert link_text(asked) == "1 Mbit/s up, 2 Mbit/s down, 0 s one way"
    # Accelerators are found however they are written.
    for name, tflops_per_s in PEAK_TFLOPS_PER_S.items():
        assert peak_flops_per_s(name.lower().replace(" ", "_")) == tflops_per_s * 1e12
        assert 10 < tflops_per_s < 10_000
    with pytest.raises(ConfigurationError, match="did you mean 'H100'"):
        peak_flops_per_s("H100x")


def test_signs_of_life_are_in_the_price_of_workers_that_come_and_go() -> None:
    parameters = inspect.signature(Elastic).parameters
    assert parameters["least_wait_s"].default / alive.PER_LOSS == SIGN_OF_LIFE_S
    asked = job(workers=3, prices=Prices(egress_per_gb=0, put_per_million=1e6), elastic=True)
    sent = asked.traffic(presets.diloco())
    signs = asked.store_cost(sent, 101.0) - asked.store_cost(sent, 0.0)
    assert signs == math.ceil(3 * 101.0 / SIGN_OF_LIFE_S)
    fixed = replace(asked, elastic=False)
    assert fixed.store_cost(sent, 101.0) == fixed.store_cost(sent, 0.0)
