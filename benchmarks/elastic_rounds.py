"""What a round, a dead worker and a newcomer cost an elastic run: over a store, or a lighthouse.

python benchmarks/elastic_rounds.py OUT --old PATH      resumable; an hour on two quiet cores

PATH is a checkout of commit be66178, the last one in which workers meet at a lighthouse. Every case
runs with both engines, one after the other, as real processes over tools/wan.py (Linux, root), with
a node for the server and for each worker. Inner steps take a fixed time.

round      K workers: seconds of a round beyond its inner steps, bytes on a worker's line, requests
dead       one of three is killed in the middle of a round: seconds that the others lose
newcomer   a third worker joins two: seconds from join() to its first step, and what the others lose

`--only "round*store"` runs the cases whose names match, `--trace` writes every request to OUT.
"""

import argparse
import fnmatch
import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setting import write_runs

ROOT = Path(__file__).parents[1]
ENGINES = ("lighthouse", "store")
WARM_ROUNDS = 5
UP_S, PORT = 180.0, 29400
DELAY_S = 0.025
STATES = {"1 MB": (500, 1), "100 MB": (2500, 2), "1 GB": (2500, 20)}  # width and layers
BUSY_CORES = 0.3

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of one engine.

    Args:
        kind: "round", "dead" or "newcomer".
        engine: "lighthouse" or "store".
        workers: K, including the one that dies or comes.
        round_s: seconds of all inner steps of a round.
        every: H.
        payload: "fp32" or "2 bits".
        state: size of outer parameters and momentum.
        mbit: Mbit/s of every node's line.
        rounds: rounds to measure, or rounds before the event.
    """

    kind: str
    engine: str
    workers: int
    round_s: float
    every: int = 10
    payload: str = "2 bits"
    state: str = "1 MB"
    mbit: int = 100
    rounds: int = 4

    @property
    def name(self) -> str:
        what = f"{self.state}, {self.mbit} Mbit/s" if self.kind == "newcomer" else self.payload
        return f"{self.kind}, K={self.workers}, {self.round_s:g} s, {what}, {self.engine}"

    @property
    def folder(self) -> str:
        return self.name.replace("/", " per ")


def cases(rounds: int) -> Iterator[Case]:
    """All cases, with both engines one after the other."""
    calm = [
        {"kind": "round", "workers": workers, "round_s": round_s, "payload": payload}
        for workers in (2, 4)
        for round_s in (0.5, 2.0)
        for payload in ("fp32", "2 bits")
    ]
    dead = {"kind": "dead", "workers": 3}
    comes = {"kind": "newcomer", "workers": 3, "round_s": 5.0, "rounds": 3}
    settings: list[dict[str, Any]] = [
        *(case | {"rounds": rounds} for case in calm),
        dead | {"round_s": 2.0},
        comes | {"state": "100 MB", "mbit": 100},
        comes | {"state": "100 MB", "mbit": 1000},
        comes | {"state": "1 GB", "mbit": 1000},
        dead | {"round_s": 60.0, "every": 30, "rounds": 2},
    ]
    for setting in settings:
        for engine in ENGINES:
            yield Case(engine=engine, **setting)


# -- processes -------------------------------------------------------------------------------------


class Worker:
    """A process of elastic_rounds_worker.py, and what it reported."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self.process, self.errors = process, errors
        self.records: list[Record] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.endswith("\n"):
                self.records.append(json.loads(line))

    @property
    def steps(self) -> list[Record]:
        return [record for record in self.records if "step" in record]

    @property
    def is_ready(self) -> bool:
        return bool(self.records)

    @property
    def version(self) -> int:
        steps = self.steps
        return steps[-1]["version"] if steps else -1

    def join(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


class Run:
    """The processes of a case, while the `with` block lasts."""

    def __init__(self, case: Case, out: Path, old: Path, *, is_traced: bool) -> None:
        self.case, self._old, self._is_traced = case, old, is_traced
        self._folder = out / case.folder
        self._opened = ExitStack()
        self.workers: list[Worker] = []

    def __enter__(self) -> "Run":
        case = self.case
        self._folder.mkdir(parents=True, exist_ok=True)
        wan = importlib.import_module("wan")
        mtu = 9000 if case.mbit >= 1000 else 1500  # otherwise the emulator is the limit
        link = wan.Link(nodes=case.workers + 1, rate_bps=case.mbit * 1e6, delay_s=DELAY_S, mtu=mtu)
        with ExitStack() as opened:
            self._link = opened.enter_context(link)
            where, environment = opened.enter_context(self._server())
            for number in range(case.workers):
                self.workers.append(self._start(number, where, environment))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        for number, worker in enumerate(self.workers):
            worker.process.kill()
            if self._is_traced:
                lines = map(json.dumps, list(worker.records))
                (self._folder / f"{number}.jsonl").write_text("\n".join(lines))
        self._opened.close()

    @contextmanager
    def _server(self) -> Iterator[tuple[str, dict[str, str]]]:
        """The address where workers meet, and the environment variables for it."""
        host = self._link.addresses[0]
        token = {"THINWIRE_TOKEN": "a token of a benchmark, long enough"}
        if self.case.engine == "store":
            s3_server = importlib.import_module("s3_server")
            within = ("ip", "netns", "exec", self._link.namespaces[0])
            with (
                TemporaryDirectory() as folder,
                s3_server.s3_server(Path(folder), host=host, within=within) as endpoint,
            ):
                environment = s3_server.in_aws(endpoint) | {"PYTHONPATH": str(ROOT / "src")}
                yield f"s3://run/{time.time_ns()}", token | environment
            return
        environment = token | {"PYTHONPATH": str(self._old / "src"), "RUST_LOG": "error"}
        command = [sys.executable, "-m", "thinwire", "lighthouse", f"--bind=0.0.0.0:{PORT}"]
        command += [f"--public={host}"]
        with (self._folder / "lighthouse.txt").open("w+") as log:
            server = self._link.popen(0, command, env=environment, stdout=log, stderr=log)
            until(lambda: os.fstat(log.fileno()).st_size > 0, [server], UP_S)
            yield f"{host}:{PORT}", environment

    def _start(self, number: int, where: str, environment: Mapping[str, str]) -> Worker:
        case = self.case
        is_newcomer = case.kind == "newcomer" and number == case.workers - 1
        given = {
            "engine": case.engine,
            "where": where,
            "name": f"w{number}",
            # Not the values that the run began with, so that a newcomer needs a snapshot.
            "seed": int(is_newcomer),
            "model": STATES[case.state],
            "payload": case.payload,
            "every": case.every,
            "step_s": case.round_s / case.every,
            "min_workers": case.workers if case.kind == "round" else 2,
            "trace": self._is_traced and case.engine == "store",
        }
        errors = self._folder / f"{number}.txt"
        command = [sys.executable, str(ROOT / "benchmarks/elastic_rounds_worker.py")]
        with errors.open("w") as log:
            process = self._link.popen(
                number + 1,
                [*command, json.dumps(given)],
                env=dict(environment) | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return Worker(process, errors)

    def until(
        self, condition: Callable[[], bool], within_s: float, *, of: Sequence[Worker]
    ) -> None:
        """Wait until `condition` holds, as long as the workers `of` live."""
        try:
            until(condition, [worker.process for worker in of], within_s)
        except RuntimeError as error:
            last = [worker.errors.read_text()[-2000:] for worker in of]
            raise SystemExit("\n".join([f"{self.case.name}: {error}", *last])) from error


def until(condition: Callable[[], bool], processes: Sequence[Any], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a process has ended")
        if time.monotonic() > until_s:
            raise RuntimeError(f"it takes more than {within_s:g} s")
        time.sleep(0.005)


def busy_cores() -> float:
    """Cores that other processes use while this one waits."""

    def idle_and_all() -> tuple[int, int]:
        fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    idle, total = idle_and_all()
    time.sleep(3.0)
    idle_then, total_then = idle_and_all()
    return round((os.cpu_count() or 1) * (1 - (idle_then - idle) / (total_then - total)), 2)


# -- what happens ----------------------------------------------------------------------------------


def measured(case: Case, out: Path, old: Path, *, is_traced: bool) -> dict[str, Any]:
    load, before = Path("/proc/loadavg").read_text().split()[0], busy_cores()
    with Run(case, out, old, is_traced=is_traced) as run:
        run.until(lambda: all(worker.is_ready for worker in run.workers), UP_S, of=run.workers)
        found = {"round": undisturbed, "dead": one_dies, "newcomer": one_comes}[case.kind](run)
    after = busy_cores()
    busy = {"loadavg_1min_before": float(load), "others_cores": [before, after]}
    return found | busy | {"machine_was_busy": max(before, after) > BUSY_CORES}


def undisturbed(run: Run) -> dict[str, Any]:
    case, workers = run.case, run.workers
    for worker in workers:
        worker.join()
    last = WARM_ROUNDS + case.rounds
    patience_s = UP_S + last * (case.round_s + 10)
    run.until(lambda: min(w.version for w in workers) > last, patience_s, of=workers)
    each = [rounds_of(worker.steps)[WARM_ROUNDS:last] for worker in workers]
    together = [round for rounds in each for round in rounds]

    def median(key: str) -> float:
        return statistics.median(round[key] for round in together)

    return {
        "overhead_s": spread([round["overhead_s"] for round in together]),
        "overhead_s by worker": [spread([r["overhead_s"] for r in rounds]) for rounds in each],
        "waiting_s": median("wait_s"),
        "sent_bytes": median("sent"),
        "received_bytes": median("received"),
        "requests": {
            kind: round(statistics.fmean(r["requests"].get(kind, 0) for r in together), 1)
            for kind in together[0]["requests"]
        },
        "rounds": len(each[0]),
    }


def one_dies(run: Run) -> dict[str, Any]:
    case, (victim, *others) = run.case, run.workers
    for worker in run.workers:
        worker.join()

    def is_midway() -> bool:
        steps = victim.steps
        midway = case.every // 2
        return (
            bool(steps)
            and victim.version >= case.rounds
            and steps[-1]["step"] % case.every == midway
        )

    run.until(is_midway, UP_S + (case.rounds + 1) * (case.round_s + 10), of=run.workers)
    victim.process.kill()
    killed_s, version = time.monotonic(), victim.version
    after = version + (2 if case.round_s > 10 else 4)
    run.until(lambda: min(w.version for w in others) >= after, UP_S + 5 * case.round_s, of=others)
    return lost(others, killed_s)


def one_comes(run: Run) -> dict[str, Any]:
    case, (*pair, newcomer) = run.case, run.workers
    for worker in pair:
        worker.join()
    within_s = 4 * UP_S
    run.until(lambda: min(w.version for w in pair) >= case.rounds, within_s, of=run.workers)
    newcomer.join()
    joins_s = time.monotonic()
    run.until(lambda: bool(newcomer.steps), within_s, of=run.workers)
    first = newcomer.steps[0]
    after = first["version"] + 2
    run.until(lambda: min(w.version for w in run.workers) >= after, within_s, of=run.workers)
    joined = {"join_s": round(first["began_s"] - first["joins_s"], 2)}
    return joined | lost(pair, joins_s)


def rounds_of(steps: Sequence[Record]) -> list[dict[str, Any]]:
    """What each round cost beyond its inner steps, except the last, which has not ended.

    A round begins with the first step after an outer step, so a round that is discarded and
    repeated counts as one.
    """
    firsts = [n for n, s in enumerate(steps) if n == 0 or s["version"] != steps[n - 1]["version"]]
    found: list[dict[str, Any]] = []
    for first, end in pairwise(firsts):
        a, b = steps[first], steps[end]
        gaps = [steps[n + 1]["began_s"] - steps[n]["ended_s"] for n in range(first, end)]
        done = {k: n - a["requests"].get(k, 0) for k, n in b["requests"].items()}
        counted = {key: b[key] - a[key] for key in ("wait_s", "sent", "received")}
        ends = {"ended_s": b["began_s"], "longest_s": max(gaps), "requests": done}
        found.append({"overhead_s": sum(gaps), **counted, **ends})
    return found


def lost(workers: Sequence[Worker], since_s: float) -> dict[str, Any]:
    """Seconds that each of `workers` lost since `since_s`, relative to its earlier rounds."""
    found: dict[str, list[float]] = {"usual_s": [], "longest_gap_s": [], "lost_s": []}
    for worker in workers:
        rounds = rounds_of(worker.steps)
        # The first round waits for all workers to come.
        usual_s = statistics.median(r["overhead_s"] for r in rounds[1:] if r["ended_s"] < since_s)
        later = [round for round in rounds if round["ended_s"] >= since_s]
        found["usual_s"].append(round(usual_s, 2))
        found["longest_gap_s"].append(round(max(r["longest_s"] for r in later) - usual_s, 2))
        found["lost_s"].append(round(sum(r["overhead_s"] - usual_s for r in later), 2))
    return found


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered), 3),
        "90 %": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 3),
    }


