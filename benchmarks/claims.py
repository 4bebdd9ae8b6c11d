"""The published claims, tested: `make claims`, or

python benchmarks/claims.py small OUT              two cores, 50 minutes a seed
python benchmarks/claims.py medium OUT             the main claims at 2.0M parameters: a day and a
                                                   night, or --minutes at a time; on a GPU, too,
                                                   with --jobs 12

Keeps runs that are in OUT, and continues unfinished ones. All arms run with seed 0, then 1, then 2,
and their losses are compared with those in benchmarks/results/. Without such results, or with
--write, writes the losses of all seeds there, and docs/claims-SETTING.md; in that case one rule
first searches the rates of every family, and of every arm of another K or H or over workers, unless
benchmarks/results/ has them. After a change to some arms, --write --arms "ARM" "ARM" searches and
runs only these and keeps the rows of all others; --seeds 3 4 5 adds these seeds to theirs, and
--seeds 0 begins with one. --judge runs nothing, and writes what today's rules say about the
committed rows.
"""

import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from msgspec import to_builtins

from claim_arms import OVER_WORKERS, arms, borrowed
from claim_clock import clock
from claim_list import BASELINES, fingerprint, verdicts
from claim_page import page
from claim_settings import (
    FAMILIES,
    MORE_SEEDS,
    SEEDS,
    SETTINGS,
    Setting,
    searched,
    tuned,
    tuning_file,
)
from claim_tuning import WHAT, is_done, search_all
from moved_bytes import moved
from setting import kind_of_machine
from setting import setting as machine
from thinwire.errors import ConfigurationError, IncompleteError
from thinwire.experiments import Comparison, Experiment, compare
from thinwire.experiments.parallel import ParallelRunner
from thinwire.experiments.runners import Runner, one_by_one
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import estimate, paired_difference
from thinwire.runs.variants import Variant
from thinwire.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
BASES = (*BASELINES, "diloco")
"""Arms to compare all others with."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Test the published claims."""

    setting: Annotated[Literal["small", "medium"], tyro.conf.Positional]
    """Which size."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the run folders."""
    seeds: tuple[int, ...] = SEEDS
    """Which of them to run."""
    minutes: float | None = None
    """After which to stop; what is unfinished goes on when the command is repeated."""
    write: bool = False
    """Replace the committed results instead of comparing with them."""
    arms: tuple[str, ...] = ()
    """Which arms to run, all by default; the committed rows of the others are kept."""
    jobs: int | None = None
    """How many runs at a time, such as 12 on one GPU; by default as the setting has it."""
    judge: bool = False
    """Run nothing, and judge the committed rows again."""


def main(command: Command) -> None:
    known = {*command.seeds} <= {*SEEDS, *MORE_SEEDS}
    if command.write and command.seeds != SEEDS and not (command.arms and known):
        raise ConfigurationError(
            f"write the results of seeds {command.seeds}",
            because=f"the committed table is of seeds {SEEDS}, and of {MORE_SEEDS} for some arms",
            do="leave out --write or --seeds, or name arms for some of these",
        )
    if command.minutes is not None:
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, 60 * command.minutes)
    try:
        setting = SETTINGS[command.setting]
        _test(replace(setting, jobs=command.jobs or setting.jobs), command)
    except KeyboardInterrupt:
        sys.exit("stopped before the end; repeat the command, which goes on from here")


def _test(setting: Setting, command: Command) -> None:
    if not command.judge:
        if setting.corpus is not None:
            corpus = str(setting.corpus(command.out / "corpus"))
            setting = replace(setting, changes={**setting.changes, "data.corpus": corpus})
        if command.write or not _file(setting).is_file():  # otherwise the committed rates are used
            _search_missing(setting, command.out / "tuning", command.arms)
    setting = tuned(setting)
    if command.judge:
        return _write(setting, result(setting, {}, _committed(setting)))
    variants, seconds = _run(setting, command.out / "runs", command.seeds, command.arms)
    print(f"{seconds / 60:.1f} minutes", flush=True)
    if command.write or (command.seeds == SEEDS and not _file(setting).is_file()):
        kept = _committed(setting) if command.arms else {"rows": {}}
        return _write(setting, result(setting, variants, kept))
    configs = arms(setting)
    ran = {arm: _row(variant, configs[arm]) for arm, variant in variants.items()}
    sys.exit(reproduced({"rows": ran}, _committed(setting)))


