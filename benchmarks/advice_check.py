"""Does the advice of `thinwire plan` keep workers as busy as it promises?

    python benchmarks/advice_check.py OUT     root on Linux; half an hour on two cores

Ten situations, from two laptops to two sites of 64 GPUs. The first advice for each is replayed: a
process for each worker trains a small model by the advised method over tools/wan.py, TCP between
network namespaces, on a link scaled so that transfer time and latency relate to the time of a step
as in the situation:

    rate' = rate (bytes' / bytes) (step / step')        latency' = latency step' / step

A step computes for a few hundredths of a second and sleeps until STEP_S have passed, like a host
that waits for its accelerator. So two cores can replay eight workers, and each exchange computes
and sends what it would in earnest. The model is that of the laptop recipe; for streaming it has as
many layers as the situation's, and so as many fragments.

A run in which worker 0 queued for the processor for more than a tenth of the time is repeated, up
to ATTEMPTS times; the run that queued for the shortest time counts.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from plan_check import QUEUED_SHARE, queued_s, wait_for_quiet
from setting import setting
from thinwire.plan.advice import advise
from thinwire.plan.calibration import calibrate
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.models import LLAMA_SIZES, resolve
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import steady_utilisation
from thinwire.runs.folder import write_json
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import train

HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "advice-check.json"
QUEUE_S, ATTEMPTS, ROUNDS, LEAST_STEPS = 2.0, 3, 8, 160
# Long enough for all workers to compute one after the other on a single core.
STEP_S = {2: 0.25, 4: 0.5, 8: 0.75}
STREAMING_STEP_S = {2: 0.5, 4: 1.0}
SMALL = "250k"


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


def pace_steps(step_s: float) -> None:
    """Make every inner step of this process end `step_s` after its first forward pass began."""
    began_s: list[float] = []

    def note(module: nn.Module, _: Any) -> None:
        if module.training and not began_s:
            began_s.append(time.monotonic())

    def wait(*_: Any) -> None:
        if began_s:
            time.sleep(max(0.0, began_s.pop() + step_s - time.monotonic()))

    # Global hooks, so that the run's configuration stays an ordinary one.
    register_module_forward_pre_hook(note)
    register_optimizer_step_post_hook(wait)


def small_model(folder: Path, layers: int | None) -> str:
    """The laptop recipe's model, or a narrow one with that many layers."""
    if layers is None:
        return SMALL
    size = LLAMA_SIZES[SMALL]
    config = size.configuration(size.counted_with, laptop("diloco").data.sequence_length)
    # Wide enough for hundreds of packets per message, where a large model has thousands: if there
    # were a dozen, each would take a fifteenth of the step that hides them all.
    config.update({"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 384})
    config.update({"head_dim": 64})
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return str(folder)


def recipe(options: argparse.Namespace, workers: int) -> TrainConfig:
    """One sequence per worker and step, because only the time matters."""
    base = laptop(options.method)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, size=options.model),
        data=dataclasses.replace(base.data, sequence_length=32, validation_sequences=16),
        global_batch=workers,
        workers=workers,
        steps=options.steps,
        periods=Intervals(),
        machine=Runtime(device="cpu", threads=1),
    )


def work(options: argparse.Namespace) -> None:
    """Train once as the worker that the environment names."""
    pace_steps(options.step_s)
    if os.environ["RANK"] == "0":
        wait_for_quiet()
    before_s = queued_s()
    train(recipe(options, int(os.environ["WORLD_SIZE"])), options.out)
    if os.environ["RANK"] == "0":
        write_json(options.out / "queued.json", queued_s() - before_s)