# -- all of them -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the cases' results")
    parser.add_argument("--old", type=Path, required=True, help="a checkout of commit be66178")
    parser.add_argument("--only", default="*", help="pattern of names of cases, as 'round*store'")
    parser.add_argument("--rounds", type=int, default=25, help="measured where nothing happens")
    parser.add_argument("--trace", action="store_true", help="write all requests to OUT")
    given = parser.parse_args()
    sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[Case, dict[str, Any]] = {}
    for case in cases(given.rounds):
        file = given.out / f"{case.folder}.json"
        if not file.exists() and fnmatch.fnmatch(case.name, given.only):
            result = measured(case, given.out, given.old, is_traced=given.trace)
            file.write_text(json.dumps(result, indent=2))
            print(f"{case.name}: {json.dumps(result)}", flush=True)
        if file.exists():
            found[case] = json.loads(file.read_text())
    print(table(found))
    write_runs(
        __file__,
        str(__doc__).splitlines()[0],
        {case.name: [asdict(case) | result] for case, result in found.items()},
        command="python benchmarks/elastic_rounds.py OUT --old CHECKOUT_OF_be66178",
        line={"one_way_s": DELAY_S, "mtu": "1500; 9000 at 1000 Mbit/s"},
        table=table(found).splitlines(),
    )


