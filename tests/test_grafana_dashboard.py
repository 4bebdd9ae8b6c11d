"""The dashboard of examples/grafana shows metrics that exist, and Grafana can import it."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prometheus_client")

from thinwire.elastic.metrics import RunMetrics

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "grafana"
DASHBOARD = json.loads((FOLDER / "thinwire.json").read_text())
PANELS = DASHBOARD["panels"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
PAGE = (ROOT / "docs" / "watching.md").read_text()
IMPORTANT = """workers worker_outer_step worker_loss worker_wait_seconds_total roll_age_seconds
    worker_age_seconds worker_sent_bytes_total worker_received_bytes_total"""
METRICS = dict.fromkeys(("loss", "tokens_per_s", "sent_bytes", "received_bytes", "wait_s"), 1)
RECORD = {
    "age_s": 1.0,
    "run": {"version": 1, "step": 2, "over": False},
    "roll": 3,
    "snapshot": 1,
    "workers": [
        {"identity": "a", "position": {"version": 1, "step": 2}, "metrics": METRICS, "age_s": 1.0}
    ],
}


def names(text: str) -> set[str]:
    return set(re.findall(r"thinwire_\w+", text))


def test_queries_and_the_page_name_the_metrics_that_are_served() -> None:
    families = RunMetrics(lambda: RECORD).collect()
    kinds = {sample.name: family.type for family in families for sample in family.samples}
    assert names(PAGE) == kinds.keys()
    for query in (target["expr"] for target in TARGETS):
        (name,) = names(query)
        # A counter says something by how fast it grows, and a gauge by itself.
        assert ("rate(" in query or "increase(" in query) == (kinds[name] == "counter"), query
    assert names(str(DASHBOARD["templating"]["list"])) <= kinds.keys()
    assert names(str(TARGETS)) >= {f"thinwire_{name}" for name in IMPORTANT.split()}


def test_grafana_10_finds_what_it_needs_to_import_it() -> None:
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] == 38  # that of Grafana 10; later ones migrate it
    assert "id" not in DASHBOARD  # one would replace another dashboard
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells: dict[int, set[tuple[int, int]]] = {}
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        width, height = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells[panel["id"]] = {(x, y) for x in width for y in height}
    assert not any(one & other for one, other in combinations(cells.values(), 2))


def test_it_asks_the_prometheus_and_the_run_that_are_chosen_there() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(a["datasource"] == chosen for a in (*PANELS, *TARGETS, variables["run"]))
    for target in TARGETS:
        used = set(re.findall(r"\$(\w+)", target["expr"]))
        assert {"run"} <= used <= {"__rate_interval", "__range"} | set(variables)


def test_prometheus_asks_where_the_page_has_the_command_serve() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    for target in (target for config in job["static_configs"] for target in config["targets"]):
        assert f"--metrics {target}" in PAGE
