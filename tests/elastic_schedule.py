"""Kills, stops and lost stores at random moments that a seed decides."""

import random
import signal
import time
from collections.abc import Sequence

from elastic_team import Team, Worker

KINDS = ("kill", "stop", "store", "long stop")
FAULTS = 4
OPTIONS = {"steps": 240, "every": 4, "step_s": 0.03}


def inject_faults(
    team: Team, seed: int, kinds: Sequence[str] = KINDS[:3], faults: int = FAULTS
) -> list[str]:
    """Inject faults into a team of three, which then must `finish`; returns what was done.

    A "long stop" is longer than any timeout of these workers.
    """
    draw = random.Random(seed)
    began_s = time.monotonic()
    live = {worker.identity: worker for worker in team.start_all("w0", "w1", "w2")}
    done = []
    for _ in range(faults):
        time.sleep(draw.uniform(0.1, 1.2))
        if any(worker.digest for worker in live.values()):
            break  # the run is over
        kind, who = draw.choice(list(kinds)), draw.choice(sorted(live))
        lasts_s = draw.uniform(8.0, 16.0) if kind == "long stop" else draw.uniform(0.0, 2.5)
        done.append(f"{time.monotonic() - began_s:.1f} s {kind} {who} for {lasts_s:.1f} s")
        if kind == "store":
            team.cut_store()
            time.sleep(lasts_s)
            team.is_cut = False
        elif kind in ("stop", "long stop") and not live[who].gone:
            live[who].send(signal.SIGSTOP)
            time.sleep(lasts_s)
            live[who].send(signal.SIGCONT)
        elif kind == "kill":
            live[who].kill()
            time.sleep(lasts_s / 2)
            live[who] = team.start(who)
    return done


RANK_KINDS = ("kill worker", "kill rank", "stop worker", "stop rank")
RANK_OPTIONS = {
    "ranks": 2,
    "layers": 4,
    "steps": 300,
    "every": 4,
    "step_s": 0.03,
    "terms": {"timeout_s": 3.0, "patience": 0.2},
}


class ShardedPair:
    """Two workers of two ranks."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.live = {name: self.start(name) for name in "ab"}
        self.team.until(lambda: all(self.team.met(w, 2) for w in self.live.values()))

    def start(self, name: str) -> Worker:
        return self.team.start(name, **RANK_OPTIONS)

    def fault(self, kind: str, name: str, rank: int, lasts_s: float) -> None:
        """One fault of `RANK_KINDS`; returns when it is over."""
        what, whom = kind.split()
        processes = self.live[name].ranks if whom == "worker" else [self.live[name].ranks[rank]]
        for process in processes:
            process.send(signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        time.sleep(lasts_s)
        for process in processes if what == "stop" else []:
            process.send(signal.SIGCONT)

    def settle(self) -> None:
        """Start again what has ended, as an operator would, until both train together."""
        versions = {name: worker.version for name, worker in self.live.items()}
        self.team.until(lambda: self._is_settled(versions), 100)

    def _is_settled(self, versions: dict[str, int]) -> bool:
        for name, worker in self.live.items():
            ended = [rank for rank in worker.ranks if rank.gone]
            # The death of a rank is the death of its worker.
            if len(ended) == len(worker.ranks) and any(rank.wait(1) for rank in ended):
                self.live[name], versions[name] = self.start(name), 0
        return all(
            worker.digest
            or (
                worker.version > versions[name]
                and worker.steps()[-1:] != []
                and worker.steps()[-1]["workers"] == 2
            )
            for name, worker in self.live.items()
        )


def inject_faults_into_ranks(team: Team, seed: int, faults: int = 3) -> list[str]:
    """Inject faults into two workers of two ranks, which then must `finish`; says what was done."""
    draw, began_s, done = random.Random(seed), time.monotonic(), []
    pair = ShardedPair(team)
    for _ in range(faults):
        time.sleep(draw.uniform(0.1, 1.0))
        kind, name, rank = draw.choice(RANK_KINDS), draw.choice("ab"), draw.randrange(2)
        lasts_s = draw.uniform(0.2, 6.0)
        at_s = time.monotonic() - began_s
        done.append(f"{at_s:.1f} s {kind} {name} {rank} for {lasts_s:.1f} s")
        pair.fault(kind, name, rank, lasts_s)
        pair.settle()
    return done
