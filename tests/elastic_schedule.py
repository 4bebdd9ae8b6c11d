"""Kills, stops and lost stores at random moments, chosen by a seed."""

import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from elastic_team import Team, Worker

KINDS = ("kill", "stop", "store", "long stop", "hub", "all")
FAULTS = 4
OPTIONS = {"steps": 240, "every": 4, "step_s": 0.03}
LONG_S = (8.0, 16.0)


def inject_faults(
    team: Team,
    seed: int,
    kinds: Sequence[str] = KINDS[:3],
    faults: int = FAULTS,
    *,
    workers: int = 3,
    long_s: tuple[float, float] = LONG_S,
    **options: Any,
) -> list[str]:
    """Inject faults into a team, which then must `finish`; returns what was done.

    A kill or stop hits one rank of a worker or all of them. A "long stop" outlasts any timeout of
    these workers; "hub" kills the hub, and "all" kills it and all workers.
    """
    draw, began_s, done = random.Random(seed), time.monotonic(), []
    started = team.start_all(*(f"w{number}" for number in range(workers)), **options)
    live = {worker.identity: worker for worker in started}
    for _ in range(faults):
        time.sleep(draw.uniform(0.1, 1.2))
        if any(worker.digest for worker in live.values()):
            break  # the run is over
        kind, who = draw.choice(list(kinds)), draw.choice(sorted(live))
        ranks = draw.choice([live[who].ranks, [draw.choice(live[who].ranks)]])
        lasts_s = draw.uniform(*long_s) if kind == "long stop" else draw.uniform(0.0, 2.5)
        whom = f"{kind} {who}, {len(ranks)} of {len(live[who].ranks)} ranks"
        done.append(f"{time.monotonic() - began_s:.1f} s {whom} for {lasts_s:.1f} s")
        killed = list(live.values()) if kind == "all" else []
        if kind == "store":
            team.cut_store(lasts_s)
        elif kind in ("stop", "long stop"):
            stopped = [rank for rank in ranks if not rank.gone]
            for rank in stopped:
                rank.send_signal(signal.SIGSTOP)
            time.sleep(lasts_s)
            for rank in stopped:
                rank.send_signal(signal.SIGCONT)
        elif kind == "kill":
            for rank in ranks:
                rank.kill()
            time.sleep(lasts_s / 2)
            killed = [live[who]]
        if kind in ("hub", "all"):
            assert team.hub is not None
            team.hub.kill()
            for worker in killed:
                worker.send_to_all(signal.SIGKILL)
            time.sleep(lasts_s)
            team.hub.start()
        for worker in killed:
            restart(team, live, worker, **options)
    return done


def restart(team: Team, live: dict[str, Worker], worker: Worker, **options: Any) -> None:
    """Restart a worker, as an operator would: if a rank dies, so does its worker."""
    # Ranks that wait in torch for one that never came are for their launcher to end.
    if not all(rank.records for rank in worker.ranks):
        worker.send_to_all(signal.SIGKILL)
    team.until(lambda: all(rank.gone for rank in worker.ranks), 90)
    live[worker.identity] = team.start(worker.identity, **options)
