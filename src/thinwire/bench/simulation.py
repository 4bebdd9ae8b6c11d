"""What simulating K workers in one process costs."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from thinwire.bench.result import (
    BenchReport,
    BenchResult,
    BenchTable,
    compare_alternating,
    one_core,
)
from thinwire.optim import Role, parameter_roles
from thinwire.train import launch
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.worker import token_losses

_PLAIN = "plain loop"


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


@dataclass(frozen=True, kw_only=True)
class PlainLoopReport(BenchReport):
    """CPU seconds of a step of the whole batch, by inner optimizer and by who takes it.

    Args:
        cpu_s: for each inner optimizer, of every repetition of the plain loop and of K workers.
    """

    cpu_s: Mapping[str, Mapping[str, Sequence[float]]]
    name: str = "plain-loop"

    def ratios(self) -> dict[str, dict[str, float]]:
        """The least of each over the least of the plain loop: other processes only add time."""
        return {
            inner: {who: min(s) / min(each[_PLAIN]) for who, s in each.items()}
            for inner, each in self.cpu_s.items()
        }

    def tables(self) -> Sequence[BenchTable]:
        """A row for each inner optimizer and who steps."""
        rows = tuple(
            (inner, who, f"{1000 * min(self.cpu_s[inner][who]):.1f}", f"{ratio:.2f}")
            for inner, each in self.ratios().items()
            for who, ratio in each.items()
        )
        title = "CPU time of a step of the whole batch, least of all repetitions"
        return [BenchTable(title=title, columns=("inner", "who", "ms", "ratio"), rows=rows)]

    def describe(self) -> dict[str, Any]:
        """The fields and the ratios."""
        return asdict(self) | {"ratios": self.ratios()}


def plain_loop(
    *, workers: Sequence[int] = (1, 4, 8), steps: int = 10, repeats: int = 15
) -> PlainLoopReport:
    """K simulated workers against a loop without thinwire: the same model, batches and clipping.

    The loop takes the whole batch at once and steps with torch's own fused AdamW, or with torch's
    Muon for the hidden matrices; in a second form, with K of each, which is what K workers have to
    compute. The workers train by the laptop recipe's DiLoCo and MuLoCo, outer rounds included. All
    compute with one thread, on one core where the system lets a process choose: two threads on
    cores that share their units would count each other's waits.

    Args:
        workers: every K.
        steps: inner steps of a repetition; a multiple of H has whole rounds.
        repeats: repetitions of each, in turns.
    """
    cpu_s: dict[str, dict[str, list[float]]] = {}
    with one_core():
        for inner, method in (("AdamW", "diloco"), ("Muon", "muloco")):
            cpu_s[inner] = _plain_loop(laptop(method), workers, steps=steps, repeats=repeats)
    return PlainLoopReport(cpu_s=cpu_s)


def _plain_loop(
    config: TrainConfig, workers: Sequence[int], *, steps: int, repeats: int
) -> dict[str, list[float]]:
    machine = replace(config.machine, threads=1)
    groups = {f"K={k}": _group(replace(config, workers=k, machine=machine)) for k in workers}
    steppers = {_PLAIN: _plain_step(config)}
    for k in workers:
        if k > 1:
            steppers[f"{_PLAIN}, {k} optimizers"] = _plain_step(config, optimizers=k)
    steppers |= {who: lambda group=group: _run(group, 1) for who, group in groups.items()}
    cpu_s = _cpu_s_in_turns(steppers, steps=steps, repeats=repeats)
    for group in groups.values():
        group.close()
    return cpu_s


def _plain_step(config: TrainConfig, *, optimizers: int = 1) -> Callable[[], None]:
    """A step of the loop; `optimizers` - 1 further ones step copies with the same gradients."""
    data = config.data.load()
    length, batch = config.data.sequence_length, config.global_batch
    model: nn.Module = config.model.build(data.vocab_size, length, config.seed)
    models = [model, *(copy.deepcopy(model) for _ in range(optimizers - 1))]
    has_muon = config.method.name == "muloco"
    steppers = [each for m in models for each in _plain_optimizers(m, has_muon=has_muon)]
    batches = data.training.batches(worker=0, workers=1, global_batch=batch, seed=config.seed)

    def step() -> None:
        token_losses(model, next(batches)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for further in models[1:]:
            for own, p in zip(further.parameters(), model.parameters(), strict=True):
                own.grad = p.grad
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _plain_optimizers(model: nn.Module, *, has_muon: bool) -> list[torch.optim.Optimizer]:
    roles = parameter_roles(model)
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if has_muon and roles[n] is Role.MATRIX]
    rest = [p for n, p in named.items() if not (has_muon and roles[n] is Role.MATRIX)]
    adamw = torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=5e-3, adjust_lr_fn="match_rms_adamw"), adamw]


def _cpu_s_in_turns(
    steppers: Mapping[str, Callable[[], None]], *, steps: int, repeats: int
) -> dict[str, list[float]]:
    """CPU seconds of a step, of every repetition, after one that is not measured."""
    found: dict[str, list[float]] = {who: [] for who in steppers}
    for _ in range(repeats + 1):
        for who, step in steppers.items():
            started_s = time.process_time()
            for _ in range(steps):
                step()
            found[who].append((time.process_time() - started_s) / steps)
    return {who: measured[1:] for who, measured in found.items()}


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
