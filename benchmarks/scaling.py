"""Up to a thousand workers: at which K does another one stop paying?

python benchmarks/scaling.py OUT       simulated; seconds on one core; OUT gets pictures

A model of a billion parameters in 24 layers, 30 inner steps of 1 s a round, links of 1 Gbit/s and
30 ms. Messages are those that a run would send. In pairs, two workers exchange payloads as large as
a gather's and wait for no third; what that costs in loss is not in these figures.

Work is K times the utilisation: how many undisturbed workers the K are worth. Doubling the workers
pays as long as they do at least 1.5 times the work.

With stragglers, steps vary by 10 % (log-normal), and in every round one worker in a hundred is
three times as slow. Means of three seeds, 20 rounds each. If a round waits for 19 of 20 workers,
the others give up the rest of their steps and join the next round.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from picture import COLOURS, write_picture
from setting import setting
from thinwire import exchange, feedback, presets
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link, Ring, Topology, TransferTime, hops
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import Scenario, simulate, steady_utilisation
from thinwire.plan.traffic import Traffic, traffic

SHAPE = Shape.of_size(10**9, 24)
LINK = Link.of(1e9, latency_s=0.03)
STEP_S, EVERY, ROUNDS = 1.0, 30, 20
WORKERS = tuple(2**n for n in range(1, 11))
SEEDS = (0, 1, 2)
CODECS = {"fp32": "diloco", "2 bits": "muloco:bits=2", "1/64 of them": "sparseloco:density=1/64"}
SIGMA, SLOW_SHARE, SLOWDOWN = 0.1, 0.01, 3.0
PAYS = 1.5


class Mesh(Ring):
    """Every worker sends directly to every other, so that a gather also takes a single latency."""

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """All K - 1 copies leave one after the other; their latencies overlap."""
        return self.scatter(nbytes, workers, link)


class Tree(Topology):
    """Every message goes down a binomial tree of its own: ceil(log2 K) hops instead of K - 1.

    Source: J. Bruck et al., Efficient algorithms for all-to-all communications (1997).
    """

    name = "tree"

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """In hop i every worker sends what it has, at most 2^i messages, to the one 2^i away."""
        return hops((workers - 1).bit_length(), (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """In hop i a message moves on by 2^i if its receiver's distance has that bit."""
        moved = sum(distance.bit_count() for distance in range(workers))
        return hops((workers - 1).bit_length(), moved * link.seconds(nbytes), link)


RING, COMPARED = Ring(), {"ring": Ring(), "tree": Tree(), "mesh": Mesh()}


def gathered(name: str, workers: int) -> Traffic:
    method = presets.from_text(name, sync_every=EVERY, exchange=exchange.Gather())
    return traffic(method, SHAPE, workers=workers)


def reduced(name: str, workers: int) -> Traffic:
    both_ways = exchange.ReduceScatter(owner_feedback=feedback.ErrorFeedback())
    method = presets.from_text(name, sync_every=EVERY, exchange=both_ways)
    return traffic(method, SHAPE, workers=workers)


def paired(name: str, workers: int) -> Traffic:
    plan = gathered(name, 2)
    messages = [dataclasses.replace(m, exchange="pairs") for m in plan.messages]
    return dataclasses.replace(plan, messages=tuple(messages), workers=workers)


EXCHANGES: Mapping[str, Callable[[str, int], Traffic]] = {
    "gather": gathered,
    "reduce-scatter": reduced,
    "pairs": paired,
}


def utilisation(sent: Traffic, topology: Topology = RING) -> tuple[float, str]:
    """The share of time that equal workers train, and what they wait for."""
    scenario = scenario_of(sent, topology)
    return steady_utilisation(scenario), simulate(scenario, steps=4 * EVERY).limit()


def scenario_of(sent: Traffic, topology: Topology = RING) -> Scenario:
    return Scenario(traffic=sent, compute=Compute(step_s=STEP_S), link=LINK, topology=topology)


# -- workers that differ ---------------------------------------------------------------------------


def utilisation_of_stragglers(sent: Traffic, *, waited_for: float) -> tuple[float, str]:
    """The same for randomly slow workers, where exchanges wait for a share of them."""
    runs = [Stragglers(sent, waited_for=waited_for, seed=seed) for seed in SEEDS]
    for run in runs:
        run.train()
    return statistics.mean(run.worth for run in runs), runs[0].limit


