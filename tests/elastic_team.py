"""Elastic workers as real processes, and faults to inject into them."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import forked
from hub_process import Hub
from processes import HERE, free_port
from s3_server import Proxy, in_aws

TOKEN = "a token for tests, long enough"
LEAST_WAIT_S = 1.0


class Worker(forked.Forked):
    """A worker, or its first rank, as a process, and the records that it printed.

    `further` are its other ranks, and `arguments` those of the function `work` of its `Team`.
    """

    def __init__(
        self,
        identity: str,
        work: str,
        arguments: Sequence[Any],
        environment: Mapping[str, str],
        further: Sequence["Worker"],
    ) -> None:
        command = [str(HERE / "elastic_worker.py"), work, json.dumps(arguments)]
        super().__init__(command, os.environ | forked.ENVIRONMENT | environment)
        self.identity, self.ranks = identity, [self, *further]
        self._records, self._read = list[dict[str, Any]](), 0

    @property
    def records(self) -> list[dict[str, Any]]:
        told = self.stdout if self.gone else self.files[0].read_text()
        # A killed process may leave half a line.
        whole = told[self._read : told.rfind("\n") + 1]
        self._records += map(json.loads, whole.splitlines())
        self._read += len(whole)
        return self._records

    @property
    def gone(self) -> bool:
        return self.poll() is not None

    def send_to_all(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)

    @property
    def version(self) -> int:
        return max((t["version"] for t in self.records if "version" in t), default=0)

    @property
    def digest(self) -> str | None:
        return self.last("digest")

    def last(self, field: str) -> Any:
        """The first record with `field`, such as one of its end."""
        return next((t[field] for t in self.records if field in t), None)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found = [t["event"] for t in self.records if "event" in t]
        return [event for event in found if kind in ("", event["kind"])]

    def steps(self) -> list[dict[str, Any]]:
        return [t for t in self.records if "share" in t]

    def longest_stall_s(self, since: int = 0) -> float:
        """The longest time between two inner steps from version `since` on."""
        times = [t["at_s"] for t in self.steps() if t["version"] >= since]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Team:
    """Worker processes that share an object store and nothing else; ends all of them.

    The store is a folder of the test, a hub with the same token, or an S3 server over a connection
    that can be cut. Each worker runs `work`, MODULE.FUNCTION, with the team's and its own options.
    """

    def __init__(
        self,
        tmp_path: Path,
        *,
        endpoint: str | None = None,
        hub: Hub | None = None,
        work: str = "elastic_worker.work",
        **options: Any,
    ) -> None:
        self._work, self.options, self.hub = work, options, hub
        self._environment = {"THINWIRE_TOKEN": TOKEN}
        self.workers: list[Worker] = []
        self.url, self.is_cut = f"file://{tmp_path}/store", False
        self.proxy: Proxy | None = None
        if hub is not None:
            self.url = f"{hub.address}/run"
        if endpoint is not None:
            self.url = f"s3://run/{tmp_path.name}"
            self.proxy = Proxy(endpoint, lambda number, line: "cut" if self.is_cut else "")
            self._environment |= in_aws(self.proxy.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes():
            process.kill()
        if self.proxy is not None:
            self.proxy.close()

    def _processes(self) -> list[Worker]:
        return [rank for worker in self.workers for rank in worker.ranks]

    # -- actions -----------------------------------------------------------------------------------

    def cut_store(self, seconds: float) -> None:
        """Cut all workers off the store for that long."""
        assert self.proxy or self.hub
        self.is_cut = True
        if self.hub is not None:
            self.hub.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.is_cut = False
        if self.hub is not None:
            self.hub.process.send_signal(signal.SIGCONT)

    def start(
        self,
        identity: str,
        *,
        ranks: int = 1,
        of_rank: Mapping[int, dict[str, Any]] | None = None,
        **options: Any,
    ) -> Worker:
        """Start a worker, or restart one that was killed.

        Its model is sharded over `ranks` processes, each of which may have options of its own.
        """
        meeting = f"127.0.0.1:{free_port()}"
        started: list[Worker] = []
        for index in reversed(range(ranks)):
            sharded = {"ranks": (index, ranks, meeting)} if ranks > 1 else {}
            given = {**self.options, **options, **sharded, **(of_rank or {}).get(index, {})}
            arguments = self.url, identity, given
            started.insert(0, Worker(identity, self._work, arguments, self._environment, started))
        self.workers.append(started[0])
        return started[0]

    def start_all(self, *identities: str, **options: Any) -> list[Worker]:
        """Start workers, and wait until they have trained some rounds together."""
        workers = [self.start(identity, **options) for identity in identities]
        self.until(lambda: all(self.met(w, len(workers)) for w in workers))
        return workers

    def met(self, worker: Worker, workers: int) -> bool:
        """Whether `worker` has trained among that many."""
        return any(t["workers"] == workers and t["version"] for t in worker.steps())

    def until(self, what: Callable[[], Any], timeout_s: float = 40) -> None:
        """Wait for something to become true."""
        end_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end_s, f"it did not happen\n{self.report()}"
            time.sleep(0.01)

    def finish(self, timeout_s: float = 50) -> list[Worker]:
        """Wait for workers that were not killed to end well, with equal digests; returns them."""
        end_s = time.monotonic() + timeout_s
        alive = [w for w in self._processes() if w.poll() in (None, 0)]
        for worker in alive:
            worker.process.join(max(0.1, end_s - time.monotonic()))
            if not worker.gone:
                worker.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
            assert worker.poll() == 0, f"{worker.identity} did not end well\n{self.report()}"
        digests = {worker.digest for worker in alive}
        assert len(digests) == 1, f"digests differ: {digests}\n{self.report()}"
        assert None not in digests
        self.check_shares()
        return alive

    # -- observations ------------------------------------------------------------------------------

    def check_shares(self) -> None:
        """Check that no share was dealt to two workers, or read twice by a rank."""
        owners: dict[int, Worker] = {}
        for worker in self.workers:
            for rank in worker.ranks:
                read = [(line["share"], line["step"]) for line in rank.steps()]
                assert len(set(read)) == len(read), self.report()
                for share, _ in read:
                    assert owners.setdefault(share, worker) is worker, (share, self.report())

    def report(self) -> str:
        """What happened, for debugging."""
        lines = []
        for worker in self._processes():
            steps = worker.steps()
            lines.append(
                f"{worker.identity} status {worker.poll()} version {worker.version} digest "
                f"{str(worker.digest)[:8]} steps {len(steps)} last {steps[-1:]} "
                f"stall {worker.longest_stall_s():.2f} error {worker.last('error')}"
            )
            lines += [
                f"  {e['at_s'] % 1000:.2f} {e['round']} {e['kind']} {' '.join(e['who'])} "
                f"{e['why']} {e['lost_s']:.2f}"
                for e in worker.events()
                if e["kind"] != "committed"
            ]
            errors = worker.stderr if worker.gone else worker.files[1].read_text()
            lines.append(errors[-3000:])
        return "\n".join(lines)
