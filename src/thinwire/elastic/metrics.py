"""The metrics of an elastic run, for Prometheus."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from thinwire.elastic.registry_server import RegistryStatus
from thinwire.errors import ConfigurationError
from thinwire.transport.address import address_text

METRICS_PATH = "/metrics"

# Names of counters end in _total, and before it in the unit, as those of gauges do.
_OF_THE_RUN = {
    "workers": "Workers that send heartbeats.",
    "run_outer_step": "Outer steps of the furthest state that a worker had.",
    "run_inner_step": "Inner steps of the schedule at that state.",
    "run_over": "1 once all steps of the run are taken.",
    "refusals_total": "Refused workers, rounds and requests; the same one once a minute.",
    "lighthouse_uptime_seconds": "Time since the lighthouse started.",
}
_OF_A_WORKER = {
    "worker_outer_step": "Outer steps that the worker's state has taken.",
    "worker_inner_step": "Inner step of the schedule that the worker is at.",
    "worker_finished": "1 once the worker has taken all its steps.",
    "worker_heartbeat_age_seconds": "Time since the worker's last heartbeat.",
    "worker_waiting_seconds": "Time it has waited for a round to begin, beyond what it allows.",
    "worker_wait_seconds_total": "Time spent waiting for rounds to begin and for exchanges.",
    "worker_sent_bytes_total": "Payload handed to the transport, metadata included.",
    "worker_received_bytes_total": "Payload that came from other workers.",
    "worker_loss": "Training loss that the worker reported last.",
    "worker_tokens_per_second": "Tokens that the worker reads.",
}
_CONTRIBUTIONS = {
    "worker_contributions_rejected_or_clipped_total": "Contributions rejected, or clipped."
}


_Rows: TypeAlias = dict[tuple[str, ...], Sequence[float | None]]  # by the values of the labels


class RunMetrics(Collector):
    """What a lighthouse knows of its run.

    A worker has no sample of a value that it did not report. Identities are the only names in it:
    no addresses, no digests, and not the token.

    Args:
        status: called at each collection, from any thread.
    """

    def __init__(self, status: Callable[[], RegistryStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All metrics, also those that have no sample yet."""
        status = self._status()
        run, workers = status.run, sorted(status.workers, key=lambda w: w.member.identity)
        values = len(workers), run.version, run.step, run.over, status.refusals, status.age_s
        yield from _families(_OF_THE_RUN, [], {(): values})
        of_workers: _Rows = {}
        for each in workers:
            member, measured = each.member, each.metrics
            of_workers[(member.identity,)] = (
                *(member.position.version, member.position.step, member.finished),
                *(each.heartbeat_age_s, member.waiting_s, measured.wait_s),
                *(measured.sent_bytes, measured.received_bytes),
                *(measured.loss, measured.tokens_per_s),
            )
        yield from _families(_OF_A_WORKER, ["worker"], of_workers)
        counts: _Rows = {
            (identity, kind): (count,)
            for identity, found in sorted(status.contributions.items())
            for kind, count in found.items()
        }
        yield from _families(_CONTRIBUTIONS, ["worker", "kind"], counts)


def _families(described: dict[str, str], labels: list[str], rows: _Rows) -> Iterator[Metric]:
    for place, (name, text) in enumerate(described.items()):
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        unit = name.removesuffix("_total").rpartition("_")[2]
        unit = unit if unit in ("seconds", "bytes") else ""
        family = kind(f"thinwire_{name}", text, labels=labels, unit=unit)
        for values, row in rows.items():
            if (value := row[place]) is not None:
                family.add_metric(values, value)
        yield family


@contextmanager
def serve_metrics(status: Callable[[], RegistryStatus], *, host: str, port: int) -> Generator[int]:
    """Answer GET to all that reach a port, in OpenMetrics if they accept it; yields the port.

    Args:
        status: called at each request, from any thread.
        host: address to listen on, and on no other.
        port: 0 takes any that is free.

    Raises:
        ConfigurationError: the port is taken, or this machine does not have the address.
    """
    registry = CollectorRegistry()
    registry.register(RunMetrics(status))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"serve metrics at {address_text(host, port)}",
            because=str(error),
            do="end the program that listens there, or choose an address of this machine with a "
            "free port",
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
