"""The server's state: what it refuses, counts, hands out and keeps."""

import math

import pytest
import torch

import thinwire as tw
from asynchronous_team import AsyncTeam, method, with_number
from thinwire.asynchronous import AsyncOptions, AsyncServer, RunFinished, TryLater, dynamic_steps
from thinwire.rejection import RejectReason
from toy import adamw, build_model, same_bits, sgd

NUMEL = sum(p.numel() for p in build_model().parameters())


def team(**settings) -> AsyncTeam:
    """Two workers that have trained one assignment each, and sent nothing."""
    fields = {"options": AsyncOptions(dynamic_steps=False), "total_steps": None, **settings}
    return AsyncTeam(fields.pop("method", method()), (1.0, 1.0), **fields)


def trained(team: AsyncTeam, rank: int, *, now_s: float = 0.0) -> torch.Tensor:
    assignment = team.server.assign(rank, now_s=now_s)
    team.workers[rank].start(assignment)
    team.train(rank, assignment)
    return team.workers[rank].finish()


def state_of(team: AsyncTeam) -> list[torch.Tensor]:
    outer = team.server.state_dict()["outer"]
    return [value.clone().flatten() for value in outer.values()]


def damages(message: torch.Tensor) -> dict[str, torch.Tensor]:
    def flipped(place: int) -> torch.Tensor:
        changed = message.clone()
        changed[place] ^= 64
        return changed

    return {
        "header": flipped(30),
        "body": flipped(64 + 5),
        "truncated": message[:-3],
        "no header": message[:20],
        "empty": message[:0],
        "other bytes": torch.zeros_like(message),
        "not bytes": torch.zeros(3),
    }


