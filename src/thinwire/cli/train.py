"""`thinwire train` and `thinwire join`."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from thinwire.cli.flags import (
    Flat,
    Option,
    RateFlags,
    RunFlags,
    Switch,
    apply_flags,
    default_out,
    flag,
    given_in,
    place_in,
)
from thinwire.cli.output import noted_signals, say
from thinwire.errors import ConfigurationError
from thinwire.plan.units import nbytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.train.config import TrainConfig
    from thinwire.train.observers import Observer
    from thinwire.train.workers.elastic import ElasticConfig


@dataclass(frozen=True, kw_only=True)
class TeamFlags:
    """Makes this process one worker of a run with others; each has its own --out."""

    elastic: Option[str] = None
    """s3://, gs://, az:// or file:// place in which the workers of a run meet."""
    run_name: Option[str] = None
    """Of the run in that store, the same on all workers and no other run's."""
    worker: Option[int] = None
    """Number, from 0, of this one of --workers that are the same to the end; default: workers join
    and leave at any time."""
    identity: Option[str] = None
    """This worker's name among those that come and go; default that of --out and of this host."""
    token_file: Option[Path] = None
    """Holds the run's token; default THINWIRE_TOKEN."""
    patience: Option[float] = None
    """Share of a round that a slow worker is waited for, where workers come and go."""
    min_workers: Option[int] = None
    """With fewer workers a round waits for more, where workers come and go."""

    def connection(self) -> ElasticConfig | None:
        """How this worker takes part, or None where it does not.

        Raises:
            ConfigurationError: a flag is missing, or means nothing beside the others.
        """
        given = given_in(self)
        if self.elastic is None:
            for name in given:
                raise ConfigurationError(
                    f"use {flag(name)} without --elastic",
                    because="it says how a worker takes part in a run with others",
                    do=f"add --elastic, or leave {flag(name)} out",
                )
            return None
        for name in ("identity", "patience", "min_workers"):
            if name in given and self.worker is not None:
                raise ConfigurationError(
                    f"use {flag(name)} with --worker",
                    because="a fixed number of workers have numbers, and all wait for all",
                    do="leave one of them out",
                )
        store, run = place_in(given.pop("elastic"), given.pop("run_name", None))
        from thinwire.train.workers.elastic import ElasticConfig

        return ElasticConfig(store=store, run=run, **given)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train K workers: simulated in this process, or one per rank under torchrun.

    - with --elastic: one worker of a run in an object store, which workers join and leave at any
      time; with --worker, too: one of a fixed number

    $ thinwire train --method muloco --workers 4
    $ torchrun --nproc-per-node 4 -m thinwire train --method muloco --out runs/b
    $ thinwire train --elastic s3://my-bucket/runs --run-name first --out runs/here
    $ thinwire train --elastic s3://my-bucket/runs --run-name b --worker 0 --workers 2 --out runs/0
    """

    method: str = "diloco"
    """async_diloco, ddp, demo, diloco, muloco, noloco, sparseloco, sparse_muloco, streaming_diloco,
    streaming_muloco or decoupled_momentum; muloco:bits=2 sets its bits."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: Option[Path] = None
    """The run's folder; default runs/METHOD-N."""
    resume: Switch = False
    """Continue the run in --out from its newest checkpoint."""
    rates: Flat[RateFlags] = field(default_factory=RateFlags)
    run: Flat[RunFlags] = field(default_factory=RunFlags)
    tensorboard: Switch = False
    """Write TensorBoard scalars into the run's folder."""
    wandb: Option[str] = None
    """Report to this project of Weights & Biases."""
    trackio: Option[str] = None
    """Report to this project of trackio."""
    team: Flat[TeamFlags] = field(default_factory=TeamFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.train.trainer import resume, train
        from thinwire.train.workers.ranks import is_lead

        connection = self.team.connection()
        if connection is not None:
            # Before the recipe, which counts the workers of torchrun.
            connection.check_launch(self.run.worker_size or 1)
        self._check_launch()
        config = apply_flags(self.run, self.method, self.seed, self.rates)
        # Ranks agree on it: the folder is made only after all of them have met.
        out = self.out or default_out(self.method)
        begin = resume if self.resume else train
        summary = begin(
            config,
            out,
            lambda config, step: self._observers(config, step, out, connection, console),
            elastic=connection,
            stop=noted_signals(signal.SIGTERM),
        )
        if is_lead():
            say(console, _closing_line(summary, out))

    def _check_launch(self) -> None:
        from thinwire.train.workers.ranks import under_torchrun

        if self.resume and self.out is None:
            raise ConfigurationError(
                "resume without --out",
                because="without it every run gets a new folder",
                do="pass --out with the folder of the run",
            )
        counts = under_torchrun() and self.team.elastic is None
        if counts and self.rates.workers is not None:
            raise ConfigurationError(
                "train under torchrun with --workers",
                because="every rank is one worker, or a part of one: torchrun decides how many",
                do="leave --workers out",
            )

    def _observers(
        self,
        config: TrainConfig,
        step: int,
        out: Path,
        connection: ElasticConfig | None,
        console: Console,
    ) -> Sequence[Observer]:
        from thinwire.train.observers import Terminal, tensorboard, tracker

        if self.resume:
            say(console, f"{out}: going on from step {step}")
        is_fixed = connection is None or connection.is_fixed
        team = f"K={config.workers}" if is_fixed else "elastic"
        observers: list[Observer] = [
            Terminal(console, title=f"{self.method} {team}", steps=config.steps)
        ]
        if self.tensorboard:
            observers.append(tensorboard(out / "tensorboard"))
        # The workers of a run are one group, and a worker has one name wherever it is shown.
        about: dict[str, Any] = {
            "name": out.name if connection is None else connection.identity_in(out),
            "group": None if connection is None else connection.run_name,
            "config": config.describe(),
        }
        if self.wandb:
            observers.append(tracker("wandb", self.wandb, **about))
        if self.trackio:
            about["resume"] = "allow" if self.resume else "never"
            observers.append(tracker("trackio", self.trackio, **about))
        return observers


def _closing_line(summary: dict[str, Any], out: Path) -> str:
    one = "this worker of" if "events" in summary else "each of"
    return (
        f"{summary['method']}: validation loss {summary['val_loss']:.4f} after "
        f"{summary['tokens']:,} tokens in {summary['wall_s']:.1f} s; {one} "
        f"{summary['workers']} workers sent {nbytes_text(summary['sent_bytes_per_worker'])}; "
        f"outer_digest {summary['outer_digest'][:12]}; {out}"
    )


@dataclass(frozen=True, kw_only=True)
class JoinCommand:
    """Take part in a run whose workers come and go: thinwire train --elastic, with all its flags.

    $ thinwire join 'hub://TOKEN@HOST:PORT/first' --method muloco --out runs/here
    $ thinwire join s3://my-bucket/runs --run-name first --method muloco --out runs/here
    """

    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
    """URL of the place in which the workers meet."""
    train: Flat[Train] = field(default_factory=Train)

    def main(self, console: Console) -> None:
        """Run the command."""
        if self.train.team.elastic is not None:
            raise ConfigurationError(
                "join with --elastic",
                because="where the run is has been said before",
                do="leave --elastic out",
            )
        team = replace(self.train.team, elastic=self.where)
        replace(self.train, team=team).main(console)
