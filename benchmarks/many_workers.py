"""What a round costs as the workers of an elastic run become many: requests, bytes and seconds.

python benchmarks/many_workers.py OUT       resumable

Whole sessions of tests/elastic_simulation.py, under a virtual clock, over a store in memory whose
requests take 30 ms: five rounds with 30 to 33 s of training. With churn, a share of the workers is
killed in each round, and as many new ones come. many_workers_real.py uses real processes.
"""

import gc
import json
import logging
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from setting import write_runs

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from elastic_simulation import Fault, Setup, Simulation
from thinwire.elastic import session
from thinwire.elastic.roll import View
from thinwire.membership import WorkerMetrics
from virtual_time import StoreFaults, VirtualStore

LATENCY_S, TRAIN_S, ROUNDS, FLOOR_S = 0.03, 30.0, 5, 10.0
CHURN = (0.0, 0.01, 0.1)
CASES = [("gather", k, churn) for k in (8, 64) for churn in CHURN]
CASES += [("gather", 256, 0.0), ("gather", 256, 0.1)]
CASES += [("scatter", k, churn) for k in (8, 64) for churn in (0.0, 0.1)]
CASES += [("scatter", 256, churn) for churn in CHURN]
CASES += [(kind, 1024, churn) for kind in ("gather", "scatter") for churn in (0.0, 0.1)]
REQUESTS, MEETING = ("put", "ask", "head", "list"), ("call", "roll", "alive")
METRICS = WorkerMetrics(
    loss=2.345678, tokens_per_s=12345.67, sent_bytes=10**9, received_bytes=10**11, wait_s=123.4
)


