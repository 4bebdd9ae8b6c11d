"""Does what `thinwire plan` advises keep workers as busy as it promises?

    python benchmarks/advice_check.py OUT     root on Linux; a quarter of an hour

Ten situations, from two laptops to two sites of 64 GPUs. The first advice for each is replayed
where it has two or four workers: a process each trains the laptop model by the advised method over
tools/wan.py, TCP between network namespaces, on a link scaled so that bytes to rate and latency
are to the time of a step as in the situation (--only 2 leaves out those with four workers, which
share two cores):

    rate' = rate (bytes' / bytes) (step / step')        latency' = latency step' / step

The time of a step is measured before, on a link without limits. Each replay is run up to three
times, and the one in which worker 0 stood in the processor's queue for the shortest time counts.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_check import QUEUED_SHARE, queued_s, wait_for_quiet
from setting import setting

from thinwire.plan.advice import advise
from thinwire.plan.calibration import calibrate
from thinwire.plan.choice import Choice
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.required import steady_utilisation
from thinwire.plan.resolve import resolve
from thinwire.plan.shape import Shape
from thinwire.runs.folder import write_json
from thinwire.train.config import Machine, Periods, TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import train

HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "advice-check.json"
UNLIMITED_BPS, QUEUE_S, ATTEMPTS, ROUNDS, LEAST_STEPS = 1e10, 2.0, 3, 8, 160
REPLAYED = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Who asks for advice."""

    parameters: float
    layers: int
    workers: int
    step_s: float
    rate_bps: float
    latency_s: float

    def job(self) -> Job:
        return Job(
            shape=Shape.of_size(int(self.parameters), self.layers),
            workers=self.workers,
            compute=Compute(step_s=self.step_s),
            link=Link.of(self.rate_bps, latency_s=self.latency_s),
        )


def situation(
    parameters: float, layers: int, workers: int, step_s: float, mbit: float, latency_ms: float
) -> Situation:
    return Situation(
        parameters=parameters,
        layers=layers,
        workers=workers,
        step_s=step_s,
        rate_bps=mbit * 1e6,
        latency_s=latency_ms / 1e3,
    )


SITUATIONS = {
    "two laptops": situation(50e6, 12, 2, 4.0, 20, 30),
    "two gaming PCs on home lines": situation(150e6, 12, 2, 1.0, 100, 20),
    "four PCs on thin lines": situation(150e6, 12, 4, 1.0, 10, 50),
    "four single GPUs in four cities": situation(400e6, 24, 4, 1.0, 100, 50),
    "two nodes of 8 in two cities": situation(1e9, 24, 2, 0.8, 1_000, 50),
    "eight nodes of 8 on office lines": situation(1e9, 24, 8, 2.0, 200, 60),
    "four nodes of 8 on four continents": situation(3e9, 32, 4, 2.0, 1_000, 80),
    "two nodes of 8, overseas": situation(7e9, 32, 2, 5.0, 500, 100),
    "two sites of 32": situation(10e9, 48, 2, 0.8, 10_000, 50),
    "two sites of 64": situation(70e9, 80, 2, 10.0, 10_000, 40),
}


def replayed_choice(choice: Choice) -> Choice:
    """Rates are those of the laptop recipe; bytes and rounds do not depend on them."""
    return dataclasses.replace(choice, parameters=None)


def config(text: str, workers: int, steps: int, *, log_steps: int) -> TrainConfig:
    base = laptop(text)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, validation_sequences=16),
        workers=workers,
        steps=steps,
        periods=Periods(log_steps=log_steps),
        machine=Machine(device="cpu", threads=1),
    )


def work(options: argparse.Namespace) -> None:
    """Train once as the worker that the environment says."""
    if os.environ["RANK"] == "0":
        wait_for_quiet()
    before_s = queued_s()
    workers = int(os.environ["WORLD_SIZE"])
    log_steps = options.log_steps
    train(config(options.method, workers, options.steps, log_steps=log_steps), options.out)
    if os.environ["RANK"] == "0":
        write_json(options.out / "queued.json", queued_s() - before_s)


