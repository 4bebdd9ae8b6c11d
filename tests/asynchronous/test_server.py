"""The server's state: what it refuses, counts, hands out and keeps."""

import math
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from asynchronous_team import AsyncTeam, method, with_number
from exchanges import flipped
from thinwire.asynchronous import AsyncOptions, AsyncServer, Simulation, dynamic_steps
from thinwire.rejection import RejectReason
from toy import build_model, same_bits


def team(**settings) -> AsyncTeam:
    """Two workers that have trained one assignment each, and sent nothing."""
    fields = {"options": AsyncOptions(dynamic_steps=False), "total_steps": None, **settings}
    return AsyncTeam(fields.pop("method", method()), (1.0, 1.0), **fields)


def trained(team: AsyncTeam, rank: int, *, now_s: float = 0.0) -> torch.Tensor:
    assignment = team.server.assign(rank, now_s=now_s)
    team.workers[rank].start(assignment, team.server.theta_message)
    team.train(rank, assignment)
    return team.workers[rank].finish()


def state_of(team: AsyncTeam) -> list[torch.Tensor]:
    outer = team.server.state_dict()["outer"]
    return [value.clone().flatten() for value in outer.values()]


def test_a_damaged_message_leaves_no_trace_but_a_count() -> None:
    here = team()
    message, before = trained(here, 0), state_of(here)
    for number, damaged in enumerate(
        (
            *(flipped(message, place) for place in (30, 64 + 5)),
            *(message[:end] for end in (-3, 20, 0)),
            *(torch.zeros_like(message), torch.zeros(3)),
        )
    ):
        rejection = here.server.receive(damaged, now_s=1.0)
        assert rejection.reason is RejectReason.DAMAGED
        assert same_bits(state_of(here), before)
        assert here.server.stats.refused == {"DAMAGED": number + 1}
    assert here.server.stats.arrivals == here.server.stats.steps_done == 0
    # The same work arrives whole later, and counts once.
    assert here.server.receive(message, now_s=2.0) is None
    after = state_of(here)
    assert not same_bits(after, before)
    assert here.server.receive(message, now_s=2.0).reason is RejectReason.DRIFTED
    assert same_bits(state_of(here), after)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    here = team()
    message, before = trained(here, 0), state_of(here)
    rejection = here.server.receive(with_number(message, value), now_s=1.0)
    assert rejection.reason is RejectReason.NOT_FINITE
    assert same_bits(state_of(here), before)
    with pytest.raises(tw.NonFiniteError, match="go on as worker 0"):
        here.workers[0].settle(rejection)
    here.workers[1].start(here.server.assign(1, now_s=0.0), here.server.theta_message)
    with torch.no_grad():
        here.models[1][1].weight[0, 0] = value
    with pytest.raises(tw.NonFiniteError, match=r"'1.weight' at exchange 1"):
        here.workers[1].finish()


def test_an_anchor_that_was_not_given_or_is_old_is_refused_with_its_digest() -> None:
    here, other = team(), team()
    # Another run, whose theta has moved on.
    other.server.receive(trained(other, 1), now_s=0.0)
    foreign = trained(other, 0, now_s=0.0)
    old = trained(here, 0)
    rejection = here.server.receive(foreign, now_s=1.0)
    assert rejection.reason is RejectReason.DRIFTED
    assert "worker 0 started exchange 2 from outer parameters with digest" in str(rejection)
    # A worker that was restarted has another theta: what its predecessor sends is late.
    here.server.receive(trained(here, 1), now_s=0.0)
    assert here.server.assign(0, now_s=0.0).round == 2
    assert here.server.receive(old, now_s=1.0).reason is RejectReason.DRIFTED
    stranger = AsyncTeam(method(), (1.0,) * 3, total_steps=None)
    assert here.server.receive(trained(stranger, 2), now_s=0.0) is not None