class Stragglers:
    """A run with a clock for each worker, of a method that sends one message a round.

    Args:
        sent: messages of the method.
        waited_for: share of the workers that an exchange waits for; in pairs both wait.
        seed: seed of slowness and of pairs.
    """

    def __init__(self, sent: Traffic, *, waited_for: float, seed: int) -> None:
        (message,) = sent.messages
        self.workers, self.in_pairs = sent.workers, message.exchange == "pairs"
        self.transfer: TransferTime = scenario_of(sent).transfer_time(0)
        self.quorum = math.ceil(waited_for * sent.workers - 1e-9)
        sequences = np.random.SeedSequence(seed).spawn(3)
        self.slowness, _, self.partners = map(np.random.default_rng, sequences)
        self.now_s, self.free_s = np.zeros(sent.workers), np.zeros(sent.workers)
        self.worker_steps = self.compute_s = 0.0
        self.lost_s = dict.fromkeys(("slowest worker", "bandwidth", "latency"), 0.0)

    def train(self) -> None:
        for _ in range(ROUNDS):
            last_s = np.ones(self.workers)
            for last_s in self.steps_of_a_round():
                self.now_s = self.now_s + last_s
                self.compute_s += float(last_s.sum())
                self.worker_steps += self.workers
            self.wait(*(self.meet_in_pairs() if self.in_pairs else self.meet(last_s)))

    def steps_of_a_round(self) -> Iterator[NDArray[np.float64]]:
        """Seconds of each step of each worker."""
        exponents = self.slowness.standard_normal((EVERY, self.workers))
        exponents *= SIGMA
        exponents -= SIGMA**2 / 2
        slow = self.slowness.random(self.workers) < SLOW_SHARE
        return iter(STEP_S * (np.exp(exponents) * np.where(slow, SLOWDOWN, 1.0)))

    def meet(self, last_s: NDArray[np.float64]) -> tuple[Any, Any]:
        """When enough workers are ready, and when their answer arrives."""
        met_s = float(np.partition(self.now_s, self.quorum - 1)[self.quorum - 1])
        # The others give up the rest of their round.
        late_s = np.maximum(self.now_s - met_s, 0.0)
        self.now_s = np.minimum(self.now_s, met_s)
        self.compute_s -= float(late_s.sum())
        self.worker_steps -= float((late_s / last_s).sum())
        self.free_s[:] = max(met_s, float(self.free_s.max())) + self.transfer.held_s
        return met_s, self.free_s + self.transfer.lag_s

    def meet_in_pairs(self) -> tuple[Any, Any]:
        """When both workers of each pair are ready, and when each has the other's message."""
        order, half = self.partners.permutation(self.workers), self.workers // 2
        partner = np.arange(self.workers)
        partner[order[:half]], partner[order[half:]] = order[half:], order[:half]
        met_s = np.maximum(self.now_s, self.now_s[partner])
        free_s = np.maximum(self.free_s, self.free_s[partner])
        self.free_s = np.maximum(met_s, free_s) + self.transfer.held_s
        return met_s, self.free_s + self.transfer.lag_s

    def wait(self, met_s: Any, done_s: Any) -> None:
        waited_s = float(np.maximum(done_s - self.now_s, 0.0).sum())
        others_s = float(np.maximum(np.minimum(met_s, done_s) - self.now_s, 0.0).sum())
        self.now_s = np.maximum(self.now_s, done_s)
        share = (waited_s - others_s) / self.transfer.total_s
        self.lost_s["slowest worker"] += others_s
        self.lost_s["bandwidth"] += share * self.transfer.transfer_s
        self.lost_s["latency"] += share * self.transfer.latency_s

    @property
    def worth(self) -> float:
        """Work relative to undisturbed workers; a slow worker's longer steps are not more work."""
        return self.worker_steps * STEP_S / (self.workers * float(self.now_s.max()))

    @property
    def limit(self) -> str:
        """The cause that most of the time is lost to."""
        if self.compute_s / (self.compute_s + sum(self.lost_s.values())) >= 0.99:
            return "compute"
        return max(self.lost_s, key=lambda reason: self.lost_s[reason])


