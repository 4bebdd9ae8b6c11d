"""The published claims, tested: `make claims`, or

python benchmarks/claims.py small OUT              two cores, under half an hour a seed
python benchmarks/claims.py gpu OUT --minutes 9    one large GPU; repeat it until it is done

Runs that are in OUT are kept and unfinished ones go on. First every family's rates are searched
with the same budget, unless benchmarks/results/ has them; then all arms run with seed 0, then 1,
then 2. At the end losses are compared with those in benchmarks/results/. If there are none, or with
--write, those of all seeds are written there, and docs/claims-SETTING.md. After a change of some
arms, --write --arms "ARM" "ARM" runs these alone and keeps the rows of all others.
"""

import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from claim_arms import arms
from claim_clock import clock
from claim_list import claims
from claim_page import page
from claim_settings import FAMILIES, SEEDS, SETTINGS, Setting, search, tuned, tuning_file
from setting import setting as machine
from thinwire.errors import ConfigurationError, IncompleteError
from thinwire.experiments import Comparison, Experiment, compare
from thinwire.experiments.parallel import ParallelRunner
from thinwire.experiments.runners import Runner, one_by_one
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import estimate, paired_difference
from thinwire.runs.variants import Variant

ROOT = Path(__file__).parent.parent
BASES = {"diloco", "ddp", "ddp-muon"}
"""Arms that all others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Test the published claims."""

    setting: Annotated[Literal["small", "gpu"], tyro.conf.Positional]
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


def main(command: Command) -> None:
    if command.write and command.seeds != SEEDS:
        raise ConfigurationError(
            f"write the results of seeds {command.seeds}",
            because=f"the committed table is of seeds {SEEDS}",
            do="leave out --write or --seeds",
        )
    if BASES & {*command.arms}:
        raise ConfigurationError(
            f"run {', '.join(sorted(BASES & {*command.arms}))} apart from the other arms",
            because="all rows are compared with it",
            do="leave out --arms, which runs all of them",
        )
    if command.minutes is not None:
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, 60 * command.minutes)
    try:
        _test(SETTINGS[command.setting], command)
    except KeyboardInterrupt:
        sys.exit("stopped before the end; repeat the command, which goes on from here")


def _test(setting: Setting, command: Command) -> None:
    _search_missing(setting, command.out / "tuning")
    setting = tuned(setting)
    for count in range(1, len(command.seeds) + 1):
        # A seed at a time, so that what is there early is a whole table.
        seeds = command.seeds[:count]
        comparison, seconds = _run(setting, command.out / "runs", seeds, command.arms)
        print(f"seed {command.seeds[count - 1]}: {seconds / 60:.1f} minutes", flush=True)
    kept = _committed(setting) if command.arms else {"rows": {}}
    found = result(setting, comparison, kept)
    if command.write or (command.seeds == SEEDS and not _file(setting).is_file()):
        _write(setting, found)
    else:
        sys.exit(reproduced(found, _committed(setting)))


def _time_is_up(*_: object) -> None:
    raise KeyboardInterrupt


def _runner(setting: Setting) -> Runner:
    return one_by_one if setting.jobs == 1 else ParallelRunner(setting.jobs)


def _search_missing(setting: Setting, out: Path) -> None:
    """Search the rates of the families that the committed file lacks."""
    file = tuning_file(setting)
    kept = json.loads(file.read_text())["rows"] if file.is_file() else {}
    missing = tuple(family for family in FAMILIES if family not in kept)
    if not missing:
        return
    comparison = compare(search(setting, missing), out, runner=_runner(setting))
    _check(comparison, out)
    found = json.loads((out / "tuning.json").read_text())
    rows = {**kept, **found["rows"]}
    # At once or not at all: time may be up while it is written.
    write_json(file, {**found, "rows": {family: rows[family] for family in FAMILIES}})


def _run(
    setting: Setting, out: Path, seeds: tuple[int, ...], only: tuple[str, ...]
) -> tuple[Comparison, float]:
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
    return comparison, time.perf_counter() - start


def _check(comparison: Comparison, out: Path) -> None:
    problems = comparison.problems()
    if problems:
        folder, status = next(iter(problems.items()))
        raise IncompleteError(
            f"judge the claims from {out}",
            because=f"{len(problems)} runs have no result; {folder}: {status.why}",
            do="fix the cause and repeat the command",
        )


# -- what came of it -------------------------------------------------------------------------------


