"""How long workers wait for each other over a slow link, method by method.

    python benchmarks/overlap.py OUT [--methods 'diloco;...']   root on Linux; half a minute a run

Two workers, a process with one thread each, train the laptop recipe over tools/wan.py: TCP between
two network namespaces at a few Mbit/s. Each rate has one link, on which the methods train one after
the other. Waiting is the time worker 0 spent in `Round.wait`, including the other worker's
lateness, as a share of training time without start, evaluation and saving.

The processor that trains also moves the link's packets: with two cores, a busy link slows the steps
a little, for all methods alike.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import thinwire
from thinwire.codecs import E3M0, CastBF16, Codec
from thinwire.method import Method
from thinwire.runs.folder import RunFolder
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.recipes import laptop

HERE = Path(__file__).resolve()
RATES_MBIT, DELAY_MS, WORKERS, STEPS = (20.0, 14.0, 10.0), 20.0, 2, 400
# Room for a payload: if TCP overruns the queue, an exchange now and then takes twice as long.
QUEUE_S = 1.0
# Streaming: the mean is mixed in after TAU steps; ALPHA is the share of the worker's own weights.
TAU, ALPHA = 5, 0.5


def diloco() -> Method:
    return dataclasses.replace(laptop("diloco").method, codec=CastBF16())


def streaming(codec: Codec) -> Method:
    """The laptop recipe's streaming method, a layer at a time."""
    late = thinwire.Delay(tau=TAU, mixing=ALPHA)
    return dataclasses.replace(laptop("streaming_diloco").method, codec=codec, overlap=late)


METHODS: Mapping[str, Callable[[], Method]] = {
    "diloco": diloco,
    "streaming": lambda: streaming(CastBF16()),
    "streaming, E3M0": lambda: streaming(E3M0()),
}


def recipe(name: str) -> TrainConfig:
    """The run of `thinwire train --recipe benchmarks/overlap.py:recipe --method NAME`."""
    return dataclasses.replace(
        laptop("diloco"),
        method=dataclasses.replace(METHODS[name](), name=name),
        workers=WORKERS,
        steps=STEPS,
        periods=Intervals(log_steps=50),
        machine=Runtime(device="cpu", threads=1),
    )


def main() -> None:
    options = parse()
    rates: dict[str, dict[str, Any]] = {}
    for rate_mbit in options.rates:
        rate = f"{rate_mbit:g} Mbit/s"
        rates[rate] = {}
        with open_link(rate_mbit) as link:
            for name in options.methods:
                found = one(link, name, options.out / f"{rate_mbit:g}-mbit", options.steps)
                rates[rate][name] = found
                step_ms = 1000 * found["compute_s_per_step"]
                print(f"{rate}  {name}: waits {found['wait_share']:.1%}, a step {step_ms:.0f} ms")
    write(rates, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Waiting over a slow link, method by method.")
    parser.add_argument("out", type=Path, help="folder of the runs; must be free of them")
    parser.add_argument("--methods", type=known_methods, default=list(METHODS), metavar="A;B")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, metavar="MBIT")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args()


def known_methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    if unknown := set(names) - METHODS.keys():
        raise argparse.ArgumentTypeError(f"{unknown} are none of {'; '.join(METHODS)}")
    return names


def open_link(rate_mbit: float) -> Any:
    sys.path.append(str(HERE.parents[1] / "tools"))
    wan = importlib.import_module("wan")
    line = {"rate_bps": rate_mbit * 1e6, "delay_s": DELAY_MS / 1e3, "queue_s": QUEUE_S}
    return wan.Link(nodes=WORKERS, **line)


def one(link: Any, name: str, out: Path, steps: int) -> dict[str, Any]:
    """Train with one method over the link; returns what worker 0 measured."""
    folder = out / name.replace(", ", "-")
    command = [
        *(sys.executable, "-m", "thinwire", "train"),
        *("--recipe", f"{HERE}:recipe", "--method", name),
        *("--steps", str(steps), "--out", str(folder)),
    ]
    # Nodes have no host names, and torch would warn about that at every connection.
    env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    options = {"stdout": subprocess.DEVNULL, "env": env}
    workers = [link.popen(node, command, **options) for node in range(WORKERS)]
    if failed := [worker.wait() for worker in workers if worker.wait()]:
        sys.exit(
            f"cannot measure {name}; because workers failed with {failed}; do: see its error above"
        )
    return row(RunFolder(folder))


def row(run: RunFolder) -> dict[str, Any]:
    summary, record = run.summary() or {}, run.last_evaluation()
    training_s = summary["tokens"] / summary["tokens_per_s"]
    return {
        "wait_share": summary["wait_s"] / training_s,
        "wait_s": summary["wait_s"],
        "overlapped_s": record["overlapped_s"],
        "training_s": training_s,
        "wall_s": summary["wall_s"],
        "compute_s_per_step": (training_s - summary["wait_s"]) / summary["steps"],
        "rounds": record["rounds"],
        "sent_bytes_per_worker": summary["sent_bytes_per_worker"],
        "peak_sent_bytes_per_step": summary["peak_sent_bytes_per_step"],
        "val_loss": summary["val_loss"],
        "tokens": summary["tokens"],
        "parameters": summary["parameters"],
        "outer_digest": summary["outer_digest"],
    }


def write(rates: dict[str, Any], options: argparse.Namespace) -> None:
    result = {
        "what": f"seconds worker 0 of {WORKERS} waited over an emulated link, {DELAY_MS:g} ms one "
        f"way, room for {QUEUE_S:g} s of traffic; laptop recipe, {options.steps} steps, a batch "
        "of 8 x 128 and one thread a worker",
        "command": f"python benchmarks/overlap.py OUT --methods '{';'.join(options.methods)}' "
        f"--rates {' '.join(f'{rate:g}' for rate in options.rates)} --steps {options.steps}",
        "cores": os.cpu_count(),
        "processor": processor(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("thinwire", "torch", "transformers")
        },
        "methods": {name: METHODS[name]().describe() for name in options.methods},
        "rates": rates,
    }
    path = HERE.parent / "results" / "overlap.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "unknown")


if __name__ == "__main__":
    main()
