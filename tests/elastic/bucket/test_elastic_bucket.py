"""Workers that come and go over a store: the numbers of a fixed run, losses, and errors."""

import pytest
import torch

import thinwire as tw
from bucket_workers import (
    H,
    fixed_digest,
    memory,
    method,
    quick_fixture,  # noqa: F401 - the fixture
    train,
    workers,
)
from toy import build_model

pytestmark = pytest.mark.usefixtures("quick")

TOP_K = {"codec": tw.codecs.TopK(k=64), "feedback": tw.ErrorFeedback(decay=0.9)}
TWO_BITS = tw.codecs.Quantise(bits=2)
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
