"""A registry of a test, and its clients."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thinwire.elastic.quorum import Member
from thinwire.elastic.registry import MemberStatus
from thinwire.elastic.registry_server import RegistryClient, RegistryServer, RegistryStatus
from thinwire.membership import Progress, WorkerMetrics
from thinwire.security.token import Token

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


MEASURED = WorkerMetrics(
    loss=2.5, tokens_per_s=1234.5, sent_bytes=2**53 + 2, received_bytes=9, wait_s=1.5
)


def worker_status(identity: str, metrics: WorkerMetrics = MEASURED, **fields: Any) -> MemberStatus:
    known = {"nonce": "n0nce", "address": "10.0.0.1:4000", "position": at(6), "waiting_s": 4.5}
    member = Member(identity=identity, **known | fields)
    return MemberStatus(member=member, metrics=metrics, heartbeat_age_s=0.5)


def registry_status(*workers: MemberStatus) -> RegistryStatus:
    run = dataclasses.replace(at(7), over=True)
    return RegistryStatus(workers=workers, run=run, refusals=3, age_s=61.25)
