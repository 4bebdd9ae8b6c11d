"""The metrics of an elastic run over HTTP: GET /metrics, for Prometheus."""

import threading
from collections.abc import Callable
from typing import Final

from thinwire.elastic.http_server import HttpRequest, HttpResponse, HttpServer
from thinwire.elastic.openmetrics import CONTENT_TYPE, openmetrics_text
from thinwire.elastic.registry_server import RegistryStatus
from thinwire.errors import ConfigurationError
from thinwire.transport.address import address_text

METRICS_PATH: Final = "/metrics"
_REQUEST_S = 10.0
_PLAIN_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Answers GET /metrics to all that reach its port, until it is closed; it has no other path.

    It asks for no token and changes nothing.

    Args:
        status: returns what is to be shown; called from any thread.
        host: address to listen on, and on no other.
        port: 0 takes any that is free.

    Raises:
        ConfigurationError: the port is taken, or this machine does not have the address.
    """

    def __init__(self, status: Callable[[], RegistryStatus], *, host: str, port: int) -> None:
        self._status = status
        try:
            self._listener = HttpServer(
                host, port, self._respond, largest_request=0, request_s=_REQUEST_S
            )
        except OSError as error:
            raise ConfigurationError(
                f"serve metrics at {address_text(host, port)}",
                because=str(error),
                do="end the program that listens there, or choose an address of this machine with "
                "a free port",
            ) from error
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        if request.fault is not None:
            status, why = request.fault
            return _answer(status, f"{why}\n", _PLAIN_TEXT)
        # Some clients append parameters, which mean nothing here.
        if request.path.partition("?")[0] != METRICS_PATH:
            return _answer(404, f"only {METRICS_PATH} is here\n", _PLAIN_TEXT)
        if request.method != "GET":
            return _answer(405, f"{METRICS_PATH} is read with GET\n", _PLAIN_TEXT)
        return _answer(200, openmetrics_text(self._status()), CONTENT_TYPE)


def _answer(status: int, text: str, content_type: str) -> HttpResponse:
    body = text.encode()
    headers = {"Content-Type": content_type}
    return HttpResponse(status=status, headers=headers, length=len(body), pieces=[body])
