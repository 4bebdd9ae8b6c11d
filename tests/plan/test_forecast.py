import math
from dataclasses import replace

import pytest

from thinwire import presets
from thinwire.cli.plan import job_text, link_text
from thinwire.elastic import alive
from thinwire.elastic.transport import LEAST_WAIT_S
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import PEAK_TFLOPS_PER_S, Compute, peak_flops_per_s
from thinwire.plan.forecast import UTILISATIONS, Forecast, forecast
from thinwire.plan.job import SIGN_OF_LIFE_S, Job
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
    assert found.down_bytes_per_round == sent.received_nbytes()
    assert found.down_bytes == sent.received_nbytes(steps)
    assert found.peak_up_bits_per_s == 80 * found.peak_up_bytes_per_step
    # In a ring, workers forward what others receive; a store or a server takes a message once.
    star, by_server = forecast(method, replace(asked, topology=Star())), "server" in found.exchanges
    for each, is_relayed in ((star, True), (found, by_server)):
        peak = sent.on_links(relayed=is_relayed).peak_sent_per_step
        ups = (each.up_bytes_per_round, each.up_bytes, each.peak_up_bytes_per_step)
        once = (sent.sent_nbytes(), sent.sent_nbytes(steps), sent.peak_sent_per_step)
        often = (sent.received_nbytes(), sent.received_nbytes(steps), peak)
        assert ups == (once if is_relayed else often)
    if workers > 1:
        moved = [each.up_bytes_per_round + each.down_bytes_per_round for each in (star, found)]
        assert star.times_fewer * moved[0] == pytest.approx(found.times_fewer * moved[1])
    # Ten thousand rounds forget how the first began and the last ended.
    rounds = 10_000 // every
    long_s = simulate(asked.scenario(sent), steps=rounds * every).wall_s / (rounds * every)
    assert found.step_s == pytest.approx(long_s, rel=1e-3)
    assert found.utilisation == pytest.approx(0.1 / found.step_s)
    down_per_day = 86_400 / found.step_s / every * sent.received_nbytes()
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


def test_signs_of_life_are_planned_as_often_as_they_are_given() -> None:
    assert LEAST_WAIT_S / alive.PER_LOSS == SIGN_OF_LIFE_S
