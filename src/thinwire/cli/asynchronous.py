"""`thinwire serve` and `thinwire work`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import Flat, Option, RateFlags, RunFlags, Switch, apply_flags, default_out
from thinwire.cli.output import say
from thinwire.security.token import find_token

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Hold the parameters of an asynchronous run, whose workers do not wait for each other.

    - thinwire work has the same flags of the run, on each worker
    - the method's outer SGD becomes delayed Nesterov of the same rates
    - started again with the same --out, a server goes on from its checkpoint

    $ thinwire serve --bind 10.9.0.1:29600 --workers 4 --out runs/server
    """

    bind: str = "0.0.0.0:29600"
    """HOST:PORT to listen on; port 0 takes any that is free."""
    method: str = "diloco"
    """As of thinwire train: one whose outer optimizer is SGD or Nesterov's."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: Option[Path] = None
    """Folder of checkpoint, model and summary; default runs/async-METHOD-N."""
    equal_steps: Switch = False
    """Give slow workers as many inner steps as the fastest."""
    grace_s: float = 0.0
    """Seconds after an arrival in which others are waited for."""
    lost_after_s: float = 300.0
    """Seconds of silence after which a worker's steps are given to others."""
    token_file: Option[Path] = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    rates: Flat[RateFlags] = field(default_factory=RateFlags)
    run: Flat[RunFlags] = field(default_factory=RunFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.transport.address import split_address

        token, (host, port) = find_token(self.token_file), split_address(self.bind)
        from thinwire.asynchronous import AsyncOptions
        from thinwire.train import asynchronous

        config = _config(self.run, self.method, self.seed, self.rates)
        out = self.out or default_out(f"async-{self.method}")
        summary = asynchronous.serve(
            config,
            out,
            token,
            host=host,
            port=port,
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
            f"{summary['tokens']:,} tokens in {summary['arrivals']} arrivals; "
            f"outer_digest {summary['outer_digest'][:12]}; {out}",
        )


@dataclass(frozen=True, kw_only=True)
class WorkCommand:
    """Train as one worker of an asynchronous run; with the flags of the run that the server has.

    $ thinwire work 10.9.0.1:29600 --worker 0 --workers 4
    """

    server: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST:PORT")]
    """Of thinwire serve."""
    worker: int
    """This worker's number, from 0; the same after a restart."""
    method: str = "diloco"
    """As the server has it."""
    seed: int = 0
    """As the server has it."""
    give_up_s: float = 300.0
    """Seconds without an answer of the server after which the worker ends."""
    token_file: Option[Path] = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    rates: Flat[RateFlags] = field(default_factory=RateFlags)
    run: Flat[RunFlags] = field(default_factory=RunFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.train import asynchronous

        asynchronous.work(
            _config(self.run, self.method, self.seed, self.rates),
            self.worker,
            find_token(self.token_file),
            self.server,
            give_up_s=self.give_up_s,
            log=lambda line: say(console, line),
        )
        say(console, f"worker {self.worker}: the run is finished")


def _config(run: RunFlags, method: str, seed: int, rates: RateFlags) -> TrainConfig:
    config = apply_flags(run, method, seed, rates)
    from thinwire.train import asynchronous
    from thinwire.train.launch import resolve

    config = resolve(config)
    arrivals = asynchronous.without_rounds(config.method, config.workers)
    return dataclasses.replace(config, method=arrivals)
