"""The dashboard of examples/grafana shows metrics that exist, and Grafana can import it."""

import dataclasses
import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from elastic_registry import registry_status, worker_status
from thinwire.elastic.metrics import METRICS_PATH, RunMetrics

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "grafana"
DASHBOARD = json.loads((FOLDER / "thinwire.json").read_text())
PANELS = DASHBOARD["panels"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"thinwire_\w+")


def exported() -> dict[str, str]:
    """The type of every metric, by the name that queries give it."""
    counts = {"a": {"clipped": 1}}
    status = dataclasses.replace(registry_status(worker_status("a")), contributions=counts)
    families = RunMetrics(lambda: status).collect()
    return {sample.name: family.type for family in families for sample in family.samples}


def names(text: str) -> set[str]:
    return set(NAME.findall(text))


def test_every_metric_of_a_query_is_one_that_the_lighthouse_serves() -> None:
    kinds = exported()
    for query in (target["expr"] for target in TARGETS):
        assert names(query) <= set(kinds), query
        (name,) = names(query)
        # A counter says something by how fast it grows, and a gauge by itself.
        assert ("rate(" in query or "increase(" in query) == (kinds[name] == "counter"), query
    for variable in DASHBOARD["templating"]["list"]:
        assert names(str(variable)) <= set(kinds)


@pytest.mark.parametrize(
    "shown",
    [
        "thinwire_workers",
        "thinwire_worker_outer_step",
        "thinwire_worker_loss",
        "thinwire_worker_wait_seconds_total",
        "thinwire_worker_waiting_seconds",
        "thinwire_worker_sent_bytes_total",
        "thinwire_worker_received_bytes_total",
        "thinwire_refusals_total",
    ],
)
def test_what_matters_has_a_panel(shown: str) -> None:
    assert any(shown in names(target["expr"]) for target in TARGETS)


def test_the_page_names_all_metrics_and_no_others() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    assert names(page) == set(exported())


def test_grafana_10_finds_what_it_needs_to_import_it() -> None:
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] == 38  # that of Grafana 10; later ones migrate it
    assert "id" not in DASHBOARD  # one would replace another dashboard
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)


def test_it_asks_the_prometheus_and_the_lighthouse_that_are_chosen_there() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for asks in (*PANELS, *TARGETS, variables["lighthouse"]):
        assert asks["datasource"] == chosen
    builtin = {"__rate_interval", "__range"}
    for target in TARGETS:
        used = set(re.findall(r"\$(\w+)", target["expr"]))
        assert "lighthouse" in used
        assert used <= builtin | set(variables)


def test_no_panel_covers_another() -> None:
    def cells(panel: dict) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}

    for one, other in combinations(PANELS, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_prometheus_asks_where_the_page_has_the_lighthouse_serve() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == METRICS_PATH
    page = (ROOT / "docs" / "watching.md").read_text()
    for target in (target for config in job["static_configs"] for target in config["targets"]):
        assert f"--metrics {target}" in page