def test_steps_of_a_lost_worker_are_given_to_others_and_of_a_restarted_one_to_itself() -> None:
    options = AsyncOptions(dynamic_steps=False, lost_after_s=10.0)
    here = team(options=options, total_steps=12)
    lost = trained(here, 0)
    here.server.receive(trained(here, 1), now_s=1.0)
    assert here.server.assign(1, now_s=2.0) is None
    assert here.server.assign(1, now_s=11.0).steps == 6
    # It was only slow.
    assert here.server.receive(lost, now_s=12.0) is None
    assert here.server.is_finished
    assert here.server.assign(0, now_s=12.0) is None

    here = team(total_steps=12)
    lost = trained(here, 0)
    here.server.receive(trained(here, 1), now_s=1.0)
    again = here.server.assign(0, now_s=2.0)  # its theta is the present one
    assert (again.steps, again.round) == (6, 2)
    assert here.server.assign(1, now_s=2.0) is None
    assert here.server.receive(lost, now_s=3.0) is not None


def test_dynamic_steps_come_from_reported_speeds() -> None:
    here = team(options=AsyncOptions())
    given = []
    for rank, speed in ((0, None), (0, 10.0), (1, 5.0), (0, 1.0), (1, None)):
        here.server.speeds |= {} if speed is None else {rank: speed}
        given.append(here.server.assign(rank, now_s=0.0).steps)
    assert given == [6, 6, 3, 1, 6]
    # At least one, and at most H.
    assert [dynamic_steps(1, v, 7.0) for v in (7.0, 0.001)] == [1, 1]
    assert dynamic_steps(150, 0.9999, 1.0) == 149
    speeds = [0.1 + 0.037 * n for n in range(200)]
    assert {dynamic_steps(6, v, v) for v in speeds} == {6}


def test_a_state_of_another_run_is_refused_by_the_field_that_differs() -> None:
    here = team()
    saved = AsyncServer(build_model(), method(momentum=0.5), workers=2).state_dict()
    with pytest.raises(tw.MismatchError, match=r"method.outer.momentum differs"):
        here.server.load_state_dict(saved)


def test_feedback_is_restored_when_work_is_given_up() -> None:
    compressed = method(codec=tw.codecs.TopK(k=64), feedback=tw.ErrorFeedback())
    here = team(method=compressed)
    worker = here.workers[0]
    worker.settle(here.server.receive(trained(here, 0), now_s=0.0))
    before = worker.state_dict()["feedback"]["residual"].clone()
    assert before.any()
    late = trained(here, 0, now_s=0.0)
    here.server.assign(0, now_s=0.0)
    here.server.receive(trained(here, 1), now_s=0.0)
    here.server.assign(0, now_s=0.0)
    assert not torch.equal(worker.state_dict()["feedback"]["residual"], before)
    worker.settle(here.server.receive(late, now_s=0.0))
    assert torch.equal(worker.state_dict()["feedback"]["residual"], before)


def server(**fields) -> AsyncServer:
    return AsyncServer(build_model(), method(**fields), workers=2)


def simulation(*speeds: float) -> Simulation:
    here = team()
    return Simulation(here.server, here.workers, speeds, here.train)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: server(fragments=tw.Balanced(count=2)), "leave fragments out"),
        (lambda: server(overlap=tw.Delay(tau=1)), "leave overlap out"),
        (lambda: server(overlap=tw.Delay(mixing=0.5)), "leave overlap out"),
        (lambda: server(exchange=tw.ReduceScatter()), "leave exchange out"),
        (lambda: server(outer=tw.outer.GradientAveraging(), sync_every=1), "leave outer out"),
        (lambda: server(outer=tw.outer.Gossip(), exchange=tw.Gather()), "leave outer out"),
        (lambda: server(aggregate=tw.ClipNorms(limit=2.0)), "leave aggregate out"),
        (lambda: AsyncOptions(grace_s=-1.0), "grace_s to -1"),
        (lambda: AsyncOptions(lost_after_s=math.nan), "lost_after_s to nan"),
        (lambda: simulation(1.0), "simulate 2 of 2 workers"),
        (lambda: simulation(1.0, 0.0), "simulate 2 of 2 workers"),
        (lambda: simulation(math.inf, 1.0), "simulate 2 of 2 workers"),
    ],
)
def test_what_cannot_be_is_refused(call, why: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=why):
        call()


def test_a_worker_refuses_a_damaged_theta() -> None:
    here = team()
    assignment = here.server.assign(0, now_s=0.0)
    theta, other = here.server.theta_message, replace(assignment, anchor=b"other...")
    for given, found in (
        (assignment, flipped(theta, 100)),
        (assignment, theta[:-4]),
        (other, theta),
    ):
        with pytest.raises(tw.ExchangeError, match="size and digest that the server named"):
            here.workers[0].start(given, found)
