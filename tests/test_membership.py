"""Metrics that workers report to others, which may not trust them."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.membership import WorkerMetrics

ALL = {"loss": -1.5, "tokens_per_s": 12.5, "sent_bytes": 7, "received_bytes": 10**15, "wait_s": 0}
NUMBERS = st.integers(-(10**400), 10**400) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*ALL, "x"]), inner),
    max_leaves=12,
)


def test_metrics_arrive_as_they_were_sent() -> None:
    metrics = WorkerMetrics(**ALL)
    assert WorkerMetrics.read(json.loads(json.dumps(metrics.describe()))) == metrics
    assert WorkerMetrics.read(WorkerMetrics().describe()) == WorkerMetrics()
    # What a later version adds is passed over.
    assert WorkerMetrics.read({"loss": 1.0, "grad_norm": "?"}) == WorkerMetrics(loss=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("loss", value) for value in (math.nan, math.inf, "2.5", None, True, -1e19)),
        ("wait_s", -0.5),
        ("tokens_per_s", [1.0]),
        ("sent_bytes", 2.0),
        ("received_bytes", 10**4000),
    ],
)
def test_what_cannot_be_true_is_dropped_and_the_rest_is_kept(name, value) -> None:
    metrics = WorkerMetrics.read(ALL | {name: value})
    assert metrics.describe() == {other: ALL[other] for other in ALL if other != name}


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([*ALL, "x"]), JSON))
def test_anything_can_be_read_and_what_is_kept_is_finite_and_small(data) -> None:
    metrics = WorkerMetrics.read(data)
    assert all(abs(value) <= 10**18 for value in metrics.describe().values())
    assert len(json.dumps(metrics.describe(), allow_nan=False)) < 250
