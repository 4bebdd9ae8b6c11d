"""The search for an arm's rates, at its own K, H and codec: one rule for every arm.

A family's search begins at the laptop recipe's rates, any other arm's where its family's ended. One
setting at a time goes a step up or down its ladder, and stays there if the loss falls. The search
ends once every step from the best candidate was tried and is worse, so that a choice is at no edge
but that of a ladder. All candidates run with the first seed and the best four with all three. The
one with the lowest mean is chosen, and every step from it is tried as well: the best by one seed is
often not the best, and where seeds end far apart, two are not enough either. The seeds and the
validation documents differ from those of the reported runs.
"""

import dataclasses
import math
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeAlias, cast

from claim_corpora import held_out
from thinwire.codecs import PerRole, Quantise
from thinwire.errors import IncompleteError
from thinwire.experiments import Rates
from thinwire.experiments.grid import has_rounds, with_changes, with_rates
from thinwire.experiments.runners import PlannedRun, no_observer, one_by_one
from thinwire.feedback import DecoupledMomentum, ErrorFeedback, NoFeedback
from thinwire.method import Method
from thinwire.runs.status import RunState, status_of
from thinwire.train.config import TrainConfig

SEEDS = (10, 11, 12)
FINALISTS = 4
"""Candidates that run with all seeds."""
MOST = 40
"""The most candidates of an arm; a search that needs more has not found a minimum, and says so."""
RATIO = 2.0
"""Factor from one inner rate to the next."""
LADDERS = {
    "outer_lr": (0.25, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0),
    "outer_momentum": (0.0, 0.3, 0.6, 0.8, 0.9),
    "feedback_decay": (0.0, 0.9, 1.0),
}
"""Values to try; 0 is no momentum, or no feedback. A value in between steps to its neighbours."""
WHAT = (
    "validation loss in nats per byte of documents of the training side that the search alone "
    "holds out, with seeds from 10 on; rows with seeds 0 and 1: of the reported documents, the "
    "best of four candidates"
)
Settings: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search may spend.

    Args:
        seeds: seeds of the best candidates; all candidates run with the first.
        steps: inner steps of a run; None is the number of the reported runs.
        names: settings to search; all if empty.
    """

    seeds: tuple[int, ...] = SEEDS
    steps: int | None = None
    names: tuple[str, ...] = ()

    def covers(self, config: TrainConfig) -> bool:
        """Whether the search's runs have at least four rounds, or as many as the reported ones."""
        return self.steps is None or 4 * config.method.sync_every <= self.steps

    def ways(self, settings: Settings, begin: str = "") -> Iterator[tuple[str, dict[str, float]]]:
        """The candidates one step away, in the settings that are searched."""
        return (way for way in steps(settings, begin) if way[0] in (self.names or settings))


WHOLE = Budget()


def with_settings(method: Method, settings: Settings) -> Method:
    """`method` with the rates and feedback that a search chose.

    >>> import thinwire as tw
    >>> with_settings(tw.presets.muloco(bits=1), {"feedback_decay": 0.0}).feedback
    NoFeedback()
    """
    rates = {name: value for name, value in settings.items() if name != "feedback_decay"}
    if isinstance(method.feedback, DecoupledMomentum) and "outer_momentum" in rates:
        feedback = DecoupledMomentum(decay=rates.pop("outer_momentum"))
        method = dataclasses.replace(method, feedback=feedback)
    method = with_rates(method, sync_every=None, rates=Rates(**rates))
    decay = settings.get("feedback_decay")
    if decay is None:
        return method
    feedback = ErrorFeedback(decay=decay) if decay else NoFeedback()
    return dataclasses.replace(method, feedback=feedback)


def settings_of(config: TrainConfig) -> dict[str, float]:
    """Where the search for an arm begins: the settings that it would run with otherwise."""
    method, inner = config.method, cast("Any", config.method.inner)
    found = {"inner_lr": inner.lr}
    if has_rounds(config):
        outer: Any = method.outer
        is_own = isinstance(method.feedback, DecoupledMomentum)
        momentum = method.feedback.decay if is_own else outer.momentum
        found |= {"outer_lr": outer.lr, "outer_momentum": momentum}
    if isinstance(method.codec, Quantise | PerRole):
        feedback: Any = method.feedback
        found["feedback_decay"] = 0.0 if isinstance(feedback, NoFeedback) else feedback.decay
    return found


