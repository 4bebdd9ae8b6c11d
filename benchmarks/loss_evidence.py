"""What `thinwire plan` knows of losses, out of the results of this folder.

    python benchmarks/loss_evidence.py

writes src/thinwire/plan/loss_evidence.json: differences between arms of claims-small.json (480
steps) and wire-claims.json (1,600 steps), paired by seed, as a share of the loss of data-parallel
AdamW over as many steps. A test compares the file with the results.
"""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "src" / "thinwire" / "plan" / "loss_evidence.json"
PARAMETERS, SHORT, LONG = 246_336, 480, 1600
DENSITIES = ("1/8", "1/64", "1/128", "1/256")


def short_losses() -> dict[str, list[float]]:
    """Arm -> loss by seed, after 480 steps."""
    rows = json.loads((HERE / "results" / "claims-small.json").read_text())["rows"]
    return {arm: list(row["val_loss_by_seed"].values()) for arm, row in rows.items()}


def long_losses() -> dict[str, list[float]]:
    """Arm -> loss by seed, after 1,600 steps, of the arms with three seeds."""
    found = json.loads((HERE / "results" / "wire-claims.json").read_text())
    runs = {arm: [run["val_loss"] for run in same] for arm, same in found["runs"].items()}
    return {arm: losses for arm, losses in runs.items() if len(losses) == len(found["seeds"])}


def short_terms() -> Iterator[tuple[str, str, float, str, str]]:
    """Term, of what, at which value, arm, and the arm that it is compared with."""
    for inner, arm in (("adamw", "diloco"), ("muon", "muloco")):
        yield "base", inner, 4, arm, "ddp"
        yield "interval", inner, 5, f"{arm} H=5", arm
        yield "interval", inner, 30, f"{arm} H=30", arm
        for workers in (1, 8, 16):
            yield "workers", inner, workers, f"{arm} K={workers}", arm
    for every in (5, 30):
        yield "interval", "sparse", every, f"sparseloco H={every}", "sparseloco"
    yield "interval", "muloco:bits=1", 30, "muloco 1 bit, H=30", "muloco 1 bit"
    for bits in (4, 2, 1):
        yield "bits", "muloco", bits, f"muloco {bits} bit", "muloco"
    for method, dense in (
        ("streaming_diloco", "diloco"),
        ("streaming_muloco", "muloco"),
        ("sparseloco", "diloco"),
        ("sparse_muloco", "muloco"),
        ("noloco", "diloco"),
        ("demo", "ddp"),
    ):
        yield "method", method, 4, method, dense
    yield "tau", "streaming", 5, "fragments, tau 5, alpha .5", "fragments, tau 2, alpha .5"
    for method in ("sparseloco", "sparse_muloco"):
        for density in DENSITIES:
            top, bottom = map(int, density.split("/"))
            yield "density", method, top / bottom, f"{method} {density}", method


def long_terms() -> Iterator[tuple[str, str, float, str, str]]:
    for inner, arm in (("adamw", "diloco"), ("muon", "muloco")):
        yield "base", inner, 4, arm, "ddp, AdamW"
    for every in (20, 30, 64):
        yield "interval", "muloco:bits=1", every, f"muloco, 1 bit, H={every}", "muloco, 2 bit"
    yield "bits", "muloco", 2, "muloco, 2 bit", "muloco"
    for method, arm, dense in (
        ("streaming_diloco", "streaming_diloco, E3M0", "diloco"),
        ("streaming_muloco", "streaming_muloco, E3M0", "muloco"),
        ("sparseloco", "sparseloco, k=128", "diloco"),
        ("sparse_muloco", "sparse_muloco, k=128", "muloco"),
    ):
        yield "method", method, 4, arm, dense


def more_workers(losses: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """What a method loses to its dense one with more workers, beyond what it loses with four."""
    for method, arm, dense, teams in (
        ("muloco:bits=1", "muloco 1 bit", "muloco", (8, 16)),
        ("sparse_muloco", "sparse_muloco", "muloco", (8, 16)),
        ("sparseloco", "sparseloco", "diloco", (8, 16)),
        ("noloco", "noloco", "diloco", (8,)),
    ):
        few = differences(losses, arm, dense)
        for workers in teams:
            many = differences(losses, f"{arm} K={workers}", f"{dense} K={workers}")
            yield row(
                ("method_workers", method, workers, f"{arm} K={workers}", f"{dense} K={workers}"),
                [more - less for more, less in zip(many, few, strict=True)],
                losses["ddp"],
                SHORT,
            )


def differences(losses: dict[str, list[float]], arm: str, against: str) -> list[float]:
    return [one - other for one, other in zip(losses[arm], losses[against], strict=True)]


def row(
    term: tuple[str, str, float, str, str], found: list[float], base: list[float], steps: int
) -> dict[str, Any]:
    what, of, at, arm, against = term
    loss = statistics.mean(base)
    return {
        "term": what,
        "of": of,
        "at": at,
        "steps": steps,
        "arm": arm,
        "against": against,
        "share": round(statistics.mean(found) / loss, 6),
        "standard_error": round(statistics.stdev(found) / math.sqrt(len(found)) / loss, 6),
    }


def evidence() -> dict[str, Any]:
    short, long = short_losses(), long_losses()
    rows = [row(t, differences(short, *t[3:]), short["ddp"], SHORT) for t in short_terms()]
    rows += [row(t, differences(long, *t[3:]), long["ddp, AdamW"], LONG) for t in long_terms()]
    return {
        "what": "differences in validation loss, as a share of that of data-parallel AdamW",
        "command": "python benchmarks/loss_evidence.py",
        "parameters": PARAMETERS,
        "seeds": len(short["ddp"]),
        "rows": [*rows, *more_workers(short)],
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(evidence(), indent=1) + "\n")
