"""What fragments, delay, mixing and four bits cost, over 400 steps and three seeds.

python benchmarks/streaming_claims.py OUT       resumable; half a minute a run on two cores

Model, data, batch and methods are the laptop recipe's, K=4, H=10. What streams inherits the inner
optimizer that was tuned for what does not; its outer one was the best of four (docs/log.md).
"""

import dataclasses
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import thinwire as tw
from setting import write_runs
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS = (0, 1, 2)
STEPS = 400
PRECISE = tw.codecs.Identity()


def arms() -> dict[str, tuple[str, dict[str, Any]]]:
    """The recipe's method and the slots that are changed in it, by name."""
    late = tw.Delay(tau=2, mixing=0.5)
    # Where nothing is mixed, DiLoCo's outer optimizer is the better one, as for DiLoCo itself.
    unmixed = {"codec": PRECISE, "outer": laptop("diloco").method.outer}
    two_of_two = {"overlap": late, "fragments": tw.Strided(layers=2)}
    return {
        "diloco": ("diloco", {}),
        "fragments": ("streaming_diloco", {**unmixed, "overlap": tw.Delay()}),
        "fragments, tau 2": ("streaming_diloco", {**unmixed, "overlap": tw.Delay(tau=2)}),
        "fragments, tau 2, alpha .5": ("streaming_diloco", {"codec": PRECISE, "overlap": late}),
        "fragments, tau 2, alpha .5, E3M0": ("streaming_diloco", {"overlap": late}),
        "of two layers, tau 2, alpha .5, E3M0": ("streaming_diloco", two_of_two),
        "eager": ("diloco", {"overlap": tw.Eager()}),
        "naive delay, tau 9": ("diloco", {"overlap": tw.Delay(tau=9)}),
        "muloco": ("muloco", {}),
        "muloco, fragments, tau 2, alpha .5, E3M0": ("streaming_muloco", {"overlap": late}),
    }


def main() -> None:
    out = Path(sys.argv[1])
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, (preset, slots) in arms().items():
        runs[name] = [one(out, name, preset, slots, seed) for seed in SEEDS]
        mean = statistics.fmean(run["val_loss"] for run in runs[name])
        print(f"{mean:.4f}  {name}", flush=True)
    write(runs)


def one(out: Path, name: str, preset: str, slots: dict[str, Any], seed: int) -> dict[str, Any]:
    config = laptop(preset)
    config = dataclasses.replace(
        config,
        seed=seed,
        steps=STEPS,
        method=dataclasses.replace(config.method, name=name, **slots),
        periods=dataclasses.replace(config.periods, evaluate_steps=0, checkpoint_steps=200),
    )
    folder = re.sub(r"[^\w.]+", "-", name)
    return resume(config, out / f"{folder}-seed{seed}")


def write(runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = {name: [run["val_loss"] for run in same] for name, same in runs.items()}
    sixteen_bit_bytes = runs["diloco"][0]["sent_bytes_per_worker"] / 2
    rows = {
        name: {
            "val_loss_mean": statistics.fmean(losses[name]),
            "val_loss_stderr": statistics.stdev(losses[name]) / len(SEEDS) ** 0.5,
            "over_diloco_paired": over(losses[name], losses["diloco"]),
            "over_muloco_paired": over(losses[name], losses["muloco"]),
            "sent_bytes_per_worker": same[0]["sent_bytes_per_worker"],
            "of_16_bit_diloco_bytes": same[0]["sent_bytes_per_worker"] / sixteen_bit_bytes,
            "peak_sent_bytes_per_step": same[0]["peak_sent_bytes_per_step"],
        }
        for name, same in runs.items()
    }
    write_runs(
        __file__,
        f"validation loss in nats per byte, laptop model, K=4, H=10, {STEPS} steps; "
        "a fragment for each of 4 layers and one for the rest unless said",
        runs,
        seeds=SEEDS,
        rows=rows,
    )


def over(losses: list[float], base: list[float]) -> list[float]:
    """loss / base - 1, seed by seed."""
    return [loss / b - 1 for loss, b in zip(losses, base, strict=True)]


if __name__ == "__main__":
    main()
