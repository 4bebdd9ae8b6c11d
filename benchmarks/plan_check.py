"""Predictions of `thinwire plan --from RUN` for other links, against runs over these links.

    python benchmarks/plan_check.py OUT     root on Linux; a quarter of an hour

Two workers, a process with one thread each, train the laptop model over tools/wan.py: TCP between
two network namespaces. Each method is calibrated once, on a link without limits; its time on the
other links is predicted from that and from their numbers. Measured is the time worker 0 spent in
inner and outer steps; utilisation is the share of inner steps.

Other load on the machine slows steps, which no plan can foresee. So a run waits until the machine
is quiet, and is repeated if worker 0 queued for the processor for long. The run that queued for the
shortest share of the time counts. Runs are chosen by that number only, and the result has the
seconds of all of them. Repeated with the same OUT, it continues with the links and methods that had
no undisturbed run.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from setting import write_runs
from thinwire.codecs import CastBF16
from thinwire.method import Method
from thinwire.plan.calibration import Calibration, calibrate
from thinwire.plan.link import Link
from thinwire.plan.simulate import simulate
from thinwire.runs.folder import write_json
from thinwire.runs.schema import read_finished
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import train

HERE = Path(__file__).resolve()
WORKERS, STEPS, DELAY_S = 2, 180, 0.02
RATES_MBIT = (10.0, 3.0, 1.0)
# More than the hub can move, so that the line is never the limit.
UNLIMITED_MBIT = 10_000.0
# Room for a payload: if TCP overruns the queue, an exchange now and then takes twice as long.
QUEUE_S = 2.0
# Shares of time for which worker 0, and any process of the machine, may wait for a processor.
QUEUED_SHARE, QUIET_PERCENT, PATIENCE_S = 0.1, 15.0, 60.0


def diloco() -> Method:
    return dataclasses.replace(laptop("diloco").method, codec=CastBF16(), sync_every=30)


def streaming() -> Method:
    return dataclasses.replace(laptop("streaming_diloco:tau=2").method, sync_every=20)


def muloco() -> Method:
    return laptop("muloco:bits=2").method


METHODS: Mapping[str, Callable[[], Method]] = {
    "diloco, bf16, H=30": diloco,
    "streaming_diloco:tau=2, H=20": streaming,
    "muloco:bits=2, H=10": muloco,
}


def recipe(name: str, *, log_steps: int) -> TrainConfig:
    base = laptop("diloco")
    return dataclasses.replace(
        base,
        method=dataclasses.replace(METHODS[name](), name=name),
        data=dataclasses.replace(base.data, validation_sequences=16),
        workers=WORKERS,
        steps=STEPS,
        periods=Intervals(log_steps=log_steps),
        machine=Runtime(device="cpu", threads=1),
    )


# -- one worker, in its namespace ------------------------------------------------------------------


def work(out: Path, attempts: int, log_steps: int) -> None:
    """Train with every method until a run is undisturbed, as the worker the environment names."""
    # All workers read this before any of them trains, so that they agree.
    first = {
        name: len(begun(out, name))
        for name in METHODS
        if all(queued_share(run) >= QUEUED_SHARE for run in runs(out, name))
    }
    for name, begin in first.items():
        for attempt in range(begin, begin + attempts):
            folder = folder_of(out, name, attempt)
            # The last run's port may not be free yet.
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
            if os.environ["RANK"] == "0":
                wait_for_quiet()
            before_s = queued_s()
            train(recipe(name, log_steps=log_steps), folder)
            if os.environ["RANK"] == "0":
                write_json(folder / "queued.json", queued_s() - before_s)
            if queued_share(folder) < QUEUED_SHARE:
                break


def wait_for_quiet() -> None:
    """Wait until other load is low, or until it has been high for too long."""
    until_s = time.monotonic() + PATIENCE_S
    while pressure() > QUIET_PERCENT and time.monotonic() < until_s:
        time.sleep(1)


def pressure() -> float:
    """Percentage of the last ten seconds in which any process waited for a processor."""
    return float(Path("/proc/pressure/cpu").read_text().split()[1].partition("=")[2])


def queued_s() -> float:
    """Seconds for which this thread was ready to run while others had the processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def queued_share(folder: Path) -> float:
    """Share of its training time that worker 0 queued, once it has written its summary."""
    while not (folder / "queued.json").exists():
        time.sleep(0.1)
    measured = calibrate(folder, step_s=1.0).measured
    return json.loads((folder / "queued.json").read_text()) / measured.training_s


def folder_of(out: Path, name: str, attempt: int) -> Path:
    return out / f"{name.replace(', ', '-')}-{attempt}"


def begun(out: Path, name: str) -> list[Path]:
    """All runs of a method over one link, including interrupted ones."""
    return sorted(out.glob(f"{folder_of(out, name, 0).name[:-1]}*"))


def runs(out: Path, name: str) -> list[Path]:
    """The runs that reached their end."""
    return [run for run in begun(out, name) if (run / "queued.json").exists()]


