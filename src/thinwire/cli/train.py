"""`thinwire train` and `thinwire join`."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from thinwire.address import Address
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
    optional_token,
    read_address,
)
from thinwire.cli.output import noted_signals, say
from thinwire.errors import ConfigurationError, check
from thinwire.plan.units import nbytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.train.config import TrainConfig
    from thinwire.train.observers import Observer
    from thinwire.train.workers.elastic import ElasticConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train K workers: simulated in this process, or one per rank under torchrun.

    $ thinwire train --method muloco --workers 4
    $ torchrun --nproc-per-node 4 -m thinwire train --method muloco --out runs/b
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

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.train.workers.ranks import under_torchrun

        if under_torchrun() and self.rates.workers is not None:
            raise ConfigurationError(
                "train under torchrun with --workers",
                because="every rank is one worker, or a part of one: torchrun decides how many",
                do="leave --workers out",
            )
        self.train(console, None)

    def train(self, console: Console, connection: ElasticConfig | None) -> None:
        """Train the workers of this process, or the one that `connection` connects."""
        from thinwire.train.trainer import resume, train
        from thinwire.train.workers.ranks import is_lead

        if self.resume and self.out is None:
            raise ConfigurationError(
                "resume without --out",
                because="without it every run gets a new folder",
                do="pass --out with the folder of the run",
            )
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
class JoinCommand(Train):
    """Take part in a run as one worker, with a folder of its own; workers join and leave any time.

    - at an address with ?workers=K&worker=0 the number of workers is fixed, and all wait for all

    $ thinwire join 'hub://TOKEN@HOST:PORT/first' --method muloco --out runs/here
    $ thinwire join s3://my-bucket/first --method muloco --out runs/here
    $ thinwire join 's3://my-bucket/second?workers=2&worker=0' --out runs/0
    $ thinwire join 'tcp://node0:29400?workers=2&worker=0' --out runs/0
    """

    at: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS")]
    """Of the run: where its workers meet, and its name there."""
    asynchronous: Switch = False
    """Train as a worker of thinwire serve, without rounds."""
    identity: Option[str] = None
    """This worker's name where workers join and leave; default that of --out and of this host."""
    token_file: Option[Path] = None
    """Holds the run's token; default THINWIRE_TOKEN."""
    patience: Option[float] = None
    """Share of a round that a slow worker is waited for, where workers join and leave."""
    min_workers: Option[int] = None
    """With fewer workers a round waits for more, where workers join and leave."""

    def main(self, console: Console) -> None:
        """Run the command."""
        address = Address.read(self.at)
        if address.run:
            address = read_address(self.at)
        names = ("identity", "token_file", "patience", "min_workers")
        given = {name: value for name, value in given_in(self).items() if name in names}
        elastic_only = [name for name in given if name != "token_file"]
        check(
            address.worker is None or not elastic_only,
            f"use {', '.join(map(flag, elastic_only))} at {address}",
            because="a fixed number of workers have numbers, and all wait for all",
            do="leave it out, or the numbers of the address",
        )
        workers = self.rates.workers
        check(
            None in (address.workers, workers) or workers == address.workers,
            f"join with --workers {workers} at {address}",
            because=f"the address says that they are {address.workers}",
            do="leave --workers out",
        )
        joining = replace(self, rates=replace(self.rates, workers=workers or address.workers))
        if self.asynchronous:
            joining._work(address, console)
            return
        from thinwire.train.workers.elastic import ElasticConfig

        connection = ElasticConfig(at=address, **given)
        # Before the recipe, which counts the workers of torchrun.
        connection.check_launch(self.run.worker_size or 1)
        joining.train(console, connection)

    def _work(self, address: Address, console: Console) -> None:
        from thinwire.cli.asynchronous import config_of_arrivals
        from thinwire.train import asynchronous

        number = address.worker
        if number is None or not address.run:
            raise ConfigurationError(
                f"join {address} with --asynchronous",
                because="the workers of thinwire serve have numbers, and a store",
                do="pass s3://BUCKET/RUN?workers=K&worker=0, or the like",
            )
        asynchronous.work(
            config_of_arrivals(self.run, self.method, self.seed, self.rates),
            number,
            address.place,
            run=address.run,
            token=optional_token(self.token_file),
            out=self.out,
            log=lambda line: say(console, line),
        )
        say(console, f"worker {number}: the run is finished")
