"""The metrics over HTTP."""

import http.client
import socket

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from elastic_registry import at, client, registry_server
from processes import free_port
from thinwire.elastic.metrics_server import MetricsServer
from thinwire.errors import ConfigurationError
from thinwire.membership import WorkerMetrics


@pytest.fixture
def watched():
    """A registry, and the port of its metrics."""
    with registry_server() as registry:
        metrics = MetricsServer(registry.status, host="127.0.0.1", port=0)
        try:
            yield registry, metrics.port
        finally:
            metrics.close()


def ask(port: int, path: str, method: str = "GET", body: bytes | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body=body)
    response = connection.getresponse()
    return response, response.read().decode()


def test_prometheus_reads_what_workers_said_last(watched) -> None:
    registry, port = watched
    a = client(registry.port, 'a "b"')
    a.join(at(1), "10.0.0.1:4000")
    for loss in (3.5, 2.5):
        a.report(WorkerMetrics(loss=loss))
        a.heartbeat(at(2))
        response, text = ask(port, "/metrics")
        assert response.status == 200
        media, *parameters = response.headers["Content-Type"].split("; ")
        assert media == "application/openmetrics-text"
        assert set(parameters) == {"version=1.0.0", "charset=utf-8"}
        (sample,) = next(
            family.samples
            for family in text_string_to_metric_families(text)
            if family.name == "thinwire_worker_loss"
        )
        assert (sample.labels, sample.value) == ({"worker": 'a "b"'}, loss)
    a.leave()
    assert "thinwire_worker_loss{" not in ask(port, "/metrics")[1]
    assert ask(port, "/metrics?x=1")[0].status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/peers", None, 404),
        ("GET", "/metrics/x", None, 404),
        ("POST", "/metrics", b"", 405),
        ("POST", "/metrics", b"x", 413),
        ("POST", "/leave", b'{"identity": "a"}', 413),
        ("GET", "/metrics", b"x", 413),
        ("DELETE", "/metrics", None, 501),
    ],
)
def test_it_has_one_path_and_takes_nothing(watched, method, path, body, status: int) -> None:
    registry, port = watched
    client(registry.port, "a").join(at(1), "10.0.0.1:4000")
    assert ask(port, path, method, body)[0].status == status
    assert len(registry.status().workers) == 1


def test_garbage_and_clients_that_stall_are_survived(watched, capfd) -> None:
    _, port = watched
    with socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(b"GET /met")
        for raw in (b"", b"\r\n\r\n", b"\x16\x03\x01" + bytes(range(256)), b"GET /metrics\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
                other.sendall(raw)
                other.shutdown(socket.SHUT_WR)
                while other.recv(1 << 16):
                    pass
        assert ask(port, "/metrics")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named_and_one_that_is_closed_is_free() -> None:
    port = free_port()
    with registry_server() as registry:
        first = MetricsServer(registry.status, host="127.0.0.1", port=port)
        with pytest.raises(ConfigurationError, match=rf"serve metrics at 127\.0\.0\.1:{port}"):
            MetricsServer(registry.status, host="127.0.0.1", port=port)
        first.close()
        MetricsServer(registry.status, host="127.0.0.1", port=port).close()


def test_an_address_that_this_machine_does_not_have_is_an_error() -> None:
    with (
        registry_server() as registry,
        pytest.raises(ConfigurationError, match="an address of this machine"),
    ):
        MetricsServer(registry.status, host="192.0.2.1", port=0)