def run(out: Path, arguments: list[str], workers: int, link: Link) -> Any:
    """The least disturbed of several runs: how long it queued, and what it measured."""
    sys.path.append(str(HERE.parents[1] / "tools"))
    wan = importlib.import_module("wan")
    found = []
    for attempt in range(ATTEMPTS):
        folder = out.with_name(f"{out.name}-{attempt}-{time.time_ns()}")
        command = [sys.executable, str(HERE), str(folder), *arguments]
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        line = {"rate_bps": link.up_bits_per_s, "delay_s": link.latency_s, "queue_s": QUEUE_S}
        with wan.Link(nodes=workers, **line) as emulated:
            processes = [emulated.popen(node, command, env=env) for node in range(workers)]
            if failed := [process for process in processes if process.wait()]:
                sys.exit(f"cannot replay {arguments}; because {len(failed)} failed; do: see above")
        measured = calibrate(folder, step_s=1.0).measured
        queued = json.loads((folder / "queued.json").read_text()) / measured.training_s
        found.append((queued, measured))
        if queued < QUEUED_SHARE:
            break
    return min(found, key=lambda one: one[0])


def check(name: str, out: Path) -> dict[str, Any]:
    """The promise for a situation, and what its replay measured."""
    asked = SITUATIONS[name]
    job = asked.job()
    (first, *_) = advise(job).recommended
    # Learning rates stay the laptop recipe's, because bytes and rounds do not depend on them.
    choice = dataclasses.replace(first.choice, parameters=None)
    steps = max(ROUNDS * (choice.sync_every or 1), LEAST_STEPS)
    folder, streams = out / name.replace(" ", "-"), first.choice.layers is not None
    step_s = (STREAMING_STEP_S if streams else STEP_S)[asked.workers]
    model = small_model(folder.with_name(f"{folder.name}-model"), asked.layers if streams else None)
    small = dataclasses.replace(job, shape=resolve(model), compute=Compute(step_s=step_s))
    sent = small.traffic(choice.method())
    ratio = sent.received_nbytes() / first.forecast.down_bytes_per_round * asked.step_s / step_s
    link = Link.of(asked.rate_bps * ratio, latency_s=asked.latency_s * step_s / asked.step_s)
    arguments = ["--method", choice.text, "--model", model]
    arguments += ["--steps", str(steps), "--step-s", str(step_s)]
    queued, measured = run(folder, arguments, asked.workers, link)
    promised = first.forecast.utilisation
    return {
        **dataclasses.asdict(asked),
        "method": first.choice.text,
        "promised_utilisation": promised,
        "loss_share": first.choice.loss_share,
        "replay": {
            "layers": small.shape.layers,
            "parameters": small.shape.parameters,
            "steps": steps,
            "step_s": step_s,
            "measured_step_s": measured.inner_s / steps,
            "link_bits_per_s": link.up_bits_per_s,
            "link_latency_s": link.latency_s,
            "queued_share": queued,
        },
        "planned_utilisation": steady_utilisation(
            dataclasses.replace(small, link=link).scenario(sent)
        ),
        "measured_utilisation": measured.utilisation,
        "error": measured.utilisation / promised - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Advice, replayed.")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="renew these situations alone")
    parser.add_argument("--method", help="(how it starts its workers)")
    parser.add_argument("--model", help="(a worker's)")
    parser.add_argument("--steps", type=int, help="(a worker's)")
    parser.add_argument("--step-s", type=float, help="(a worker's)")
    options = parser.parse_args()
    if options.method is not None:
        work(options)
        return
    rows = json.loads(RESULT.read_text())["rows"] if options.only else {}
    for name in options.only or SITUATIONS:
        rows[name] = row = check(name, options.out)
        print(
            f"{name:36} {row['method']:48} {row['promised_utilisation']:.1%} promised, "
            f"{row['planned_utilisation']:.1%} planned for the replay, "
            f"{row['measured_utilisation']:.1%} measured ({row['error']:+.1%}), "
            f"queued {row['replay']['queued_share']:.1%}",
            flush=True,
        )
    errors = [row["error"] for row in rows.values()]
    result = {
        "what": "utilisation that the first advice promises in ten situations, and what replays "
        "with a small model over an emulated link measured",
        "command": "python benchmarks/advice_check.py OUT",
        **setting(),
        "least_error": min(errors),
        "largest_error": max(errors),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
