"""Elastic workers as real processes, and what can happen to them."""

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import forked
from hub_process import Hub
from processes import free_port
from s3_server import Proxy, in_aws

TOKEN = "a token for tests, long enough"
ENVIRONMENT = {**forked.ENVIRONMENT, "THINWIRE_TOKEN": TOKEN}
LEAST_WAIT_S = 1.0


def _enter(work: str, arguments: Sequence[Any], out: Any, errors: str, environment: dict) -> None:
    """In the forked process: what a shell would do, then `work`."""
    with Path(errors).open("w") as file:
        forked.write_to(out.fileno(), file.fileno())
    out.close()
    os.environ.update(environment)
    module, _, name = work.rpartition(".")
    getattr(importlib.import_module(module or "elastic_worker"), name)(*arguments)


class Worker:
    """A worker, or its first rank, as a process, and the records that it printed.

    Args:
        identity: its own.
        work: as that of `Team`.
        arguments: of it.
        errors: a file for its standard error.
        environment: beside this process's.
        further: its other ranks.
    """

    def __init__(
        self,
        identity: str,
        work: str,
        arguments: Sequence[Any],
        errors: Path,
        environment: Mapping[str, str],
        further: Sequence["Worker"],
    ) -> None:
        self.identity, self.further, self.errors = identity, further, errors
        self.records: list[dict[str, Any]] = []
        context = forked.context()
        reader, writer = context.Pipe(duplex=False)
        given = (work, arguments, writer, str(errors), ENVIRONMENT | environment)
        self.process: BaseProcess = context.Process(target=_enter, args=given)
        self.process.start()
        writer.close()
        self._stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._stdout:
            for line in self._stdout:
                # A killed process may leave half a line.
                if line.endswith("\n"):
                    self.records.append(json.loads(line))

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    @property
    def gone(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, that of a signal negative; None if it runs on."""
        self.process.join(timeout_s)
        if self.gone:
            self._reader.join(10)
        return self.process.exitcode

    def end(self) -> None:
        if not self.gone:
            self.send(signal.SIGCONT)
        self.kill()
        self._reader.join(10)
        self.process.close()

    @property
    def ranks(self) -> list["Worker"]:
        return [self, *self.further]

    def send_to_all(self, number: int) -> None:
        for rank in self.ranks:
            rank.send(number)

    def kill_all(self) -> None:
        for rank in self.ranks:
            rank.kill()

    @property
    def version(self) -> int:
        return max((t["version"] for t in list(self.records) if "version" in t), default=0)

    @property
    def digest(self) -> str | None:
        return self.last("digest")

    def last(self, field: str) -> Any:
        """The first record with `field`, such as those of its end."""
        return next((t[field] for t in list(self.records) if field in t), None)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found = [t["event"] for t in list(self.records) if "event" in t]
        return [event for event in found if kind in ("", event["kind"])]

    def steps(self) -> list[dict[str, Any]]:
        return [t for t in list(self.records) if "share" in t]

    def longest_stall_s(self) -> float:
        """Between two inner steps."""
        times = [t["at_s"] for t in self.steps()]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Team:
    """Workers, all of them processes, that share an object store and nothing else; ends them all.

    Args:
        tmp_path: of the test; the store is a folder in it, unless there is an endpoint or a hub.
        endpoint: of an S3 server, to which workers have a way that can be cut.
        hub: of the same token.
        environment: of all workers.
        work: what a worker does: a function of `elastic_worker`, or MODULE.FUNCTION.
        options: of all workers.
    """

    def __init__(
        self,
        tmp_path: Path,
        *,
        endpoint: str | None = None,
        hub: Hub | None = None,
        environment: Mapping[str, str] | None = None,
        work: str = "work",
        **options: Any,
    ) -> None:
        self._work, self._folder = work, tmp_path
        self._environment, self.options = dict(environment or {}), options
        self.workers: list[Worker] = []
        self.url, self.is_cut = f"file://{tmp_path}/store", False
        self.proxy: Proxy | None = None
        self.hub = hub
        if hub is not None:
            self.url = f"{hub.address}/run"
        if endpoint is not None:
            self.url = f"s3://run/{tmp_path.name}"
            self.proxy = Proxy(endpoint, lambda number, line: "cut" if self.is_cut else "")
            self._environment |= in_aws(self.proxy.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._processes():
            program.end()
        if self.proxy is not None:
            self.proxy.close()

    def _processes(self) -> list[Worker]:
        return [rank for worker in self.workers for rank in worker.ranks]

    # -- what can be done --------------------------------------------------------------------------

    def cut_store(self) -> None:
        """Let no worker reach the store until `mend_store`."""
        assert self.proxy or self.hub
        self.is_cut = True
        if self.hub is not None:
            self.hub.process.send_signal(signal.SIGSTOP)

    def mend_store(self) -> None:
        self.is_cut = False
        if self.hub is not None:
            self.hub.process.send_signal(signal.SIGCONT)

    def start(
        self,
        identity: str,
        *,
        ranks: int = 1,
        of_rank: Mapping[int, dict[str, Any]] | None = None,
        token: str = TOKEN,
        **options: Any,
    ) -> Worker:
        """Start a worker, or one again that was killed.

        Its model is sharded over `ranks` processes, of which each may have options of its own.
        """
        meeting = f"127.0.0.1:{free_port()}"
        environment = {"THINWIRE_TOKEN": token, **self._environment}
        further: list[Worker] = []
        for index in reversed(range(ranks)):
            sharded = {"ranks": (index, ranks, meeting)} if ranks > 1 else {}
            given = {**self.options, **options, **sharded, **(of_rank or {}).get(index, {})}
            arguments = self.url, identity, given
            errors = self._folder / f"{identity}-{len(self.workers)}-{index}.txt"
            worker = Worker(identity, self._work, arguments, errors, environment, tuple(further))
            further.insert(0, worker)
        self.workers.append(worker)
        return worker

    def start_all(self, *identities: str, **options: Any) -> list[Worker]:
        """Start workers, and wait until they have gone some rounds together."""
        workers = [self.start(identity, **options) for identity in identities]
        self.until(lambda: all(self.met(w, len(workers)) for w in workers))
        return workers

    def met(self, worker: Worker, workers: int) -> bool:
        """Whether `worker` has trained among so many."""
        return any(t["workers"] == workers and t["version"] for t in worker.steps())

    def until(self, what: Callable[[], Any], timeout_s: float = 40) -> Any:
        """Wait for something to become true."""
        end_s = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < end_s, f"it did not happen\n{self.report()}"
            time.sleep(0.01)
        return found

    def finish(self, timeout_s: float = 50) -> list[Worker]:
        """Wait for all that were not killed: they end well, with equal digests; returns them."""
        end_s = time.monotonic() + timeout_s
        alive = [w for w in self._processes() if w.process.exitcode in (None, 0)]
        for worker in alive:
            status = worker.wait(max(0.1, end_s - time.monotonic()))
            if status is None:
                worker.send(signal.SIGUSR1)
                time.sleep(0.5)
            assert status == 0, f"{worker.identity} ended with {status}\n{self.report()}"
        digests = {worker.digest for worker in alive}
        assert len(digests) == 1, f"digests differ: {digests}\n{self.report()}"
        assert None not in digests
        self.check_shares()
        return alive

    # -- what is to be seen ------------------------------------------------------------------------

    def check_shares(self) -> None:
        """No share was dealt to two processes, and none read twice by one."""
        owners: dict[int, int] = {}
        # All ranks of a worker read its share.
        processes = [(n, rank) for n, w in enumerate(self.workers) for rank in w.ranks]
        for number, process in processes:
            seen = set()
            for line in process.steps():
                share = line["share"]
                assert owners.setdefault(share, number) == number, (share, self.report())
                assert (share, line["step"]) not in seen, (share, line, self.report())
                seen.add((share, line["step"]))

    def report(self) -> str:
        """What happened, for finding out why."""
        lines = []
        for worker in self._processes():
            status = worker.process.exitcode
            steps = worker.steps()
            lines.append(
                f"{worker.identity} status {status} version {worker.version} digest "
                f"{str(worker.digest)[:8]} steps {len(steps)} last {steps[-1:]} "
                f"stall {worker.longest_stall_s():.2f}"
            )
            lines += [f"  error {worker.last('error')}"] if worker.last("error") else []
            lines += [
                f"  {e['at_s'] % 1000:.2f} {e['round']} {e['kind']} {' '.join(e['who'])} "
                f"{e['why']} {e['lost_s']:.2f}"
                for e in worker.events()
                if e["kind"] != "committed"
            ]
            lines.append(worker.errors.read_text()[-3000:] if worker.errors.exists() else "")
        return "\n".join(lines)
