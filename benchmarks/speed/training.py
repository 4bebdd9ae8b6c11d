"""The cost of simulating K workers in one process, and of a step of Muon."""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from speed.measuring import Report, Table, one_core, peak_temporary_nbytes, seconds, spent, threads
from thinwire.optim import Muon, Role, parameter_roles
from thinwire.train import launch
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop

PLAIN = "plain loop"
MUON_LAYERS = {128: 8, 256: 5, 512: 3, 1024: 1}  # by width


def simulation(*, workers: int = 4, steps: int = 10, repeats: int = 9) -> Report:
    """K simulated workers against one worker with the same global batch: tokens per second.

    Both run the laptop recipe's DiLoCo with all the machine's cores.

    Args:
        workers: K.
        steps: inner steps of a repetition; a multiple of H has whole rounds.
        repeats: repetitions of each, in turns, after one that is not measured.
    """
    ours, baseline = (_group(replace(laptop("diloco"), workers=k)) for k in (workers, 1))
    with closing(ours), closing(baseline):
        pairs = [
            [seconds(lambda group=group: _run(group, steps)) for group in (ours, baseline)]
            for _ in range(repeats + 1)
        ][1:]
    ratio = statistics.median(theirs_s / ours_s for ours_s, theirs_s in pairs)
    data = {
        "ours": f"{workers} simulated workers",
        "baseline": "one worker, same global batch",
        "ours_s": [ours_s for ours_s, _ in pairs],
        "baseline_s": [theirs_s for _, theirs_s in pairs],
        "speed_ratio": ratio,
    }
    table = Table(
        "speed against a baseline, median of paired repetitions",
        ("ours", "baseline", "ratio"),
        [(data["ours"], data["baseline"], f"{ratio:.2f}")],
    )
    return Report(data, [table])


def plain_loop(*, workers: Sequence[int] = (1, 4, 8), steps: int = 10, repeats: int = 15) -> Report:
    """K simulated workers against a loop without thinwire: the same model, batches and clipping.

    The loop takes the whole batch at once and steps with torch's own fused AdamW, or with torch's
    Muon for the hidden matrices; in a second form, with K optimizers, which is what K workers have
    to compute. The workers train by the laptop recipe's DiLoCo and MuLoCo, outer rounds included.
    All compute with one thread, on one core if the system lets a process choose: two threads on
    cores that share their units would count each other's waits.

    Args:
        workers: values of K.
        steps: inner steps of a repetition; a multiple of H has whole rounds.
        repeats: repetitions of each, in turns, after one that is not measured.
    """
    cpu_s: dict[str, dict[str, list[float]]] = {}
    with one_core():
        for inner, method in (("AdamW", "diloco"), ("Muon", "muloco")):
            config = laptop(method)
            config = replace(config, machine=replace(config.machine, threads=1))
            groups = {f"K={k}": _group(replace(config, workers=k)) for k in workers}
            steppers = {PLAIN: _plain_step(config)}
            for k in workers:
                if k > 1:
                    steppers[f"{PLAIN}, {k} optimizers"] = _plain_step(config, optimizers=k)
            for who, group in groups.items():
                steppers[who] = lambda group=group: _run(group, 1)
            cpu_s[inner] = _cpu_s_in_turns(steppers, steps=steps, repeats=repeats)
            for group in groups.values():
                group.close()
    # Least time over the plain loop's least time, because other processes only add time.
    ratios = {
        inner: {who: min(s) / min(each[PLAIN]) for who, s in each.items()}
        for inner, each in cpu_s.items()
    }
    rows = [
        (inner, who, f"{1000 * min(cpu_s[inner][who]):.1f}", f"{ratio:.2f}")
        for inner, each in ratios.items()
        for who, ratio in each.items()
    ]
    title = "CPU time of a step of the whole batch, least of all repetitions"
    table = Table(title, ("inner", "who", "ms", "ratio"), rows)
    return Report({"cpu_s": cpu_s, "ratios": ratios}, [table])


def muon(*, widths: Sequence[int] = (128, 256, 512, 1024), repeats: int = 15) -> Report:
    """thinwire's Muon against torch's on the hidden matrices of small Llamas, in turns.

    Each layer has four matrices [w, w], two [3w, w] and one [w, 3w]. Measures the least CPU seconds
    of one thread, and the most bytes of temporaries.

    Args:
        widths: widths of the models.
        repeats: steps of each, after one that is not measured.
    """
    rows: list[dict[str, Any]] = []
    with threads(1):
        for width in widths:
            mine, theirs = _matrices(width), _matrices(width)
            group = {"params": mine, "rule": "muon"}
            settings = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "scale": "rms"}
            steps = {
                "ours": Muon([group], lr=0.01, **settings).step,
                "torch": torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw").step,
            }
            cpu_s = _cpu_s_in_turns(steps, steps=1, repeats=repeats)
            row: dict[str, Any] = {"width": width, "parameters": sum(p.numel() for p in mine)}
            for who, step in steps.items():
                row[f"{who}_cpu_s"] = cpu_s[who]
                row[f"{who}_nbytes"] = peak_temporary_nbytes(step)[1]
            rows.append(row | {"ratio": min(cpu_s["ours"]) / min(cpu_s["torch"])})
    table = Table(
        "a step of Muon against torch.optim.Muon, CPU time of one thread, temporaries",
        ("width", "ms", "ratio", "B/param", "torch's"),
        [
            (
                *(str(row["width"]), f"{1000 * min(row['ours_cpu_s']):.1f}"),
                f"{row['ratio']:.2f}",
                *(f"{row[f'{who}_nbytes'] / row['parameters']:.2f}" for who in ("ours", "torch")),
            )
            for row in rows
        ],
    )
    return Report({"rows": rows}, [table])


def _plain_step(config: TrainConfig, *, optimizers: int = 1) -> Callable[[], None]:
    """A step of the loop; `optimizers` - 1 further optimizers step copies with its gradients."""
    data = config.data.load()
    length, batch = config.data.sequence_length, config.global_batch
    model: nn.Module = config.model.build(data.tokenizer.vocab_size, length, config.seed)
    models = [model, *(copy.deepcopy(model) for _ in range(optimizers - 1))]
    has_muon = config.method.name == "muloco"
    steppers = [each for m in models for each in _plain_optimizers(m, has_muon=has_muon)]
    batches = data.training.batches(worker=0, workers=1, global_batch=batch, seed=config.seed)

    def step() -> None:
        windows = next(batches)
        logits = model(input_ids=windows[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
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
    work: Mapping[str, Callable[[], object]], *, steps: int, repeats: int
) -> dict[str, list[float]]:
    """CPU seconds of a step in every repetition, after one that is not measured."""
    found: dict[str, list[float]] = {who: [] for who in work}
    for _ in range(repeats + 1):
        for who, step in work.items():
            taken = spent(lambda step=step: [step() for _ in range(steps)])
            found[who].append(taken.cpu_s / steps)
    return {who: measured[1:] for who, measured in found.items()}


def _group(config: TrainConfig) -> Any:
    config = launch.resolve(config)
    return launch.assemble(config, config.data.load())


def _run(group: Any, steps: int) -> None:
    for _ in range(steps):
        group.inner_step()
        group.outer_step()


def _matrices(width: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    square, up, down = (width, width), (3 * width, width), (width, 3 * width)
    made: list[nn.Parameter] = []
    for shape in [*[square] * 4, up, up, down] * MUON_LAYERS.get(width, 1):
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        made.append(parameter)
    return made