@pytest.mark.parametrize("how", damages(torch.zeros(100, dtype=torch.uint8)))
def test_a_damaged_message_leaves_no_trace_but_a_count(how) -> None:
    here = team()
    message = trained(here, 0)
    before = state_of(here)
    receipt = here.server.receive(damages(message)[how], now_s=1.0)
    assert receipt.rejection is not None
    assert receipt.rejection.reason is RejectReason.DAMAGED
    assert same_bits(state_of(here), before)
    assert here.server.stats.refused == {"DAMAGED": 1}
    assert here.server.stats.arrivals == here.server.stats.steps_done == 0
    # The same work arrives whole later.
    assert here.server.receive(message, now_s=2.0).rejection is None
    assert not same_bits(state_of(here), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_by_name(value) -> None:
    here = team()
    message = trained(here, 0)
    before = state_of(here)
    receipt = here.server.receive(with_number(message, value), now_s=1.0)
    assert receipt.rejection.reason is RejectReason.NOT_FINITE
    assert same_bits(state_of(here), before)
    with pytest.raises(tw.NonFiniteError, match="go on as worker 0"):
        here.workers[0].settle(receipt)


def test_an_anchor_that_was_not_given_is_refused_with_its_digest() -> None:
    here, other = team(), team()
    # Another run, whose theta has moved on.
    other.server.receive(trained(other, 1), now_s=0.0)
    foreign = trained(other, 0, now_s=0.0)
    trained(here, 0)
    receipt = here.server.receive(foreign, now_s=1.0)
    assert receipt.rejection.reason is RejectReason.DRIFTED
    assert "worker 0 started exchange 2 from outer parameters with digest" in str(receipt.rejection)


def test_an_answer_to_an_older_assignment_is_refused() -> None:
    """A worker that was restarted has another theta: what its predecessor sends is late."""
    here = team()
    old = trained(here, 0)
    here.server.receive(trained(here, 1), now_s=0.0)
    fresh = here.server.assign(0, now_s=0.0)
    assert fresh.round == 2
    assert here.server.receive(old, now_s=1.0).rejection.reason is RejectReason.DRIFTED


def test_a_message_that_arrives_twice_counts_once() -> None:
    here = team()
    message = trained(here, 0)
    first = here.server.receive(message, now_s=0.0)
    after = state_of(here)
    again = here.server.receive(message, now_s=0.0)
    assert (first.is_repeated, again.is_repeated, again.rejection) == (False, True, None)
    assert same_bits(state_of(here), after)
    assert here.server.stats.repeated == 1
    assert here.server.stats.arrivals == 1


def test_an_unknown_sender_is_refused() -> None:
    here = team()
    stranger = AsyncTeam(method(), (1.0,) * 3, total_steps=None)
    assert here.server.receive(trained(stranger, 2), now_s=0.0).rejection is not None


def test_bytes_are_those_of_the_messages() -> None:
    compressed = method(codec=tw.codecs.Quantise(bits=2), feedback=tw.ErrorFeedback())
    here = team(method=compressed)
    messages = [trained(here, rank) for rank in (0, 1)]
    for message in messages:
        here.server.receive(message, now_s=0.0)
    here.server.receive(messages[0][:50], now_s=0.0)
    stats = here.server.stats
    assert stats.sent_bytes == 2 * (64 + 4 * NUMEL)
    assert stats.received_bytes == sum(map(len, messages)) + 50
    for worker, message in zip(here.workers, messages, strict=True):
        assert worker.sent_bytes == len(message)
        assert worker.received_bytes == 64 + 4 * NUMEL


def test_steps_of_a_lost_worker_are_given_to_others() -> None:
    options = AsyncOptions(dynamic_steps=False, lost_after_s=10.0)
    here = team(options=options, total_steps=12)
    lost = trained(here, 0)
    here.server.receive(trained(here, 1), now_s=1.0)
    assert isinstance(here.server.assign(1, now_s=2.0), TryLater)
    assert here.server.assign(1, now_s=11.0).steps == 6
    # It was only slow.
    assert here.server.receive(lost, now_s=12.0).rejection is None
    assert here.server.is_finished
    assert isinstance(here.server.assign(0, now_s=12.0), RunFinished)


def test_a_worker_that_asks_again_starts_anew() -> None:
    """It was restarted: its steps are its own again, and its theta is the present one."""
    here = team(total_steps=12)
    lost = trained(here, 0)
    here.server.receive(trained(here, 1), now_s=1.0)
    again = here.server.assign(0, now_s=2.0)
    assert (again.steps, again.round) == (6, 2)
    assert isinstance(here.server.assign(1, now_s=2.0), TryLater)
    assert here.server.receive(lost, now_s=3.0).rejection is not None


def test_grace_makes_workers_wait() -> None:
    options = AsyncOptions(dynamic_steps=False, grace_s=2.0)
    here = team(options=options)
    messages = [trained(here, rank) for rank in (0, 1)]
    here.server.receive(messages[0], now_s=5.0)
    assert here.server.assign(0, now_s=6.0) == TryLater(1.0)
    here.server.receive(messages[1], now_s=6.5)
    assert here.server.assign(0, now_s=6.5).round == here.server.assign(1, now_s=6.5).round == 3


def test_dynamic_steps_come_from_reported_speeds() -> None:
    here = team(options=AsyncOptions())
    assert here.server.assign(0, now_s=0.0).steps == 6
    assert here.server.assign(0, now_s=0.0, speed=10.0).steps == 6
    assert here.server.assign(1, now_s=0.0, speed=5.0).steps == 3
    assert here.server.assign(0, now_s=0.0, speed=1.0).steps == 1
    assert here.server.assign(1, now_s=0.0).steps == 6


def test_dynamic_steps_are_at_least_one_and_at_most_h() -> None:
    assert [dynamic_steps(1, v, 7.0) for v in (7.0, 0.001)] == [1, 1]
    assert dynamic_steps(150, 0.9999, 1.0) == 149
    speeds = [0.1 + 0.037 * n for n in range(200)]
    assert {dynamic_steps(6, v, v) for v in speeds} == {6}


def test_the_model_of_the_server_holds_theta() -> None:
    here = team()
    here.server.receive(trained(here, 0), now_s=0.0)
    live = dict(here.server.model.named_parameters())
    for name, value in here.server.anchor().items():
        assert torch.equal(live[name], value)


def test_another_run_is_refused_by_the_field_that_differs() -> None:
    here = team()
    here.server.check_worker(1, here.workers[1].describe())
    other = AsyncTeam(method(lr=0.5), (1.0,)).workers[0]
    with pytest.raises(tw.MismatchError, match=r"worker 1 take part: method.outer.lr differs"):
        here.server.check_worker(1, other.describe())
    narrow = AsyncTeam(method(), (1.0,), model=lambda: torch.nn.Linear(2, 2)).workers[0]
    with pytest.raises(tw.MismatchError, match="parameters"):
        here.server.check_worker(1, narrow.describe())
    older = {**here.workers[0].describe(), "thinwire version": "0.0.1"}
    with pytest.raises(tw.MismatchError, match="thinwire version differs"):
        here.server.check_worker(0, older)
    with pytest.raises(tw.ConfigurationError, match="take part as worker 2"):
        here.server.check_worker(2, here.workers[0].describe())


def test_a_server_that_goes_back_refuses_what_it_does_not_know() -> None:
    """It was killed after its checkpoint: workers answer what it knows nothing of."""
    here = team()
    known, unknown = trained(here, 0), None
    saved = {**here.server.state_dict()}
    saved["outer"] = {key: value.clone() for key, value in saved["outer"].items()}
    here.server.receive(trained(here, 1), now_s=0.0)
    unknown = trained(here, 1, now_s=0.0)
    server = AsyncServer(build_model(), method(), workers=2)
    server.load_state_dict(saved, now_s=100.0)
    receipt = server.receive(unknown, now_s=101.0)
    assert receipt.rejection.reason is RejectReason.DRIFTED
    assert server.receive(known, now_s=101.0).rejection is None
    assert server.assign(1, now_s=102.0).round == 2


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


def test_a_checkpoint_of_another_run_is_refused() -> None:
    here = team()
    other = AsyncServer(build_model(), method(momentum=0.5), workers=2)
    with pytest.raises(tw.MismatchError, match=r"method.outer.momentum differs"):
        here.server.load_state_dict(other.state_dict())
    with pytest.raises(tw.CheckpointError, match="asynchronous server"):
        here.server.load_state_dict({})


@pytest.mark.parametrize(
    ("fields", "slot"),
    [
        ({"fragments": tw.Balanced(count=2)}, "leave fragments out"),
        ({"overlap": tw.Delay(tau=1)}, "leave overlap out"),
        ({"overlap": tw.Delay(mixing=0.5)}, "leave overlap out"),
        ({"exchange": tw.ReduceScatter()}, "leave exchange out"),
        ({"outer": tw.outer.GradientAveraging(), "sync_every": 1}, "leave outer out"),
        ({"outer": tw.outer.Gossip(lr=0.7, momentum=0.5), "exchange": tw.Gather()}, "outer out"),
    ],
)
def test_methods_that_need_rounds_are_refused(fields, slot) -> None:
    with pytest.raises(tw.ConfigurationError, match=slot):
        AsyncServer(build_model(), method(**fields), workers=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AsyncServer(build_model(), method(), workers=0),
        lambda: AsyncServer(build_model(), method(), workers=1, total_steps=0),
        lambda: AsyncOptions(grace_s=-1.0),
        lambda: AsyncOptions(lost_after_s=math.nan),
        lambda: team().server.assign(2, now_s=0.0),
        lambda: team().server.assign(0, now_s=0.0, speed=0.0),
    ],
)
def test_what_cannot_work_is_refused(make) -> None:
    with pytest.raises(tw.ConfigurationError, match=r"cannot .*; because .*; do: "):
        make()


