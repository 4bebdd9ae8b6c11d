"""What simulating K workers in one process costs."""

from dataclasses import replace

from thinwire.bench.result import BenchResult, compare_alternating
from thinwire.train import launch
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.workers.group import WorkerGroup

__all__ = ["simulation", "stacked_simulation"]


def simulation(*, workers: int = 4, steps: int = 10, repeats: int = 9) -> BenchResult:
    """K simulated workers against one worker with the same global batch: tokens per second.

    Both run the laptop recipe's DiLoCo with all the machine's cores.

    Args:
        workers: K.
        steps: inner steps of a repetition; a multiple of H has whole rounds.
        repeats: repetitions of each, in turns.
    """
    config = laptop("diloco")
    many, one = (replace(config, workers=k) for k in (workers, 1))
    ours_s, baseline_s = _in_turns(many, one, steps=steps, repeats=repeats)
    return BenchResult(
        name="simulation",
        ours=f"{workers} simulated workers",
        baseline="one worker, same global batch",
        ours_s=ours_s,
        baseline_s=baseline_s,
    )


def stacked_simulation(*, workers: int = 8, steps: int = 10, repeats: int = 9) -> BenchResult:
    """K simulated workers stacked into one set of matrices against the same workers on threads.

    Both run the laptop recipe's DiLoCo with all the machine's cores.

    Args:
        workers: K.
        steps: inner steps of a repetition; a multiple of H has whole rounds.
        repeats: repetitions of each, in turns.
    """
    config = replace(laptop("diloco"), workers=workers)
    stacked_config = replace(config, machine=replace(config.machine, simulation="stacked"))
    ours_s, baseline_s = _in_turns(stacked_config, config, steps=steps, repeats=repeats)
    return BenchResult(
        name="stacked-simulation",
        ours=f"{workers} stacked workers",
        baseline="the same workers on threads",
        ours_s=ours_s,
        baseline_s=baseline_s,
    )


def _in_turns(
    ours: TrainConfig, baseline: TrainConfig, *, steps: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each repetition."""
    groups = _group(ours), _group(baseline)
    seconds = compare_alternating(
        lambda: _run(groups[0], steps), lambda: _run(groups[1], steps), repeats=repeats
    )
    for group in groups:
        group.close()
    return seconds


def _group(config: TrainConfig) -> WorkerGroup:
    config = launch.resolve(config)
    return launch.assemble(config, config.data.load())


def _run(group: WorkerGroup, steps: int) -> None:
    for _ in range(steps):
        group.inner_step()
        group.outer_step()
