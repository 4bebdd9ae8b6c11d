"""What Prometheus reads of an elastic run, by the parser of its own Python client."""

import dataclasses
import re
import socket
import urllib.request
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from elastic_registry import TOKEN, at, client, registry_server, registry_status, worker_status
from processes import free_port
from thinwire.elastic.metrics import RunMetrics, serve_metrics
from thinwire.errors import ConfigurationError
from thinwire.membership import WorkerMetrics

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}


def text_of(status) -> str:
    registry = CollectorRegistry()
    registry.register(RunMetrics(lambda: status))
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ask(port: int, **headers: str) -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_every_metric_has_its_name_unit_type_and_value() -> None:
    text = text_of(registry_status(worker_status("a", finished=True)))
    assert samples(text) == {
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
    silent = worker_status("b", WorkerMetrics(loss=0.0))  # what it did not report has no sample
    found = samples(text_of(registry_status(worker_status("a"), silent)))
    of_b = {name.removeprefix("thinwire_worker_") for name, who in found if who == "b"}
    steps = {"outer_step", "inner_step", "finished", "heartbeat_age_seconds", "waiting_seconds"}
    assert of_b == steps | {"loss"}
    assert found["thinwire_worker_loss", "b"] == 0
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        units = [u for u in ("seconds", "bytes") if family.name.endswith(u)]
        assert family.unit == "".join(units), family.name
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)
    for hidden in ("n0nce", "10.0.0.1", "4000", at(6).digest, at(7).digest, TOKEN.sign("x")):
        assert hidden not in text


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
def test_names_arrive_as_they_are(names: list[str]) -> None:
    names.append('a"} 1\nthinwire_workers 9\\n# EOF')
    found = samples(text_of(registry_status(*map(worker_status, names))))
    assert {who for name, who in found if name == "thinwire_worker_loss"} == set(names)
    assert found["thinwire_workers", None] == len(names)


def test_contributions_are_counted_by_member_and_kind_also_of_those_that_left() -> None:
    counts = {'a"b': {"outlier": 2, "clipped": 5}, "gone": {"not finite": 1}}
    status = dataclasses.replace(registry_status(worker_status('a"b')), contributions=counts)
    families = {f.name: f for f in text_string_to_metric_families(text_of(status))}
    family = families["thinwire_worker_contributions_rejected_or_clipped"]
    found = {(s.labels["worker"], s.labels["kind"]): s.value for s in family.samples}
    assert found == {('a"b', "outlier"): 2, ('a"b', "clipped"): 5, ("gone", "not finite"): 1}


def test_a_request_gets_what_workers_said_last_also_after_garbage_and_beside_a_stall(capfd) -> None:
    with registry_server() as registry:
        a = client(registry.port, 'a "b"')
        a.join(at(1), "10.0.0.1:4000")
        with (
            serve_metrics(registry.status, host="127.0.0.1", port=0) as port,
            socket.create_connection(("127.0.0.1", port)) as stalled,
        ):
            stalled.sendall(b"GET /met")
            for raw in (b"", b"\r\n\r\n", b"\x16\x03\x01" + bytes(range(256)), b"GET /\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
                    other.sendall(raw)
                    other.shutdown(socket.SHUT_WR)
                    while other.recv(1 << 16):
                        pass
            for loss in (3.5, 2.5):
                a.report(WorkerMetrics(loss=loss))
                a.heartbeat(at(2))
                kind, text = ask(port, **OPENMETRICS)
                assert kind.startswith("application/openmetrics-text; version=1.0.0;")
                assert samples(text)["thinwire_worker_loss", 'a "b"'] == loss
            kind, text = ask(port)
            assert kind.startswith("text/plain")
            assert 'thinwire_worker_loss{worker="a \\"b\\""} 2.5\n' in text
            a.leave()
            assert "thinwire_worker_loss{" not in ask(port)[1]
    assert capfd.readouterr().err == ""


def test_an_address_that_cannot_be_listened_on_is_named_and_one_that_is_closed_is_free() -> None:
    serve = partial(serve_metrics, lambda: registry_status(), port=free_port())
    with serve(host="127.0.0.1"):
        for host in ("127.0.0.1", "192.0.2.1"):
            named = f"serve metrics at {re.escape(host)}:"
            with pytest.raises(ConfigurationError, match=named), serve(host=host):
                pass
    with serve(host="127.0.0.1"):
        pass
