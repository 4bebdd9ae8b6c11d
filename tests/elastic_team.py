"""Elastic workers as real processes, and what can happen to them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from processes import HERE, free_port

TOKEN = "a token for tests, long enough"


def environment() -> dict[str, str]:
    return os.environ | {
        "THINWIRE_TOKEN": TOKEN,
        "RUST_LOG": "error",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Worker:
    """A process and what it told."""

    def __init__(self, process: subprocess.Popen, identity: str) -> None:
        self.process, self.identity = process, identity
        self.told: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            # A killed process may leave half a line.
            if line.endswith("\n"):
                self.told.append(json.loads(line))

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    @property
    def version(self) -> int:
        return max((t["version"] for t in list(self.told) if "version" in t), default=0)

    @property
    def digest(self) -> str | None:
        return next((t["digest"] for t in self.told if "digest" in t), None)

    @property
    def taken(self) -> int:
        return next(t["taken"] for t in self.told if "taken" in t)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = [t["event"] for t in list(self.told) if "event" in t]
        return [event for event in found if not kinds or event["kind"] in kinds]

    def steps(self) -> list[dict[str, Any]]:
        return [t for t in list(self.told) if "share" in t]

    def longest_stall_s(self) -> float:
        """Between two inner steps."""
        times = [t["at_s"] for t in self.steps()]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Team:
    """A lighthouse and workers, all of them processes; ends them all."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        heartbeat_s: float = 1.5,
        start=subprocess.Popen,
        host="127.0.0.1",
        **options: Any,
    ) -> None:
        self.address = f"{host}:{free_port_pair()}"
        self.options, self.heartbeat_s = options, heartbeat_s
        self._folder, self._start, self._host = tmp_path, start, host
        self.workers: list[Worker] = []
        self.lighthouse: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        self.light()
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.process.wait()
        self.put_out()

    def light(self) -> None:
        """Start the lighthouse."""
        command = [sys.executable, "-m", "thinwire", "lighthouse", "--bind", self.address]
        command += ["--heartbeat-timeout-s", str(self.heartbeat_s)]
        command += ["--join-timeout-s", "20"]
        self.lighthouse = self._start(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        first = self.lighthouse.stdout.readline()
        assert "ready" in first, first

    def put_out(self) -> None:
        """Kill it."""
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()
            self.lighthouse = None

    def start(self, identity: str, **options: Any) -> Worker:
        """Start a worker, or one again that was killed."""
        command = [sys.executable, str(HERE / "elastic_worker.py"), self.address, identity]
        command += [json.dumps({**self.options, **options})]
        with (self._folder / f"{identity}-{len(self.workers)}.txt").open("w") as errors:
            process = self._start(
                command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.workers.append(Worker(process, identity))
        return self.workers[-1]

    def errors(self) -> str:
        """What the workers wrote to standard error."""
        texts = [f"{file.name}:\n{file.read_text()}" for file in self._folder.glob("*.txt")]
        return "\n".join(texts)

    def until(self, what: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Wait for something to become true."""
        end_s = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < end_s, f"it did not happen\n{self.errors()}"
            time.sleep(0.01)
        return found

    def finish(self, timeout_s: float = 60) -> list[str]:
        """Wait for all that are not killed; returns their digests."""
        end_s = time.monotonic() + timeout_s
        alive = [worker for worker in self.workers if worker.process.returncode is None]
        for worker in alive:
            try:
                status = worker.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{worker.identity} hangs\n{self.errors()}") from None
            assert status == 0, f"{worker.identity} ended with {status}\n{self.errors()}"
        return [worker.digest for worker in alive]


def free_port_pair() -> int:
    """A port that is free, and the one above it, too."""
    import socket

    while True:
        port = free_port()
        try:
            with socket.socket() as above:
                above.bind(("127.0.0.1", port + 1))
        except OSError:
            continue
        return port
