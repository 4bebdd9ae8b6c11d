"""The metrics of an elastic run, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from thinwire.errors import ConfigurationError, ExchangeError
from thinwire.transport.address import address_text, split_address

Record: TypeAlias = Mapping[str, Any]

# Names end in the unit, those of counters in _total after it. The text is followed by the path of
# the value in the output of `thinwire status --json`.
_OF_THE_RUN = {
    "store_up": ("1 while the store answers; without it there is nothing else.", "up"),
    "workers": ("Workers that take part, or wait to.", "count"),
    "run_outer_step": ("Outer steps of the run.", "run", "version"),
    "run_inner_step": ("Inner steps of the schedule.", "run", "step"),
    "run_over": ("1 once all steps of the run are taken.", "run", "over"),
    "roll": ("Number of the newest roll.", "roll"),
    "roll_age_seconds": ("Time since it was written.", "age_s"),
    "snapshot_outer_step": ("Outer step of the newest snapshot.", "snapshot"),
}
_OF_A_WORKER = {
    "worker_outer_step": ("Outer steps that the worker's state has taken.", "position", "version"),
    "worker_inner_step": ("Inner step that the worker is at.", "position", "step"),
    "worker_wait_seconds_total": ("Time spent waiting for others.", "metrics", "wait_s"),
    "worker_sent_bytes_total": ("Payload sent, with metadata.", "metrics", "sent_bytes"),
    "worker_received_bytes_total": ("Payload received.", "metrics", "received_bytes"),
    "worker_loss": ("Training loss that the worker reported last.", "metrics", "loss"),
    "worker_tokens_per_second": ("Tokens that the worker reads.", "metrics", "tokens_per_s"),
    "worker_age_seconds": ("Time since the worker's last sign of life.", "age_s"),
}


class RunMetrics(Collector):
    """The state of a run in an object store, read at each collection.

    A worker has no sample of an unknown value. Identities are the only names in it: no digests, no
    token.

    Args:
        look: returns what `thinwire status --json` prints; called from any thread.
    """

    def __init__(self, look: Callable[[], Record]) -> None:
        self._look, self._lock = look, threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, even those that have no sample yet."""
        record: dict[str, Any] = {"up": 0, "workers": []}
        with suppress(ExchangeError), self._lock:  # the store may come back
            record = {"up": 1, **self._look()}
            record["count"] = len(record["workers"])
        yield from _families(_OF_THE_RUN, {None: record})
        yield from _families(_OF_A_WORKER, {each["identity"]: each for each in record["workers"]})


def _families(
    described: Mapping[str, Sequence[str]], records: Mapping[str | None, Record]
) -> Iterator[Metric]:
    """Yield a metric per name, with a sample per record that has a value; key None is the run."""
    labels = [] if None in records else ["worker"]
    for name, (text, *path) in described.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        unit = name.removesuffix("_total").rpartition("_")[2]
        unit = unit if unit in ("seconds", "bytes") else ""
        family = kind(f"thinwire_{name}", text, labels=labels, unit=unit)
        for who, record in records.items():
            value: Any = record
            for key in path:
                value = (value or {}).get(key)
            if value is not None:
                family.add_metric([] if who is None else [who], value)
        yield family


@contextmanager
def serve_metrics(look: Callable[[], Record], where: str) -> Generator[str]:
    """Serve metrics to anyone who reaches a port, in OpenMetrics if asked; yields the URL.

    Args:
        look: returns what `thinwire status --json` prints; called at each request.
        where: HOST:PORT to listen on, or a port of 127.0.0.1; 0 takes any that is free.

    Raises:
        ConfigurationError: the port is taken, or this machine does not have the address.
    """
    host, port = split_address(where if ":" in where else f"127.0.0.1:{where}")
    registry = CollectorRegistry()
    registry.register(RunMetrics(look))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"serve metrics at {where}",
            because=str(error),
            do="end the program that listens there, or choose an address of this machine with a "
            "free port",
        ) from error
    try:
        yield f"http://{address_text(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