def _time_is_up(*_: object) -> None:
    raise KeyboardInterrupt


def _runner(setting: Setting) -> Runner:
    return one_by_one if setting.jobs == 1 else ParallelRunner(setting.jobs)


def _search_missing(setting: Setting, out: Path, only: tuple[str, ...]) -> None:
    """Search missing rows of the committed file: families, then arms with rates of their own."""
    file = tuning_file(setting)
    for is_family in (True, False):
        own, known = tuned(setting), searched(setting)
        wanting = {*known, *OVER_WORKERS.values()}
        missing = {
            arm: config
            for arm, config in arms(own).items()
            if not is_done(known.get(arm), setting.budget_of(arm))
            and (arm in FAMILIES) == is_family
            and (is_family or arm in wanting or borrowed(own, arm, config))
            and setting.budget_of(arm).covers(config)
            and (not only or arm in only)
        }
        found = search_all(missing, out, setting.jobs, known=known, budget_of=setting.budget_of)
        for arm, row in found:
            # Written atomically, because time may run out meanwhile.
            write_json(file, {"what": WHAT, "rows": searched(setting) | {arm: row}})
            print(f"{arm}: {row['chosen']}, {row['why']}", flush=True)


def _run(
    setting: Setting, out: Path, seeds: tuple[int, ...], only: tuple[str, ...]
) -> tuple[dict[str, Variant], float]:
    configs, start = arms(setting), time.perf_counter()
    if not {*only} <= configs.keys():
        raise ConfigurationError(
            f"run {', '.join(sorted({*only} - configs.keys()))}",
            because="there is no such arm",
            do=f"take some of {', '.join(configs)}",
        )
    configs = {arm: configs[arm] for arm in only or configs}
    experiment = Experiment(recipe=configs.__getitem__, methods=tuple(configs), seeds=seeds)
    comparison = compare(experiment, out, runner=_runner(setting))
    _check(comparison, out)
    variants = {row.spec.method: row.variant for row in comparison.rows if row.variant}
    return variants, time.perf_counter() - start


def _check(comparison: Comparison, out: Path) -> None:
    problems = comparison.problems()
    if problems:
        folder, status = next(iter(problems.items()))
        raise IncompleteError(
            f"judge the claims from {out}",
            because=f"{len(problems)} runs have no result; {folder}: {status.why}",
            do="fix the cause and repeat the command",
        )


# -- results ---------------------------------------------------------------------------------------


