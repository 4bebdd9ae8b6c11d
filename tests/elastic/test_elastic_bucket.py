"""Workers that come and go over a store: the numbers of a fixed run, losses, and errors."""

from collections import Counter

import pytest
import torch

import bucket_workers
import thinwire as tw
from bucket_workers import (
    SECRET,
    UP_S,
    H,
    Worker,
    fixed_digest,
    memory,
    method,
    quick_fixture,  # noqa: F401 - the fixture
    train,
    workers,
)
from thinwire.plan.job import MeetingRequests
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.security.sealing import SEAL_NBYTES
from toy import build_model

pytestmark = pytest.mark.usefixtures("quick")

TOP_K = {"codec": tw.codecs.TopK(k=64), "feedback": tw.ErrorFeedback(decay=0.9)}
STEPS = 3 * H + 1


def half() -> torch.nn.Module:
    return build_model().to(torch.bfloat16)


def muloco(**fields) -> tw.Method:
    return tw.presets.muloco(sync_every=H, bits=2, **fields)


def streaming() -> tw.Method:
    return tw.presets.streaming_diloco(
        sync_every=H, fragments=tw.Balanced(count=2), overlap=tw.Delay(tau=1, mixing=0.5)
    )


METHODS = {
    "diloco": (method(), build_model),
    "2 bits": (muloco(), build_model),
    "2 bits, reduced": (muloco(exchange=tw.ReduceScatter()), build_model),
    "sparse": (method(**TOP_K), build_model),
    "streaming": (streaming(), build_model),
    "bf16": (method(), half),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_workers_that_stay_have_the_digest_of_a_fixed_run(name: str, count: int) -> None:
    described, model = METHODS[name]
    digests = train(workers(memory(), count, described, model=model), STEPS)
    assert set(digests) == {fixed_digest(described, count, STEPS, model=model)}
    # The control: one step fewer.
    assert digests[0] != fixed_digest(described, count, STEPS - 1, model=model)


def test_the_bytes_and_requests_of_workers_that_all_come_in_time_are_those_of_the_plan(
    monkeypatch,
) -> None:
    monkeypatch.setattr(bucket_workers, "SNAPSHOT_AFTER", 1e9)
    steps = 4 * H
    running = workers(memory(), 4, min_workers=4, least_wait_s=4 * UP_S, token=SECRET)
    before: list[Counter[str]] = []

    def note(worker: Worker) -> None:
        before.append(Counter(worker.loop.stats.requests))

    for worker in running:
        worker.before_step[0] = lambda worker=worker: note(worker)
    assert len(set(train(running, steps))) == 1
    asked: Counter[str] = Counter()
    for worker in running:
        asked.update(worker.loop.stats.requests)
    for each in before:
        asked.subtract(each)
    plan = traffic(
        running[0].loop.method,
        Shape.of_model(running[0].model),
        workers=4,
        added_nbytes=SEAL_NBYTES,
    )
    meeting, rounds = MeetingRequests.of(4), steps // H
    # They meet once more at the end.
    assert asked["puts"] == 4 * plan.puts_after(steps) + (rounds + 1) * meeting.puts
    assert asked["gets"] == 4 * plan.gets_after(steps) + (rounds + 1) * meeting.gets
    assert asked["lists"] == (rounds + 1) * meeting.lists
    for worker in running:
        assert worker.loop.stats.sent_bytes == plan.sent_after(steps)
        assert worker.loop.stats.received_bytes == plan.received_after(steps)
