"""`thinwire serve`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import (
    Flat,
    Option,
    RateFlags,
    RunFlags,
    Switch,
    apply_flags,
    default_out,
    optional_token,
    read_address,
)
from thinwire.cli.output import say

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Hold the parameters of an asynchronous run, whose workers do not wait for each other.

    - thinwire join --asynchronous has the same flags of the run, on each worker
    - the method's outer SGD becomes delayed Nesterov of the same rates
    - started again with the same --out, a server goes on from its checkpoint

    $ thinwire serve s3://my-bucket/first --workers 4 --out runs/server
    """

    at: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS")]
    """s3://BUCKET/RUN, hub://TOKEN@HOST:PORT/RUN, file:///FOLDER/RUN, ..."""
    method: str = "diloco"
    """As of thinwire train: one whose outer optimizer is SGD or Nesterov's."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: Option[Path] = None
    """The run's folder; default runs/async-METHOD-N."""
    equal_steps: Switch = False
    """Give slow workers as many inner steps as the fastest."""
    grace_s: float = 0.0
    """Seconds after an arrival in which others are waited for."""
    lost_after_s: float = 300.0
    """Seconds of silence after which a worker's steps are given to others."""
    token_file: Option[Path] = None
    """Holds the run's token, which seals what is written; default THINWIRE_TOKEN, or none."""
    rates: Flat[RateFlags] = field(default_factory=RateFlags)
    run: Flat[RunFlags] = field(default_factory=RunFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.asynchronous import AsyncOptions
        from thinwire.train import asynchronous

        address = read_address(self.at)
        config = config_of_arrivals(self.run, self.method, self.seed, self.rates)
        out = self.out or default_out(f"async-{self.method}")
        summary = asynchronous.serve(
            config,
            out,
            address.place,
            run=address.run,
            token=optional_token(self.token_file),
            options=AsyncOptions(
                dynamic_steps=not self.equal_steps,
                grace_s=self.grace_s,
                lost_after_s=self.lost_after_s,
            ),
            log=lambda line: say(console, line),
        )
        say(
            console,
            f"{summary['method']}: validation loss {summary['val_loss']:.4f} after "
            f"{summary['tokens']:,} tokens in {summary['asynchronous']['arrivals']} arrivals; "
            f"outer_digest {summary['outer_digest'][:12]}; {out}",
        )


def config_of_arrivals(run: RunFlags, method: str, seed: int, rates: RateFlags) -> TrainConfig:
    """What the flags describe, with a method for arrivals."""
    from thinwire.train import asynchronous
    from thinwire.train.launch import resolve

    config = resolve(apply_flags(run, method, seed, rates))
    arrivals = asynchronous.without_rounds(config.method, config.workers)
    return dataclasses.replace(config, method=arrivals)