class CountedStore(VirtualStore):
    """Counts each worker's requests by the number of the newest roll at that time."""

    roll = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: dict[int, dict[Any, Counter[Any]]] = defaultdict(lambda: defaultdict(Counter))
        self.awaits: dict[Any, str] = {}  # the number of the roll that a worker reported for
        self.last_s: dict[tuple[str, str], float] = {}  # of a report, and of its roll's arrival

    def _note(self, store: Any, what: str, key: str, nbytes: int = 0, count: int = 1) -> None:
        _, area, number, *_ = (*key.split("/"), "", "")
        counts = self.counts[self.roll][store]
        counts[what, area] += count
        counts[f"{what} bytes", area] += nbytes
        # A newcomer may report for a roll written before it came.
        if (what, area) == ("put", "call") and int(number) > self.roll:
            self.awaits[store] = number
        # Only if the worker waits for that roll: workers that heal read it later.
        if self.awaits.get(store) == number:
            self.last_s[f"{what} {area}", number] = self._loop.time()
            if (what, area) == ("get", "roll"):
                del self.awaits[store]

    async def put_async(self, store: Any, key: str, parts: Any, **options: Any) -> None:
        self._note(store, "put", key, sum(map(len, parts)))
        await super().put_async(store, key, parts, **options)
        self.roll = max(self.roll, int(key[-8:])) if "/roll/" in key else self.roll

    async def get_range_async(self, store: Any, key: str, **options: Any) -> bytes:
        self._note(store, "ask", key)  # the object may not exist yet
        found = await super().get_range_async(store, key, **options)
        self._note(store, "get", key, len(found))
        return found

    def head_async(self, store: Any, key: str) -> Any:
        self._note(store, "head", key)
        return super().head_async(store, key)

    async def list(self, store: Any, prefix: str, **options: Any) -> Any:
        found = [each async for page in super().list(store, prefix, **options) for each in page]
        self._note(store, "list", prefix, count=max(1, -(-len(found) // 1000)))
        yield found


def simulated(kind: str, workers: int, churn: float) -> dict[str, Any]:
    """One run, and the requests of its rounds to the store."""
    random, victims = Random(workers), round(churn * workers + 0.4)
    dead = random.sample(range(workers), victims * ROUNDS)
    # In each round the others wait for a dead worker.
    round_s = TRAIN_S + 1.4 * FLOOR_S
    at_s = [5.0 + (n // victims + random.random()) * round_s for n in range(len(dead))]
    killed = [
        Fault(kind="kill", slot=n, at_s=s, back="never") for n, s in zip(dead, at_s, strict=True)
    ]
    setup = Setup(
        **{"seed": workers, "rounds": ROUNDS, "left_over": 0, "fragments": 1, "min_workers": 1},
        **{"train_s": TRAIN_S, "spread": 0.1, "floor_s": FLOOR_S, "snapshot_after": 4.0},
        starts_s=[*(random.random() for _ in range(workers)), *at_s],
        kind="scatter" if kind == "scatter" else "gather",
        checkpoints=0.0,
        store=StoreFaults(latency_s=LATENCY_S / 2),  # each way
        faults=killed,
    )
    simulation = Simulation(setup)
    world = (simulation.loop, Random(1), setup.store, simulation._wrote)
    simulation.store = store = CountedStore(*world)
    began_s = time.process_time()
    with patch.object(session, "WorkerMetrics", lambda: METRICS):
        simulation.run()
    cpu_s = round(time.process_time() - began_s)
    return {"workers": workers, "cpu_s": cpu_s, **told(store, simulation.checks.rolls)}


def told(store: CountedStore, rolls: Sequence[View]) -> dict[str, Any]:
    """Requests of a round to the store, from the third roll until training ended."""
    numbers = range(3, next(n.number for n in rolls if n.number > 2 and n.phase != "round"))
    versions, last_s = [roll.position.version for roll in rolls], store.last_s
    every = [of for n in numbers for of in store.counts[n].values()]
    whole, rounds = sum(every, Counter[Any]()), len(numbers)
    times = [last_s["get roll", f"{n:08}"] - last_s["put call", f"{n:08}"] for n in numbers]

    def of(is_asked: Callable[[str, str], bool], some: Iterable[Counter[Any]] = every) -> Any:
        sums = [sum(n for kind, n in each.items() if is_asked(*kind)) for each in some]
        return {"median": statistics.median(sums), "most": max(sums), "all": sum(sums) / rounds}

    return {
        "members": [len(roll.names) for roll in rolls],
        "rounds_lost": sum(a == b for a, b in pairwise(versions[1:])),
        "meet_s": round(statistics.median(times), 2),
        "first_meeting": of(lambda op, _: op in REQUESTS, store.counts[0].values())["most"],
        "meeting_requests": of(lambda op, area: area in MEETING and op in REQUESTS),
        "meeting_bytes": of(lambda op, area: area in MEETING and " " in op),
        "messages": of(lambda op, area: area == "message" and op in ("put", "get")),
        "a_round": {" ".join(kind): n / rounds for kind, n in sorted(whole.items())},
    }


def case_name(exchange: str, workers: int, churn: float) -> str:
    return f"{exchange}, {workers} workers, {churn:.0%} churn"


def cells(exchange: str, churn: float, row: dict[str, Any]) -> str:
    """A line of the table in docs/scaling.md."""

    def size(nbytes: float) -> str:
        return f"{nbytes / 1e3:.1f} kB" if nbytes < 9950 else f"{nbytes / 1e3:,.0f} kB"

    asked, moved = row["meeting_requests"], row["meeting_bytes"]
    return " | ".join(
        [
            f"{row['workers']:,}",
            "reduce-scatter" if exchange == "scatter" else exchange,
            {0.0: "none", 0.01: "a hundredth", 0.1: "a tenth"}[churn],
            *(f"{n:,.0f}" for n in (row["messages"]["median"], asked["median"], asked["most"])),
            *(size(n) for n in (moved["median"], moved["most"])),
            f"{row['meet_s']:.1f}",
            f"{row['rounds_lost']}",
        ]
    )


def main() -> None:
    out, runs = Path(sys.argv[1]), dict[str, list[dict[str, Any]]]()
    out.mkdir(parents=True, exist_ok=True)
    for kind, workers, churn in CASES:
        file = out / f"{kind}-{workers}-{churn:g}.json"
        if not file.exists():
            file.write_text(json.dumps(simulated(kind, workers, churn)))
        row = json.loads(file.read_text())
        print(f"| {cells(kind, churn, row)} |", flush=True)
        runs[case_name(kind, workers, churn)] = [row]
        write_runs(__file__, str(__doc__).splitlines()[0], runs)


if __name__ == "__main__":
    logging.disable()
    gc.set_threshold(100_000, 50, 100)  # without it, 256 workers take 7 GB
    main()