def steps(settings: Settings, begin: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """The candidates one step away, with the name of the changed setting; `begin` comes first.

    >>> [each["outer_momentum"] for _, each in steps({"outer_momentum": 0.45})]
    [0.3, 0.6]
    >>> list(steps({"inner_lr": 1.0}))
    [('inner_lr', {'inner_lr': 0.5}), ('inner_lr', {'inner_lr': 2.0})]
    """
    names = list(settings)
    start = names.index(begin) if begin else 0
    for name in names[start:] + names[:start]:
        value = settings[name]
        ladder = LADDERS.get(name, (value / RATIO, value * RATIO))
        below, above = (each for each in ladder if each < value), (e for e in ladder if e > value)
        for other in (max(below, default=None), min(above, default=None)):
            if other is not None:
                yield name, {**settings, name: other}


def search(
    config: TrainConfig, out: Path, known: Mapping[str, Any] | None = None, budget: Budget = WHOLE
) -> dict[str, Any]:
    """Search the settings of one arm, and keep runs that are already in `out`.

    Args:
        config: configuration of the arm.
        out: folder of the runs.
        known: a row of the committed file, from which the search continues.
        budget: what the search may spend.

    Returns:
        A row of the committed file.
    """
    first, tried = budget.seeds[0], dict[tuple[tuple[str, float], ...], dict[int, float]]()
    begin = settings_of(config)
    for each in known["candidates"] if known else ():
        runs = {int(seed): run["val_loss"] for seed, run in each["runs"].items()}
        if first in runs:  # otherwise an earlier search chose by reported losses
            # The file may have settings in another order.
            tried[tuple((name, each["settings"][name]) for name in begin)] = runs

    def loss(settings: Settings, seed: int) -> float:
        runs = tried.setdefault(tuple(settings.items()), {})
        if seed not in runs:
            runs[seed] = _loss(config, settings, seed, out)
        return runs[seed]

    def untried(settings: Settings, moved: str = "") -> list[tuple[str, dict[str, float]]]:
        return [w for w in budget.ways(settings, moved) if tuple(w[1].items()) not in tried]

    moved = ""
    loss(begin, first)
    best = dict(min(tried, key=lambda each: tried[each][first]))
    while (ways := untried(best, moved)) and len(tried) < MOST:
        name, other = ways[0]
        if loss(other, first) < loss(best, first):
            best, moved = other, name
    while True:
        finalists = sorted(tried, key=lambda each: tried[each][first])[:FINALISTS]
        for each in finalists:
            for seed in budget.seeds:
                loss(dict(each), seed)
        # Includes candidates that others have since overtaken with the first seed.
        whole = [each for each, runs in tried.items() if len(runs) == len(budget.seeds)]
        chosen = min(whole, key=lambda each: sum(tried[each].values()))
        around = untried(dict(chosen))
        if not around or len(tried) >= MOST:
            break
        for _, other in around:
            loss(other, first)
    return {
        "chosen": dict(chosen),
        "why": f"the lowest mean over seeds {', '.join(map(str, budget.seeds))} of "
        f"{len(whole)} of {len(tried)}" + (f"; not settled after {MOST}" if around else ""),
        "at_the_edge_of": list(budget.names or best) if around else [],
        "candidates": [
            {"settings": dict(each), "runs": {str(s): {"val_loss": v} for s, v in runs.items()}}
            for each, runs in tried.items()
        ],
    }


def lowest(row: Mapping[str, Any], seeds: tuple[int, ...] = SEEDS) -> Settings | None:
    """The settings with the lowest mean of those that ran with all seeds; None if none did."""
    means = [
        (statistics.fmean(run["val_loss"] for run in each["runs"].values()), each["settings"])
        for each in row["candidates"]
        if {*map(str, seeds)} == each["runs"].keys()
    ]
    return min(means, key=lambda each: each[0], default=(0.0, None))[1]


def is_done(row: Mapping[str, Any] | None, budget: Budget = WHOLE) -> bool:
    """Whether a row of the committed file is the result of a complete search by this rule."""
    if row is None or lowest(row, budget.seeds) != row["chosen"]:
        return False
    tried = [each["settings"] for each in row["candidates"]]
    runs = [len(each["runs"]) for each in row["candidates"]]
    is_around = bool(row["at_the_edge_of"]) or all(
        w in tried for _, w in budget.ways(row["chosen"])
    )
    return is_around and runs.count(len(budget.seeds)) >= min(FINALISTS, len(runs))


def _loss(config: TrainConfig, settings: Settings, seed: int, out: Path) -> float:
    """Validation loss of one candidate; infinite if it diverges."""
    name = "-".join(f"{value:g}" for value in settings.values())
    folder = out / f"{name}-seed{seed}"
    method = with_settings(config.method, settings)
    config = dataclasses.replace(config, method=method, seed=seed)
    planned = PlannedRun(title=f"{config.method.name} {name}", folder=folder, config=config)
    if (status := status_of(folder, config.describe())).state is not RunState.FINISHED:
        failures = one_by_one([planned], no_observer)
        status = status_of(folder, config.describe())
        if status.state is not RunState.DIVERGED and failures != [None]:
            raise IncompleteError(
                f"search the rates of {config.method.name!r}",
                because=planned.failed(failures[0] or ""),
                do="fix the cause and repeat the command",
            )
    return math.inf if status.run is None else status.run.summary.val_loss


def search_all(
    configs: Mapping[str, TrainConfig],
    out: Path,
    jobs: int,
    *,
    known: Mapping[str, Any],
    budget_of: Callable[[str], Budget] = lambda _: WHOLE,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Search the settings of arms, several at a time; yields each row when it is found."""
    if not configs:
        return
    corpus = held_out(next(iter(configs.values())).data.corpus, out / "corpus")
    changes: dict[str, Any] = {"data.corpus": str(corpus), "data.tokenizer": "ids:256"}
    with _pool(jobs) as pool:
        running = {
            pool.submit(
                search,
                with_changes(config, {**changes, "steps": budget_of(arm).steps or config.steps}),
                out / arm.replace(" ", "-"),
                known.get(arm),
                budget_of(arm),
            ): arm
            for arm, config in configs.items()
        }
        for ended in as_completed(running):
            yield running[ended], ended.result()


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that end with this one: a search went on for hours after it was killed."""
    context = get_context("forkserver")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