# -- all of them -----------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    if options.worker:
        work(options.out, options.attempts, options.log_steps)
        return
    if not options.again:
        measure(options.out / "unlimited", UNLIMITED_MBIT, 0.0, 15, options.attempts)
    calibrations = {name: calibrate(quietest(options.out / "unlimited", name)) for name in METHODS}
    late_s = {name: lateness(quietest(options.out / "unlimited", name)) for name in METHODS}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for rate_mbit in options.rates:
        out = options.out / f"{rate_mbit:g}-mbit"
        if not options.again:
            measure(out, rate_mbit, DELAY_S, 0, options.attempts)
        for name in METHODS:
            row = compare(calibrations[name], late_s[name], out, name, rate_mbit)
            rows[name].append(row)
            print(line(name, row))
    write_runs(
        __file__,
        f"seconds and utilisation of {STEPS} steps by {WORKERS} workers over an emulated link of "
        f"{DELAY_S * 1e3:g} ms one way, predicted from a run of each method on a link without "
        "limits, and measured",
        rows,
        calibrations={
            name: described(found) | {"late_s": late_s[name]}
            for name, found in calibrations.items()
        },
        largest_error=largest(rows, "error"),
        largest_utilisation_error=largest(rows, "utilisation_error"),
    )


def largest(rows: Mapping[str, list[dict[str, Any]]], error: str) -> float:
    return max(abs(row[error]) for same in rows.values() for row in same)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted against measured, link by link.")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, metavar="MBIT")
    parser.add_argument("--attempts", type=int, default=6)
    parser.add_argument("--again", action="store_true", help="compare the runs there are")
    parser.add_argument("--worker", action="store_true", help="(how it starts its workers)")
    parser.add_argument("--log-steps", type=int, default=0, help="(a worker's)")
    return parser.parse_args()


def measure(out: Path, rate_mbit: float, delay_s: float, log_steps: int, attempts: int) -> None:
    """Train with every method over one link."""
    sys.path.append(str(HERE.parents[1] / "tools"))
    wan = importlib.import_module("wan")
    command = [sys.executable, str(HERE), str(out), "--worker"]
    command += ["--attempts", str(attempts), "--log-steps", str(log_steps)]
    # Nodes have no host names, and torch would warn about that at every connection.
    env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    line = {"rate_bps": rate_mbit * 1e6, "delay_s": delay_s, "queue_s": QUEUE_S}
    with wan.Link(nodes=WORKERS, **line) as link:
        workers = [link.popen(node, command, env=env) for node in range(WORKERS)]
        if failed := [worker.wait() for worker in workers if worker.wait()]:
            sys.exit(
                f"cannot measure at {rate_mbit:g} Mbit/s; because workers failed with {failed}; "
                "do: see the error above"
            )


def quietest(out: Path, name: str) -> Path:
    """The run that waited for the processor the least."""
    return min(runs(out, name), key=queued_share)


def lateness(folder: Path) -> float:
    """Median wait for an exchange on a link without limits, which workers and sending cause."""
    spans = pairwise((r.wait_s, r.rounds or 0.0) for r in read_finished(folder).records)
    waits = [((b[0] - a[0]), b[1] - a[1]) for a, b in spans]
    return median([wait_s / rounds for wait_s, rounds in waits if rounds] or [0.0])


def compare(
    job: Calibration, late_s: float, out: Path, name: str, rate_mbit: float
) -> dict[str, Any]:
    """A prediction, and the measurement to compare it with."""
    folder, link = quietest(out, name), Link.of(rate_mbit * 1e6, latency_s=DELAY_S)
    predicted = simulate(job.scenario(link, late_s=late_s), steps=STEPS)
    measured = calibrate(folder, step_s=1.0).measured
    # The error that would remain if the step time of this very run had been known.
    own = dataclasses.replace(job.job.compute, step_s=measured.inner_s / STEPS)
    timed = dataclasses.replace(job.scenario(link, late_s=late_s), compute=own)
    known = simulate(timed, steps=STEPS)
    return {
        "rate_mbit": rate_mbit,
        "predicted_s": predicted.wall_s,
        "measured_s": measured.training_s,
        "error": predicted.wall_s / measured.training_s - 1,
        "predicted_utilisation": predicted.utilisation,
        "measured_utilisation": measured.utilisation,
        "utilisation_error": predicted.utilisation / measured.utilisation - 1,
        "limit": predicted.limit(),
        "predicted_sent_bytes": job.traffic.sent_nbytes(STEPS),
        "measured_sent_bytes": measured.sent_nbytes,
        "measured_step_s": own.step_s,
        "error_if_steps_were_known": known.wall_s / measured.training_s - 1,
        "queued_share": queued_share(folder),
        "all_measured_s": [
            calibrate(run, step_s=1.0).measured.training_s for run in runs(out, name)
        ],
        "all_queued_shares": [queued_share(run) for run in runs(out, name)],
    }


def line(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"{row['rate_mbit']:4g} Mbit/s  {name:30}"
        f"  {row['predicted_s']:5.1f} s of {row['measured_s']:5.1f} s ({row['error']:+.1%})"
        f"  busy {row['predicted_utilisation']:.1%} of {row['measured_utilisation']:.1%}"
        f" ({row['utilisation_error']:+.1%})  {row['limit']:9}"
        f"  if steps were known, {row['error_if_steps_were_known']:+.1%}"
        f"  queued {row['queued_share']:.1%}"
    )


def described(job: Calibration) -> dict[str, float]:
    return {
        "step_s": job.job.compute.step_s,
        "outer_s_per_parameter": job.job.compute.outer_s_per_parameter,
        "measured_s": job.measured.training_s,
        "measured_utilisation": job.measured.utilisation,
    }


if __name__ == "__main__":
    main()