def test_a_worker_does_not_send_what_is_not_finite() -> None:
    here = team()
    here.workers[0].start(here.server.assign(0, now_s=0.0))
    with torch.no_grad():
        here.models[0][1].weight[0, 0] = math.nan
    with pytest.raises(tw.NonFiniteError, match=r"'1.weight' at exchange 1"):
        here.workers[0].finish()


def test_a_worker_refuses_a_damaged_theta() -> None:
    here = team()
    assignment = here.server.assign(0, now_s=0.0)
    damaged = assignment.message.clone()
    damaged[100] ^= 1
    fields = {
        name: getattr(assignment, name) for name in ("round", "anchor", "steps", "steps_done")
    }
    with pytest.raises(tw.ExchangeError, match="checksum"):
        here.workers[0].start(type(assignment)(message=damaged, **fields))
    with pytest.raises(tw.MismatchError, match="digest"):
        here.workers[0].start(
            type(assignment)(message=assignment.message, **{**fields, "anchor": b"other..."})
        )


def test_a_worker_resumes_in_the_middle_of_an_assignment() -> None:
    here = team(build=sgd)
    assignment = here.server.assign(0, now_s=0.0)
    here.workers[0].start(assignment)
    here.train(0, assignment)
    saved = here.workers[0].state_dict()
    other = team(build=adamw)
    other.models[0].load_state_dict(here.models[0].state_dict())
    other.workers[0].load_state_dict({**saved, "start": saved["start"].clone()})
    assert torch.equal(other.workers[0].finish(), here.workers[0].finish())
    with pytest.raises(tw.CheckpointError, match="asynchronous worker"):
        other.workers[0].load_state_dict({})
