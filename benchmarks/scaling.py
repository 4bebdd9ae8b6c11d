"""Up to a thousand workers: at which K does another one stop paying?

python benchmarks/scaling.py OUT       simulated; about two minutes on one core; OUT gets pictures

A model of a billion parameters in 24 layers, 30 inner steps of 1 s a round, links of 1 Gbit/s and
30 ms. A method's messages are those that a run would send. Pairs, in which two workers exchange
their payloads and nobody waits for a third, are no exchange of this library; their bytes are those
of a gather, and what they cost in loss is not in these figures.

Work is K times the utilisation: how many undisturbed workers the K are worth. Twice the workers pay
as long as they do at least 1.5 times the work.

With stragglers, steps vary by 10 % (log-normal), and in every round one worker in a hundred is
three times as slow. Means of three seeds, 20 rounds each.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from picture import COLOURS, write_picture
from setting import setting

from thinwire import exchange, presets
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.pace import Jitter, Pace, Paces, Steady, Stragglers
from thinwire.plan.patience import Everyone, Patience, Quorum
from thinwire.plan.required import steady_utilisation
from thinwire.plan.scenario import Scenario
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import simulate
from thinwire.plan.topology import Mesh, Ring, Topology, Tree
from thinwire.plan.traffic import Traffic, traffic

SHAPE = Shape.of_size(10**9, 24)
LINK = Link.of(1e9, latency_s=0.03)
STEP_S, EVERY, ROUNDS = 1.0, 30, 20
WORKERS = tuple(2**n for n in range(1, 11))
SEEDS = (0, 1, 2)
CODECS = {"fp32": "diloco", "2 bits": "muloco:bits=2", "1/64 of them": "sparseloco"}
RING, ALIKE, ALL = Ring(), Steady(), Everyone()
TOPOLOGIES: Mapping[str, Topology] = {"ring": RING, "tree": Tree(), "mesh": Mesh()}
SLOW = Paces(of=(Jitter(sigma=0.1), Stragglers(probability=0.01, slowdown=3.0)))
PAYS = 1.5


def gathered(name: str, workers: int) -> Traffic:
    method = presets.from_text(name, sync_every=EVERY, exchange=exchange.Gather())
    return traffic(method, SHAPE, workers=workers)


def reduced(name: str, workers: int) -> Traffic:
    method = presets.from_text(name, sync_every=EVERY, exchange=exchange.ReduceScatter())
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


def utilisation(
    freight: Traffic,
    topology: Topology = RING,
    pace: Pace = ALIKE,
    patience: Patience = ALL,
) -> tuple[float, str]:
    """How much of their time workers train, and what they wait for."""
    scenario = Scenario(
        freight=freight,
        compute=Compute(step_s=STEP_S),
        link=LINK,
        topology=topology,
        pace=pace,
        patience=patience,
    )
    if isinstance(pace, Steady):
        limit = simulate(scenario, steps=4 * EVERY).limit
        return steady_utilisation(scenario), limit
    outcomes = [simulate(scenario, steps=ROUNDS * EVERY, seed=seed) for seed in SEEDS]
    # A slow worker's longer steps are no more work: counted are steps at their normal time.
    worth = [o.worker_steps * STEP_S / (freight.workers * o.wall_s) for o in outcomes]
    return statistics.mean(worth), outcomes[0].limit


def sweep(codec: str, kind: str, **options: Any) -> dict[str, Any]:
    """One line of a picture."""
    found = {k: utilisation(EXCHANGES[kind](CODECS[codec], k), **options) for k in WORKERS}
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
    slow: dict[str, Any] = {"pace": SLOW}
    patient: dict[str, Any] = {"pace": SLOW, "patience": Quorum(share=0.95)}
    rows = [
        {"topology": name, "stragglers": "none"} | sweep(codec, kind, topology=topology)
        for codec in CODECS
        for kind in EXCHANGES
        for name, topology in TOPOLOGIES.items()
        if name == "ring" or kind != "pairs"
    ]
    rows += [
        {"topology": "ring", "stragglers": how} | sweep("2 bits", kind, **options)
        for kind in EXCHANGES
        for how, options in (("waited for", slow), ("19 of 20 waited for", patient))
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
            "2 bits: work of K workers, by who sends to whom",
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
        name="nobody waits",
        mode="lines",
        line={"color": "#d0d7de", "width": 6},
    )
    drawn.update_layout(title=title)
    drawn.update_xaxes(type="log", title="K, workers", tickvals=list(WORKERS))
    drawn.update_yaxes(type="log", dtick=1, title="undisturbed workers they are worth")
    return drawn


if __name__ == "__main__":
    main()
