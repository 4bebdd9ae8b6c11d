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
    address_in,
    apply_flags,
    check_run_name,
    default_out,
    flag,
    given_in,
    is_store,
)
from thinwire.cli.output import noted_signals, say
from thinwire.errors import ConfigurationError
from thinwire.plan.units import nbytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.train.config import TrainConfig
    from thinwire.train.observers import Observer
    from thinwire.train.workers.bucket import BucketConfig
    from thinwire.train.workers.elastic import ElasticConfig


@dataclass(frozen=True, kw_only=True)
class TeamFlags:
    """Makes this process one worker of a run with others; each has its own --out."""

    elastic: Option[str] = None
    """Ticket, HOST:PORT or store URL of a run that workers join and leave at any time."""
    identity: Option[str] = None
    """This worker's name in an elastic run; default that of --out and of this host."""
    token_file: Option[Path] = None
    """Holds the run's token, which a lighthouse needs; default THINWIRE_TOKEN."""
    patience: Option[float] = None
    """Share of a round that a slow worker of an elastic run is waited for."""
    min_workers: Option[int] = None
    """With fewer workers a round of an elastic run waits for more."""
    bucket: Option[str] = None
    """s3://, gs://, az:// or file:// place that a fixed number of --workers share."""
    worker: Option[int] = None
    """This worker's number in the run in --bucket, from 0."""
    run_name: Option[str] = None
    """Of the run in a store, the same on all workers and no other run's."""

    def connection(self) -> ElasticConfig | BucketConfig | None:
        """How this worker takes part, or None where it does not.

        Raises:
            ConfigurationError: a flag is missing, or means nothing beside the others.
        """
        given = given_in(self)
        elastic, bucket = given.pop("elastic", None), given.pop("bucket", None)
        if elastic is not None and bucket is not None:
            raise ConfigurationError(
                "train with both --elastic and --bucket",
                because="a worker has one connection to the others",
                do="leave one of them out",
            )
        needs = {"worker": "--bucket", "run_name": "--bucket or --elastic"}
        takes = given.keys() - {"worker"} if elastic else needs.keys() if bucket else set()
        for name in given:
            needed = needs.get(name, "--elastic")
            if name not in takes:
                raise ConfigurationError(
                    f"use {flag(name)} without {needed}",
                    because="it says how a worker takes part in a run with others",
                    do=f"add {needed}, or leave {flag(name)} out",
                )
        if bucket is not None:
            missing = [flag(name) for name in needs if name not in given]
            if missing:
                raise ConfigurationError(
                    f"use --bucket without {missing[0]}",
                    because="messages of a run are told apart by its name and the worker's number",
                    do="pass --worker 0 (1, 2, ...) and --run-name NAME",
                )
            from thinwire.train.workers.bucket import BucketConfig

            return BucketConfig(url=bucket, worker=given["worker"], run=given["run_name"])
        if elastic is None:
            return None
        run_name = given.pop("run_name", None)
        check_run_name(elastic, run_name)
        from thinwire.train.workers.elastic import ElasticBucketConfig, LighthouseConfig

        if is_store(elastic):
            return ElasticBucketConfig(url=elastic, run=run_name, **given)
        return LighthouseConfig(lighthouse=address_in(elastic), **given)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train K workers: simulated in this process, or one per rank under torchrun.

    - with --elastic: one worker of a run in which workers join and leave at any time
    - with --bucket: one of a fixed number of workers that share an object store

    $ thinwire train --method muloco --workers 4
    $ torchrun --nproc-per-node 4 -m thinwire train --method muloco --out runs/b
    $ thinwire train --elastic s3://my-bucket/runs --run-name first --out runs/here
    """

    method: str = "diloco"
    """ddp, demo, diloco, muloco, noloco, sparseloco, sparse_muloco, streaming_diloco,
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
        from thinwire.train.workers.bucket import BucketConfig
        from thinwire.train.workers.ranks import is_lead

        connection = self.team.connection()
        elastic = bucket = None
        if isinstance(connection, BucketConfig):
            bucket = connection
        elif connection is not None:
            elastic = connection
            elastic.check_launch(self.run.worker_size or 1)
        self._check_launch()
        config = apply_flags(self.run, self.method, self.seed, self.rates)
        # Ranks agree on it: the folder is made only after all of them have met.
        out = self.out or default_out(self.method)
        begin = resume if self.resume else train
        summary = begin(
            config,
            out,
            lambda config, step: self._observers(config, step, out, connection, console),
            elastic=elastic,
            bucket=bucket,
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
                because="every rank is one worker, or a part of one with --worker-size: torchrun "
                "decides how many there are",
                do="leave --workers out",
            )

    def _observers(
        self,
        config: TrainConfig,
        step: int,
        out: Path,
        connection: ElasticConfig | BucketConfig | None,
        console: Console,
    ) -> Sequence[Observer]:
        from thinwire.train.observers import Terminal, tensorboard, trackio, wandb

        if self.resume:
            say(console, f"{out}: going on from step {step}")
        team = f"K={config.workers}" if self.team.elastic is None else "elastic"
        observers: list[Observer] = [
            Terminal(console, title=f"{self.method} {team}", steps=config.steps)
        ]
        if self.tensorboard:
            observers.append(tensorboard(out / "tensorboard"))
        described = config.describe()
        # The workers of a run are one group, and a worker has one name wherever it is shown.
        name = out.name if connection is None else connection.identity_in(out)
        group = None if connection is None else connection.run_name
        if self.wandb:
            observers.append(wandb(self.wandb, name=name, group=group, config=described))
        if self.trackio:
            observers.append(
                trackio(self.trackio, name=name, group=group, config=described, resumes=self.resume)
            )
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

    $ thinwire join 'thinwire://...' --method muloco --out runs/here
    $ thinwire join s3://my-bucket/runs --run-name first --method muloco --out runs/here
    """

    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET|URL")]
    """The lighthouse's ticket, in quotes, or its HOST:PORT; or a store's URL, with --run-name."""
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
