"""`thinwire train`."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from thinwire.cli.bucket import BucketFlags
from thinwire.cli.elastic import ElasticFlags
from thinwire.cli.flags import (
    RateFlags,
    RunFlags,
    apply_flags,
    default_out,
    recipe_values,
    typed_value,
)
from thinwire.cli.output import say
from thinwire.cli.signals import noted_signals
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
class Train:
    """Train K workers: simulated in this process, or one per rank under torchrun.

    With --elastic, train one worker of a run in which workers join and leave at any time, by way
    of a lighthouse or of an object store. With --bucket, train one of a fixed number of workers
    that share an object store.

    thinwire train --method muloco --workers 4
    torchrun --nproc-per-node 4 -m thinwire train --method muloco --out runs/b
    thinwire train --recipe paper --method sparseloco --help
    thinwire train --elastic s3://my-bucket/runs --run-name first --out runs/here
    """

    method: str = "diloco"
    """ddp, demo, diloco, muloco, noloco, streaming_diloco, streaming_muloco, sparseloco,
    sparse_muloco or decoupled_momentum; muloco:bits=2 sets its bits."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: Path | None = None
    """The run's folder."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Continue the run in --out from its newest checkpoint."""
    tensorboard: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write TensorBoard scalars into the run's folder."""
    wandb: str | None = None
    """Report to this project of Weights & Biases."""
    trackio: str | None = None
    """Report to this project of trackio."""
    run_name: str | None = None
    """Of the run in the store of --elastic or --bucket, the same on all workers and no other
    run's."""
    run: Annotated[RunFlags, tyro.conf.arg(name="")] = field(default_factory=RunFlags)
    rates: Annotated[RateFlags, tyro.conf.arg(name="")] = field(default_factory=RateFlags)
    elastic: Annotated[ElasticFlags, tyro.conf.arg(name="")] = field(default_factory=ElasticFlags)
    bucket: Annotated[BucketFlags, tyro.conf.arg(name="")] = field(default_factory=BucketFlags)

    @classmethod
    def in_force(cls, arguments: Sequence[str]) -> tuple[dict[str, str], str]:
        """What holds without a flag, by its name, and where these values are from.

        Args:
            arguments: those typed beside --help.
        """
        recipe = typed_value(arguments, "recipe", RunFlags.recipe)
        method = typed_value(arguments, "method", cls.method)
        where_from = (
            f"Defaults are those of --recipe {recipe} with --method {method}; "
            "put another one before --help to see its own."
        )
        return recipe_values(recipe, method) | {"out": default_out(method).as_posix()}, where_from

    def main(self, console: Console) -> None:
        """Run the command."""
        elastic, bucket = self._connections()
        if elastic is not None:
            elastic.check_launch(self.run.worker_size or 1)
        self._check_launch()
        config = apply_flags(self.run, self.method, self.seed, self.rates)
        from thinwire.train.trainer import resume, train
        from thinwire.train.workers.ranks import is_lead

        # Ranks agree on it: the folder is made only after all of them have met.
        out = self.out or default_out(self.method)
        begin = resume if self.resume else train
        summary = begin(
            config,
            out,
            lambda c, step: self._observers(c, step, out, elastic or bucket, console),
            elastic=elastic,
            bucket=bucket,
            stop=noted_signals(signal.SIGTERM),
        )
        if is_lead():
            say(console, _closing_line(summary, out))

    def _connections(self) -> tuple[ElasticConfig | None, BucketConfig | None]:
        where, store = self.elastic.elastic, self.bucket.bucket
        if where is not None and store is not None:
            raise ConfigurationError(
                "train with both --elastic and --bucket",
                because="a worker has one connection to the others",
                do="leave one of them out",
            )
        if self.run_name is not None and where is None and store is None:
            raise ConfigurationError(
                "use --run-name without --bucket or --elastic",
                because="it names a run in an object store",
                do="add --elastic URL, or --bucket URL with --worker, or leave --run-name out",
            )
        return self.elastic.config(self.run_name), self.bucket.config(self.run_name)

    def _check_launch(self) -> None:
        from thinwire.train.workers.ranks import under_torchrun

        if self.resume and self.out is None:
            raise ConfigurationError(
                "resume without --out",
                because="without it every run gets a new folder",
                do="pass --out with the folder of the run",
            )
        counts = under_torchrun() and self.elastic.elastic is None
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
        member: ElasticConfig | BucketConfig | None,
        console: Console,
    ) -> Sequence[Observer]:
        from thinwire.train.observers import Terminal, tensorboard, trackio, wandb

        if self.resume:
            say(console, f"{out}: going on from step {step}")
        is_elastic = self.elastic.elastic is not None
        team = "elastic" if is_elastic else f"K={config.workers}"
        title = f"{self.method} {team}"
        observers: list[Observer] = [Terminal(console, title=title, steps=config.steps)]
        if self.tensorboard:
            observers.append(tensorboard(out / "tensorboard"))
        described = config.describe()
        # The workers of a run are one group, and a worker has one name wherever it is shown.
        name = out.name if member is None else member.identity_in(out)
        group = None if member is None else member.run_name
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
