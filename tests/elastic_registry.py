"""A registry of a test, and its clients."""

from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.elastic.registry_server import (
    RegistryClient,
    RegistryServer,
)
from thinwire.elastic.token import Token
from thinwire.membership import Progress

TOKEN = Token("a secret of many characters")


DESCRIPTION = {"method.sync_every": "5", "thinwire": "0.1.0"}


OTHER = DESCRIPTION | {"method.sync_every": "10"}


EXPIRY_S = 5.0


def at(version: int) -> Progress:
    return Progress(version=version, step=5 * version, digest=f"{version:064x}")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def registry_server(
    *, expiry_s: float = EXPIRY_S, port: int = 0, lines=None
) -> Iterator[RegistryServer]:
    server = RegistryServer(
        TOKEN,
        host="127.0.0.1",
        port=port,
        lighthouse_port=4321,
        heartbeat_timeout_s=expiry_s,
        on_event=([] if lines is None else lines).append,
    )
    try:
        yield server
    finally:
        server.close()


def client(
    port: int, identity: str, description=DESCRIPTION, token: Token = TOKEN
) -> RegistryClient:
    return RegistryClient(token, f"127.0.0.1:{port}", identity, description)