# -- tables and pictures ---------------------------------------------------------------------------


def sweep(codec: str, kind: str, find: Callable[[Traffic], tuple[float, str]]) -> dict[str, Any]:
    """One line of a picture."""
    found = {k: find(EXCHANGES[kind](CODECS[codec], k)) for k in WORKERS}
    work = {k: k * share for k, (share, _) in found.items()}
    return {
        "codec": codec,
        "exchange": kind,
        "work": work,
        "limit": {k: limit for k, (_, limit) in found.items()},
        "stops paying at": stops_paying(work),
    }


def stops_paying(work: Mapping[int, float]) -> int | None:
    """The first K that does less than 1.5 times the work of half as many."""
    return next((k for k in WORKERS[1:] if work[k] < PAYS * work[k // 2]), None)


def main() -> None:
    out = Path(sys.argv[1])
    began_s = time.perf_counter()
    rows = [
        {"topology": name, "stragglers": "none"}
        | sweep(codec, kind, partial(utilisation, topology=COMPARED[name]))
        for codec in CODECS
        for kind in EXCHANGES
        for name in COMPARED
        if name == "ring" or kind != "pairs"
    ]
    rows += [
        {"topology": "ring", "stragglers": how}
        | sweep("2 bits", kind, partial(utilisation_of_stragglers, waited_for=share))
        for kind in EXCHANGES
        for how, share in (("waited for", 1.0), ("19 of 20 waited for", 0.95))
    ]
    took_s = time.perf_counter() - began_s
    result = {"what": str(__doc__).splitlines()[0], "command": "python benchmarks/scaling.py OUT"}
    result |= {**setting(), "took_s": round(took_s, 1), "rows": rows}
    file = Path(__file__).parent / "results" / "scaling.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, out)
    sys.stdout.write(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| codec | exchange | over | stragglers | stops paying at K | limit there | work of 1024 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stop = row["stops paying at"]
        limit = row["limit"][stop or WORKERS[-1]]
        lines.append(
            f"| {row['codec']} | {row['exchange']} | {row['topology']} | {row['stragglers']} "
            f"| {stop or 'above 1024'} | {limit} | {row['work'][WORKERS[-1]]:.0f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    plain = [r for r in rows if r["stragglers"] == "none" and r["topology"] == "ring"]
    write_picture(
        figure(
            "Work of K workers over a ring, by what travels", plain, by="codec", dashed="exchange"
        ),
        out / "scaling-exchanges.png",
    )
    among = [
        r
        for r in rows
        if r["stragglers"] == "none" and r["codec"] == "2 bits" and r["exchange"] != "pairs"
    ]
    write_picture(
        figure(
            "2 bits: work of K workers, by topology",
            among,
            by="topology",
            dashed="exchange",
        ),
        out / "scaling-topologies.png",
    )
    slow = [r for r in rows if r["codec"] == "2 bits" and r["topology"] == "ring"]
    write_picture(
        figure(
            "2 bits: work of K workers with stragglers", slow, by="stragglers", dashed="exchange"
        ),
        out / "scaling-stragglers.png",
    )


DASHES = {"gather": "solid", "reduce-scatter": "dash", "pairs": "dot"}


def figure(title: str, rows: list[dict[str, Any]], *, by: str, dashed: str) -> Any:
    colours = dict(zip(dict.fromkeys(r[by] for r in rows), COLOURS, strict=False))
    drawn = go.Figure()
    for row in rows:
        drawn.add_scatter(
            x=list(WORKERS),
            y=list(row["work"].values()),
            name=f"{row[by]}, {row[dashed]}",
            mode="lines+markers",
            line={"color": colours[row[by]], "dash": DASHES[row[dashed]], "width": 2},
        )
    drawn.add_scatter(
        x=list(WORKERS),
        y=list(WORKERS),
        name="no worker waits",
        mode="lines",
        line={"color": "#d0d7de", "width": 6},
    )
    drawn.update_layout(title=title)
    drawn.update_xaxes(type="log", title="K, workers", tickvals=list(WORKERS))
    drawn.update_yaxes(type="log", dtick=1, title="undisturbed workers they are worth")
    return drawn


if __name__ == "__main__":
    main()
