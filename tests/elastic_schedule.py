"""Kills, stops and lost lighthouses at random moments that a seed decides."""

import random
import signal
import time
from collections.abc import Sequence

from elastic_team import Team

KINDS = ("kill", "stop", "lighthouse")
FAULTS = 4
OPTIONS = {"steps": 240, "every": 4, "step_s": 0.03}


def inject_faults(
    team: Team, seed: int, kinds: Sequence[str] = KINDS, faults: int = FAULTS
) -> list[str]:
    """Inject faults into a team of three, which then must `finish`; returns what was done."""
    draw = random.Random(seed)
    began_s = time.monotonic()
    live = {worker.identity: worker for worker in team.start_all("w0", "w1", "w2")}
    done = []
    for _ in range(faults):
        time.sleep(draw.uniform(0.1, 1.2))
        kind, who = draw.choice(list(kinds)), draw.choice(sorted(live))
        lasts_s = draw.uniform(0.0, 2.5)
        done.append(f"{time.monotonic() - began_s:.1f} s {kind} {who} for {lasts_s:.1f} s")
        if kind == "lighthouse":
            team.kill_lighthouse()
            time.sleep(lasts_s)
            team.start_lighthouse()
        elif kind == "stop" and not live[who].gone:
            live[who].send(signal.SIGSTOP)
            time.sleep(lasts_s)
            live[who].send(signal.SIGCONT)
        elif kind == "kill":
            live[who].kill()
            time.sleep(lasts_s / 2)
            live[who] = team.start(who)
    return done
