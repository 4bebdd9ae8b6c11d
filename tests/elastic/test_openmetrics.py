"""What Prometheus reads, checked by the parser of its own Python client."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from elastic_registry import TOKEN, at, registry_status, worker_status
from thinwire.elastic.openmetrics import openmetrics_text
from thinwire.membership import WorkerMetrics


def samples(text: str) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_that_is_known_is_there_under_its_name() -> None:
    found = samples(openmetrics_text(registry_status(worker_status("a", finished=True))))
    assert found == {
        ("thinwire_workers", None): 1,
        ("thinwire_run_outer_step", None): 7,
        ("thinwire_run_inner_step", None): 35,
        ("thinwire_run_over", None): 1,
        ("thinwire_refusals_total", None): 3,
        ("thinwire_lighthouse_uptime_seconds", None): 61.25,
        ("thinwire_worker_outer_step", "a"): 6,
        ("thinwire_worker_inner_step", "a"): 30,
        ("thinwire_worker_finished", "a"): 1,
        ("thinwire_worker_heartbeat_age_seconds", "a"): 0.5,
        ("thinwire_worker_waiting_seconds", "a"): 4.5,
        ("thinwire_worker_wait_seconds_total", "a"): 1.5,
        ("thinwire_worker_sent_bytes_total", "a"): 2**53 + 2,
        ("thinwire_worker_received_bytes_total", "a"): 9,
        ("thinwire_worker_loss", "a"): 2.5,
        ("thinwire_worker_tokens_per_second", "a"): 1234.5,
    }


def test_what_a_worker_did_not_report_has_no_sample() -> None:
    silent = worker_status("b", WorkerMetrics(loss=0.0))
    found = samples(openmetrics_text(registry_status(worker_status("a"), silent)))
    of_b = {name.removeprefix("thinwire_worker_") for name, who in found if who == "b"}
    steps = {"outer_step", "inner_step", "finished", "heartbeat_age_seconds", "waiting_seconds"}
    assert of_b == steps | {"loss"}
    assert found["thinwire_worker_loss", "b"] == 0


def test_every_metric_says_what_it_is_and_names_its_unit() -> None:
    for family in text_string_to_metric_families(
        openmetrics_text(registry_status(worker_status("a")))
    ):
        assert family.name.startswith("thinwire_")
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")
        (unit,) = [u for u in ("seconds", "bytes", "") if family.name.endswith(u)][:1]
        # Not of seconds, but per second.
        assert family.unit == ("" if family.name.endswith("tokens_per_second") else unit)
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
def test_names_arrive_as_they_are(names: list[str]) -> None:
    found = samples(openmetrics_text(registry_status(*map(worker_status, names))))
    assert {who for name, who in found if name == "thinwire_worker_loss"} == set(names)


def test_a_name_that_looks_like_text_of_the_format_is_only_a_name() -> None:
    name = 'a"} 1\nthinwire_workers 9\\n# EOF'
    text = openmetrics_text(registry_status(worker_status(name)))
    assert samples(text)["thinwire_workers", None] == 1
    assert samples(text)["thinwire_worker_loss", name] == 2.5
    assert text.endswith("\n# EOF\n")
    assert [line for line in text.splitlines() if line.startswith("# EOF")] == ["# EOF"]


def test_contributions_are_counted_by_member_and_kind_also_of_those_that_left() -> None:
    counts = {'a"b': {"outlier": 2, "clipped": 5}, "gone": {"not finite": 1}}
    status = dataclasses.replace(registry_status(worker_status('a"b')), contributions=counts)
    families = text_string_to_metric_families(openmetrics_text(status))
    (family,) = [
        f for f in families if f.name == "thinwire_worker_contributions_rejected_or_clipped"
    ]
    found = {(s.labels["worker"], s.labels["kind"]): s.value for s in family.samples}
    assert found == {('a"b', "outlier"): 2, ('a"b', "clipped"): 5, ("gone", "not finite"): 1}


def test_nothing_secret_and_no_address_is_shown() -> None:
    text = openmetrics_text(registry_status(worker_status("a")))
    for hidden in ("n0nce", "10.0.0.1", "4000", at(6).digest, at(7).digest):
        assert hidden not in text
    assert "secret" not in text
    assert TOKEN.sign("x") not in text
