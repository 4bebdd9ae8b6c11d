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
    assert WorkerMetrics.read(json.loads(json.dumps(metrics.describe()))) == (metrics, ())
    assert WorkerMetrics.read(WorkerMetrics().describe()) == (WorkerMetrics(), ())
    # What a later version adds is passed over.
    assert WorkerMetrics.read({"loss": 1.0, "grad_norm": "?"}) == (WorkerMetrics(loss=1.0), ())


@pytest.mark.parametrize(
    ("name", "value", "flaw"),
    [
        ("loss", math.nan, "loss is nan"),
        ("loss", math.inf, "loss is inf"),
        ("loss", "2.5", "loss is a str"),
        ("loss", None, "loss is a NoneType"),
        ("loss", True, "loss is a bool"),
        ("loss", -1e19, "loss is -1e+19"),
        ("wait_s", -0.5, "wait_s is -0.5"),
        ("tokens_per_s", [1.0], "tokens_per_s is a list"),
        ("sent_bytes", 2.0, "sent_bytes is a float"),
        ("received_bytes", 10**4000, "received_bytes is 1" + 29 * "0"),
    ],
)
def test_what_cannot_be_true_is_dropped_by_name_and_the_rest_is_kept(name, value, flaw) -> None:
    metrics, flaws = WorkerMetrics.read(ALL | {name: value})
    assert flaws == (flaw,)
    assert metrics.describe() == {other: ALL[other] for other in ALL if other != name}


@settings(max_examples=30)
@given(JSON)
def test_anything_can_be_read_and_what_is_kept_is_finite_and_small(data) -> None:
    metrics, flaws = WorkerMetrics.read(data)
    assert all(abs(value) <= 10**18 for value in metrics.describe().values())
    assert len(flaws) <= len(ALL)
    assert all(len(flaw) < 60 for flaw in flaws)
    assert len(json.dumps(metrics.describe(), allow_nan=False)) < 250