def run(out: Path, text: str, workers: int, steps: int, link: Link, *, log_steps: int) -> Any:
    """The least disturbed of some runs: what it measured, and how long it was in the queue."""
    sys.path.append(str(HERE.parents[1] / "tools"))
    wan = importlib.import_module("wan")
    found = []
    for attempt in range(ATTEMPTS if workers <= (os.cpu_count() or 1) else 1):
        folder = out.with_name(f"{out.name}-{attempt}-{time.time_ns()}")
        command = [sys.executable, str(HERE), str(folder), "--method", text]
        command += ["--steps", str(steps), "--log-steps", str(log_steps)]
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        line = {"rate_bps": link.up_bits_per_s, "delay_s": link.latency_s, "queue_s": QUEUE_S}
        with wan.Link(nodes=workers, **line) as emulated:
            processes = [emulated.popen(node, command, env=env) for node in range(workers)]
            if failed := [process for process in processes if process.wait()]:
                sys.exit(f"cannot replay {text}; because {len(failed)} failed; do: see above")
        measured = calibrate(folder, step_s=1.0).measured
        queued = json.loads((folder / "queued.json").read_text()) / measured.training_s
        found.append((queued, measured, folder))
        if queued < QUEUED_SHARE:
            break
    return min(found, key=lambda one: one[0])


def check(name: str, out: Path, replayed: Collection[int]) -> dict[str, Any]:
    """What is promised for a situation, and what its replay measured."""
    asked = SITUATIONS[name]
    job = asked.job()
    (first, *_) = advise(job).recommended
    row: dict[str, Any] = {
        **dataclasses.asdict(asked),
        "method": first.choice.text,
        "promised_utilisation": first.forecast.utilisation,
        "expected_loss_share": dataclasses.asdict(first.estimate.loss),
    }
    if asked.workers not in replayed:
        return row | {"replayed": False}
    choice = replayed_choice(first.choice)
    steps = max(ROUNDS * (choice.sync_every or 1), LEAST_STEPS)
    shape, folder = resolve("250k"), out / name.replace(" ", "-")
    free = Link.of(UNLIMITED_BPS)
    _, alone, _ = run(folder, choice.text, asked.workers, 120, free, log_steps=15)
    step_s = alone.inner_s / 120
    sent = dataclasses.replace(job, shape=shape).traffic(choice.method())
    ratio = sent.sent_per_round / first.forecast.sent_bytes_per_round * asked.step_s / step_s
    link = Link.of(asked.rate_bps * ratio, latency_s=asked.latency_s * step_s / asked.step_s)
    small = dataclasses.replace(job, shape=shape, compute=Compute(step_s=step_s), link=link)
    queued, measured, _ = run(folder, choice.text, asked.workers, steps, link, log_steps=0)
    promised = first.forecast.utilisation
    return row | {
        "replayed": True,
        "steps": steps,
        "step_s": step_s,
        "link_bits_per_s": link.up_bits_per_s,
        "link_latency_s": link.latency_s,
        "planned_utilisation": steady_utilisation(small.scenario(sent)),
        "measured_utilisation": measured.utilisation,
        "error": measured.utilisation / promised - 1,
        "queued_share": queued,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Advice, replayed.")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--only", type=int, nargs="+", default=REPLAYED, metavar="K")
    parser.add_argument("--method", help="(how it starts its workers)")
    parser.add_argument("--steps", type=int, help="(a worker's)")
    parser.add_argument("--log-steps", type=int, help="(a worker's)")
    options = parser.parse_args()
    if options.method is not None:
        work(options)
        return
    rows = {}
    for name in SITUATIONS:
        rows[name] = row = check(name, options.out, options.only)
        said = f"{row['promised_utilisation']:.1%} promised"
        if row["replayed"]:
            said += f", {row['planned_utilisation']:.1%} planned for the replay, "
            said += f"{row['measured_utilisation']:.1%} measured ({row['error']:+.1%}), "
            said += f"queued {row['queued_share']:.1%}"
        print(f"{name:36} {row['method']:52} {said}", flush=True)
    errors = [row["error"] for row in rows.values() if row["replayed"]]
    result = {
        "what": "utilisation that the first advice promises in ten situations, and what replays "
        "with a small model over an emulated link measured",
        "command": "python benchmarks/advice_check.py OUT",
        **setting(),
        "replayed": len(errors),
        "least_error": min(errors, default=math.nan),
        "largest_error": max(errors, default=math.nan),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