def result(setting: Setting, comparison: Comparison, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is committed; of arms that did not run now, what `kept` has of them."""
    # All rows have runs: a comparison with problems is refused before.
    variants = {row.spec.method: row.variant for row in comparison.rows if row.variant}
    configs = {
        arm: config for arm, config in arms(setting).items() if _is_there(arm, variants, kept)
    }
    losses = _losses(kept["rows"]) | {text: variant.losses for text, variant in variants.items()}
    losses = {arm: losses[arm] for arm in configs}
    curves = {text: _curve(variant) for text, variant in variants.items()}
    sent = {arm: row["sent_bytes_per_worker"] for arm, row in kept["rows"].items()} | {
        text: variant.runs[0].summary.sent_bytes_per_worker for text, variant in variants.items()
    }
    return {
        "what": f"validation loss in nats per byte, {setting.what}",
        "command": f"python benchmarks/claims.py {setting.name} OUT --write",
        **machine(),
        "rows": {arm: _row(arm, losses, sent) for arm in losses},
        "claims": [
            {
                "group": claim.group,
                "claim": claim.text,
                "source": claim.source,
                "verdict": claim.verdict(losses),
                "effect": None if (effect := claim.effect(losses)) is None else effect.describe(),
                "weights": claim.weights,
            }
            for claim in claims(setting)
        ],
        "clock": clock(setting, configs, curves, kept.get("clock")),
    }


def _is_there(arm: str, variants: Mapping[str, Variant], kept: Mapping[str, Any]) -> bool:
    return arm in variants or arm in kept["rows"]


def _losses(rows: Mapping[str, Any]) -> dict[str, Mapping[int, float]]:
    return {
        arm: {int(seed): loss for seed, loss in row["val_loss_by_seed"].items()}
        for arm, row in rows.items()
    }


def _row(
    arm: str, losses: Mapping[str, Mapping[int, float]], sent: Mapping[str, int]
) -> dict[str, Any]:
    bases = {"diloco": "diloco", "dp_adamw": "ddp", "dp_muon": "ddp-muon"}
    minus = {name: paired_difference(losses[arm], losses[base]) for name, base in bases.items()}
    # Gradients of 16 bits are what data parallelism usually sends; ours sent fp32 and headers.
    reference = sent["ddp"] / 2
    return {
        "val_loss_by_seed": {str(seed): loss for seed, loss in losses[arm].items()},
        "val_loss": estimate(losses[arm]).describe(),
        **{f"minus_{n}": None if by is None else by.describe() for n, by in minus.items()},
        "sent_bytes_per_worker": sent[arm],
        "fewer_bytes_than_16_bit_ddp": reference / sent[arm] if sent[arm] else None,
    }


def _curve(variant: Variant) -> list[tuple[int, float]]:
    """Mean validation loss of runs, by step."""
    curve = variant.curve(lambda record: record.val_loss)
    return list(zip(curve.steps, curve.means, strict=True))


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

    Rounding makes other paths of runs on other machines, which end apart as two seeds do at most.
    A loss agrees if it is no further off than three standard deviations between its arm's seeds,
    or between those of the arm in the middle, whichever is more: three seeds may agree by chance.
    """
    allowed = _allowed(committed["rows"])
    differences = {
        (arm, seed): abs(loss - committed["rows"][arm]["val_loss_by_seed"][seed])
        for arm, row in found["rows"].items()
        for seed, loss in row["val_loss_by_seed"].items()
        if seed in committed["rows"].get(arm, {}).get("val_loss_by_seed", {})
    }
    off = [run for run, by in differences.items() if by > allowed[run[0]]]
    print(
        f"{len(differences) - len(off)} of {len(differences)} losses reproduce within three "
        f"deviations between seeds; largest difference {max(differences.values(), default=0):.4f}"
    )
    if differences and not off:
        return None
    named = (f"{arm}, seed {seed} by {differences[arm, seed]:.4f}" for arm, seed in off)
    return "not reproduced: " + ("; ".join(named) or "no rows")


def _allowed(rows: Mapping[str, Any]) -> dict[str, float]:
    """How far a loss of each arm may be off."""
    own = {arm: _spread(row["val_loss"]) for arm, row in rows.items()}
    usual = statistics.median(own.values()) if own else 0.0
    return {arm: 3 * max(spread, usual) for arm, spread in own.items()}


def _spread(loss: Mapping[str, Any]) -> float:
    """Standard deviation between seeds."""
    error = loss["standard_error"]
    return 0.0 if error is None else error * len(loss["seeds"]) ** 0.5


if __name__ == "__main__":
    main(tyro.cli(Command))
