"""What Prometheus reads of an elastic run, by the parser of its own Python client."""

import re
import socket
import urllib.request

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from processes import free_port
from thinwire.cli.status_page import bucket_page
from thinwire.elastic.metrics import RunMetrics, serve_metrics
from thinwire.elastic.roll import NewestState, View
from thinwire.elastic.watch import BucketStatus
from thinwire.errors import ConfigurationError, ExchangeError
from thinwire.membership import Progress, WorkerMetrics

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}
MEASURED = WorkerMetrics(
    loss=2.5, tokens_per_s=1234.5, sent_bytes=2**53 + 2, received_bytes=9, wait_s=1.5
)


def record_of(*names: str, age_s: float | None = 61.25, **metrics: WorkerMetrics) -> dict:
    """What `thinwire status --json` prints of a run whose newest roll says so."""
    view = View(
        number=9,
        names=names,
        phase="round",
        position=Progress(version=7, step=35, digest="d1ge5t", dealt=14),
        state=NewestState(version=4, roll=5, writer=names[0] if names else ""),
    )
    told = {f"{who}:n0nce": each for who, each in metrics.items()}
    status = BucketStatus(roll=view, roll_age_s=age_s, calls=(), metrics=told)
    return dict(bucket_page(status, "r").record)


def text_of(look) -> str:
    registry = CollectorRegistry()
    registry.register(RunMetrics(look if callable(look) else lambda: look))
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_has_its_name_unit_type_and_value() -> None:
    text = text_of(record_of("a:n0nce", a=MEASURED))
    assert samples(text) == {
        ("thinwire_store_up", None): 1,
        ("thinwire_workers", None): 1,
        ("thinwire_run_outer_step", None): 7,
        ("thinwire_run_inner_step", None): 35,
        ("thinwire_run_over", None): 0,
        ("thinwire_roll", None): 9,
        ("thinwire_roll_age_seconds", None): 61.25,
        ("thinwire_snapshot_outer_step", None): 4,
        ("thinwire_worker_outer_step", "a"): 7,
        ("thinwire_worker_inner_step", "a"): 35,
        ("thinwire_worker_wait_seconds_total", "a"): 1.5,
        ("thinwire_worker_sent_bytes_total", "a"): 2**53 + 2,
        ("thinwire_worker_received_bytes_total", "a"): 9,
        ("thinwire_worker_loss", "a"): 2.5,
        ("thinwire_worker_tokens_per_second", "a"): 1234.5,
    }
    # What it did not report has no sample.
    odd = 'b"} 1\nthinwire_workers 9\\n# EOF'
    found = samples(
        text_of(record_of("a:n0nce", f"{odd}:n0nce", age_s=None, **{odd: WorkerMetrics(loss=0.0)}))
    )
    of_b = {name.removeprefix("thinwire_worker_") for name, who in found if who == odd}
    assert of_b == {"outer_step", "inner_step", "loss"}
    assert found["thinwire_worker_loss", odd] == 0
    assert ("thinwire_roll_age_seconds", None) not in found
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        units = [u for u in ("seconds", "bytes") if family.name.endswith(u)]
        assert family.unit == "".join(units), family.name
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)
    for hidden in ("n0nce", "d1ge5t"):
        assert hidden not in text


def test_a_store_that_does_not_answer_is_down() -> None:
    def look() -> dict:
        raise ExchangeError("read", because="it is away", do="wait")

    assert samples(text_of(look)) == {("thinwire_store_up", None): 0}


def ask(url: str, **headers: str) -> tuple[str, str]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_request_gets_the_newest_also_after_garbage_and_beside_a_stall(capfd) -> None:
    losses = [3.5]
    with (
        serve_metrics(lambda: record_of("a:n0nce", a=WorkerMetrics(loss=losses[-1])), "0") as url,
        socket.create_connection(("127.0.0.1", port := int(url.split(":")[2].split("/")[0]))) as it,
    ):
        it.sendall(b"GET /met")
        for raw in (b"", b"\r\n\r\n", b"\x16\x03\x01" + bytes(range(256))):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
                other.sendall(raw)
                other.shutdown(socket.SHUT_WR)
                while other.recv(1 << 16):
                    pass
        kind, text = ask(url, **OPENMETRICS)
        assert kind.startswith("application/openmetrics-text; version=1.0.0;")
        assert samples(text)["thinwire_worker_loss", "a"] == 3.5
        losses.append(2.5)
        kind, text = ask(url)
        assert kind.startswith("text/plain")
        assert 'thinwire_worker_loss{worker="a"} 2.5\n' in text
    assert capfd.readouterr().err == ""


def test_an_address_that_cannot_be_listened_on_is_named_and_one_that_is_closed_is_free() -> None:
    port = free_port()
    with serve_metrics(record_of, str(port)):
        for where in (str(port), f"127.0.0.1:{port}", f"192.0.2.1:{port}"):
            named = f"serve metrics at {re.escape(where)}"
            with pytest.raises(ConfigurationError, match=named), serve_metrics(record_of, where):
                pass
    with serve_metrics(record_of, f"127.0.0.1:{port}") as url:
        assert url == f"http://127.0.0.1:{port}/metrics"