def result(
    setting: Setting, variants: Mapping[str, Variant], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything to commit; for arms that did not run now, the rows in `kept`."""
    configs = {a: c for a, c in arms(setting).items() if a in variants or a in kept["rows"]}
    rows = {
        arm: with_other_seeds(_row(variants[arm], config), kept["rows"].get(arm))
        if arm in variants
        else kept["rows"][arm]
        for arm, config in configs.items()
    }
    losses = {
        arm: {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for arm, row in rows.items()
    }
    margin, judged = verdicts(setting, rows)
    return {
        "what": f"validation loss in nats per byte, {setting.what}",
        "command": f"python benchmarks/claims.py {setting.name} OUT --write",
        **(machine() if variants else {key: kept[key] for key in machine()}),
        "rows": {arm: row | _against(losses[arm], losses) for arm, row in rows.items()},
        "margin_nats": margin,
        "claims": judged,
        "clock": clock(
            setting, configs, {a: row["curve"] for a, row in rows.items() if "curve" in row}
        ),
    }


def _row(variant: Variant, config: TrainConfig) -> dict[str, Any]:
    """What the runs of an arm found, and what distinguishes them from other runs."""
    run = variant.runs[0]
    sent, received = run.summary.sent_bytes_per_worker, run.summary.received_bytes_per_worker
    size = {"parameters": run.summary.parameters, "steps": config.steps}
    return {
        "val_loss_by_seed": {str(seed): loss for seed, loss in variant.losses.items()},
        "curve": _curve(variant),
        **moved(sent, received, workers=config.workers, **size),
        "method": fingerprint(config.method),
        "corpus": run.corpus,
        "machine": kind_of_machine(),
    }


def with_other_seeds(row: dict[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """`row` with the seeds that only `known` has, if that has the same method and corpus."""
    if known is None or any(row[name] != known[name] for name in ("method", "corpus")):
        return row
    losses = known["val_loss_by_seed"] | row["val_loss_by_seed"]
    if losses == row["val_loss_by_seed"]:
        return row
    machines = sorted({row["machine"], known["machine"]})
    both = {"val_loss_by_seed": dict(sorted(losses.items())), "machine": "; ".join(machines)}
    # The curve stays that of the first seeds, like those of the arms it is compared with.
    return row | known | both


def _against(own: Mapping[int, float], losses: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """The mean loss of an arm, and its differences to the arms of `BASES`."""
    minus = {base: paired_difference(own, losses[base]) for base in BASES if base in losses}
    described = {f"minus_{base}": to_builtins(by) for base, by in minus.items()}
    return {"val_loss": to_builtins(estimate(own)), **described}


def _curve(variant: Variant) -> list[tuple[int, float]]:
    """Mean validation loss of runs, by step."""
    curve = variant.curve(lambda record: record.val_loss)
    return [(step, loss.mean) for step, loss in curve.items()]


# -- files -----------------------------------------------------------------------------------------


def _file(setting: Setting) -> Path:
    return Path(__file__).parent / "results" / f"claims-{setting.name}.json"


def _committed(setting: Setting) -> dict[str, Any]:
    file = _file(setting)
    return json.loads(file.read_text()) if file.is_file() else {"rows": {}}


def _write(setting: Setting, found: dict[str, Any]) -> None:
    _file(setting).write_text(json.dumps(found, indent=2) + "\n")
    document = ROOT / "docs" / f"claims-{setting.name}.md"
    document.write_text(page(setting, found))
    print(f"wrote {_file(setting)} and {document}")


def reproduced(found: Mapping[str, Any], committed: Mapping[str, Any]) -> str | None:
    """Compare losses seed by seed with the committed ones; None if all agree.

    With the same torch and processor they are equal, or the row is stale. On other machines
    rounding sends runs along other paths, which end at most as far apart as two seeds do: there a
    loss agrees if it is within three standard deviations between its arm's seeds, or between those
    of the median arm, whichever is more. Rows of another corpus cannot be compared.
    """
    allowed, differences = _allowed(committed["rows"]), dict[tuple[str, str], float]()
    for arm in found["rows"].keys() & committed["rows"].keys():
        row, known = found["rows"][arm], committed["rows"][arm]
        if row["corpus"] != known["corpus"]:
            return f"not run: {arm} is of corpus {row['corpus'][:16]}, not {known['corpus'][:16]}"
        if row["machine"] == known["machine"]:
            allowed[arm] = 0.0
        for seed, loss in row["val_loss_by_seed"].items():
            if (before := known["val_loss_by_seed"].get(seed)) is not None:
                differences[arm, seed] = abs(loss - before)
    off = {run: by for run, by in differences.items() if by > allowed[run[0]]}
    exact = sum(by == 0 for by in differences.values())
    print(
        f"{len(differences) - len(off)} of {len(differences)} losses reproduce, {exact} to the "
        f"last digit; largest difference {max(differences.values(), default=0):.5f}"
    )
    if differences and not off:
        return None
    named = (f"{arm}, seed {seed} by {by:.5f}" for (arm, seed), by in sorted(off.items()))
    why = "; ".join(named) or "no loss of these arms and seeds is committed"
    return f"stale, or not reproduced: {why}"


def _allowed(rows: Mapping[str, Any]) -> dict[str, float]:
    """How far a loss of each arm may be off on another kind of machine."""
    losses = {arm: [*row["val_loss_by_seed"].values()] for arm, row in rows.items()}
    own = {arm: statistics.stdev(its) if len(its) > 1 else 0.0 for arm, its in losses.items()}
    usual = statistics.median(own.values()) if own else 0.0
    return {arm: 3 * max(spread, usual) for arm, spread in own.items()}


if __name__ == "__main__":
    main(tyro.cli(Command))
