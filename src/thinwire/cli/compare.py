"""`thinwire compare`."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, final

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from thinwire import presets
from thinwire.cli.flags import RunFlags, apply_flags, default_out, folder_name, without_rounds
from thinwire.errors import ConfigurationError
from thinwire.outer import Direct
from thinwire.train.config import TrainConfig
from thinwire.train.launch import under_torchrun
from thinwire.train.observers import Terminal, bytes_text
from thinwire.train.run_folder import RunFolder, write_json
from thinwire.train.trainer import resume

__all__ = ["Compare"]


@final
@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train the same model on the same data, tokens and seeds under several methods.

    --sync-every, --outer-lr and --outer-momentum act on the methods that have rounds, not on ddp.
    """

    methods: str = "ddp,diloco,muloco"
    """Comma-separated; NAME or NAME:FIELD=NUMBER, such as muloco:bits=2."""
    seeds: str = "0"
    """Comma-separated."""
    out: Path | None = None
    """Folder of the run folders; finished runs in it are kept, unfinished ones continued."""
    run: Annotated[RunFlags, tyro.conf.arg(name="")] = field(default_factory=RunFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        self._check_launch()
        methods, seeds = self._methods(), self._seeds()
        configs = {(m, s): self._config(m, s) for m in methods for s in seeds}
        out = self.out or default_out("compare")
        runs = {method: list[dict[str, Any]]() for method in methods}
        for (method, seed), config in configs.items():
            title = f"{method} seed {seed}"
            folder = out / f"{folder_name(method)}-seed{seed}"
            summary = resume(
                config,
                folder,
                lambda c, _step, title=title: [Terminal(console, title=title, steps=c.steps)],
            )
            runs[method].append(summary | {"memory_bytes": _memory(folder)})
        write_json(out / "compare.json", runs)
        console.print(comparison_table(runs))

    def _config(self, method: str, seed: int) -> TrainConfig:
        rounds = not isinstance(presets.from_text(method).outer, Direct)
        return apply_flags(self.run if rounds else without_rounds(self.run), method, seed)

    def _check_launch(self) -> None:
        if under_torchrun():
            raise ConfigurationError(
                "compare under torchrun",
                because="compare simulates the workers in one process",
                do="run it without torchrun, or thinwire train for each method",
            )

    def _methods(self) -> list[str]:
        methods = [method.strip() for method in self.methods.split(",")]
        for method in methods:
            presets.from_text(method)
        return methods

    def _seeds(self) -> list[int]:
        try:
            return [int(seed) for seed in self.seeds.split(",")]
        except ValueError as error:
            raise ConfigurationError(
                f"compare with --seeds {self.seeds!r}",
                because=str(error),
                do="pass whole numbers with commas between them, such as 0,1,2",
            ) from error


_STATES = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")


def _memory(folder: Path) -> dict[str, int]:
    """Bytes of each state that a worker of the run in `folder` held."""
    record = RunFolder(folder).last_evaluation()
    return {state: record[f"{state}_bytes"] for state in _STATES}


def comparison_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """One row per method: means over its runs.

    Args:
        runs: each method's summaries, with the bytes of every state as `memory_bytes`.
    """
    # No borders: seven columns and a method's text have to fit into 80 columns.
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title="validation loss of the outer parameters in nats per token; bytes per worker",
        caption="memory: weights, inner state, anchor, outer state and feedback, over the weights",
    )
    table.add_column("method", no_wrap=True)
    for column in ("loss", "sent", "received", "peak/step", "memory", "wall s"):
        table.add_column(column, justify="right")
    for method, same in runs.items():
        table.add_row(method, *_row(same))
    return table


def _row(runs: Sequence[dict[str, Any]]) -> list[str]:
    def mean(key: str) -> float:
        return statistics.fmean(run[key] for run in runs)

    losses = [run["val_loss"] for run in runs]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(runs) > 1 else ""
    return [
        f"{mean('val_loss'):.4f}{spread}",
        bytes_text(mean("sent_bytes_per_worker")),
        bytes_text(mean("received_bytes_per_worker")),
        bytes_text(mean("peak_sent_bytes_per_step")),
        f"{statistics.fmean(_memory_ratio(run) for run in runs):.2f} x",
        f"{mean('wall_s'):.1f}",
    ]


def _memory_ratio(run: dict[str, Any]) -> float:
    held: dict[str, int] = run["memory_bytes"]
    return sum(held.values()) / held["live_weights"]
