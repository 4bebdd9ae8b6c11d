"""The dashboard of examples/grafana and the page on it name metrics that are served."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from thinwire.elastic.metrics import RunMetrics

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "thinwire.json").read_text())
PAGE = (ROOT / "docs" / "watching.md").read_text()
METRICS = dict.fromkeys(("loss", "tokens_per_s", "sent_bytes", "received_bytes", "wait_s"), 1)
WORKER = {"identity": "a", "position": {"version": 1, "step": 2}, "metrics": METRICS, "age_s": 1.0}
RUN = {"version": 1, "step": 2, "over": False}
RECORD = {"age_s": 1.0, "run": RUN, "roll": 3, "snapshot": 1, "workers": [WORKER]}


def names(text: str) -> set[str]:
    return set(re.findall(r"thinwire_\w+", text))


def test_queries_and_the_page_name_the_metrics_that_are_served() -> None:
    families = RunMetrics(lambda: RECORD).collect()
    kinds = {sample.name: family.type for family in families for sample in family.samples}
    assert names(PAGE) == kinds.keys()
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(queries) >= 8
    for query in queries:
        (name,) = names(query)
        # A counter is read by how fast it grows, a gauge by itself.
        assert ("rate(" in query or "increase(" in query) == (kinds[name] == "counter"), query
        assert "$run" in query
    assert names(str(DASHBOARD["templating"]["list"])) <= kinds.keys()