def table(found: Mapping[Case, Mapping[str, Any]]) -> str:
    """The cost of each case, with both engines side by side."""
    rows = [f"| case | {' | '.join(ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    by_name = {case.name: told(case, result) for case, result in found.items()}
    for case in (case for case in cases(1) if case.engine == ENGINES[0]):
        what = case.name.removesuffix(f", {ENGINES[0]}")
        cells = [by_name.get(f"{what}, {engine}", "") for engine in ENGINES]
        rows += [f"| {what} | {' | '.join(cells)} |"] if any(cells) else []
    return "\n".join(rows)


def told(case: Case, result: Mapping[str, Any]) -> str:
    if case.kind == "round":
        seconds = result["overhead_s"]
        up, down = result["sent_bytes"] / 1e6, result["received_bytes"] / 1e6
        asked = sum(result["requests"].values())
        text = f"{seconds['median']:.2f} s (90 %: {seconds['90 %']:.2f}), "
        text += f"{up:.2f} MB up, {down:.2f} down"
        return text + (f", {asked:.0f} requests" if asked else "")
    others = (
        f"others lose {max(result['lost_s']):.1f} s (longest {max(result['longest_gap_s']):.1f})"
    )
    return others if case.kind == "dead" else f"joins in {result['join_s']:.1f} s, {others}"


if __name__ == "__main__":
    main()
