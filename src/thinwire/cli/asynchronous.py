"""`thinwire serve` and `thinwire work`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import RateFlags, RunFlags, apply_flags, default_out
from thinwire.cli.output import say
from thinwire.cli.train import Train
from thinwire.security.token import find_token
from thinwire.transport.address import split_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Hold the parameters of an asynchronous run, whose workers do not wait for each other.

    Start thinwire work with the same flags of the run on each worker. The method's outer SGD
    becomes delayed Nesterov of the same rates. A server that is started again with the same --out
    goes on from its checkpoint.

    thinwire serve --bind 10.9.0.1:29600 --workers 4 --out runs/server
    """

    bind: str = "0.0.0.0:29600"
    """HOST:PORT to listen on; port 0 takes any that is free."""
    method: str = "diloco"
    """As of thinwire train: one whose outer optimizer is SGD or Nesterov's."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: Path | None = None
    """Folder of checkpoint, model and summary."""
    equal_steps: tyro.conf.FlagCreatePairsOff[bool] = False  # a switch on the command line
    """Give slow workers as many inner steps as the fastest."""
    grace_s: float = 0.0
    """Seconds after an arrival in which others are waited for."""
    lost_after_s: float = 300.0
    """Seconds of silence after which a worker's steps are given to others."""
    token_file: Path | None = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    run: Annotated[RunFlags, tyro.conf.arg(name="")] = field(default_factory=RunFlags)
    rates: Annotated[RateFlags, tyro.conf.arg(name="")] = field(default_factory=RateFlags)

    @classmethod
    def in_force(cls, arguments: Sequence[str]) -> tuple[dict[str, str], str]:
        """As of thinwire train."""
        values, where_from = Train.in_force(arguments)
        return values | {"out": default_out(f"async-{cls.method}").as_posix()}, where_from

    def main(self, console: Console) -> None:
        """Run the command."""
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
            tell=lambda line: say(console, line),
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

    thinwire work 10.9.0.1:29600 --worker 0 --workers 4
    """

    server: tyro.conf.Positional[str]
    """HOST:PORT of thinwire serve."""
    worker: int
    """This worker's number, from 0; the same after a restart."""
    method: str = "diloco"
    """As the server has it."""
    seed: int = 0
    """As the server has it."""
    give_up_s: float = 300.0
    """Seconds without an answer of the server after which the worker ends."""
    token_file: Path | None = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    run: Annotated[RunFlags, tyro.conf.arg(name="")] = field(default_factory=RunFlags)
    rates: Annotated[RateFlags, tyro.conf.arg(name="")] = field(default_factory=RateFlags)

    @classmethod
    def in_force(cls, arguments: Sequence[str]) -> tuple[dict[str, str], str]:
        """As of thinwire train."""
        return Train.in_force(arguments)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.train import asynchronous

        asynchronous.work(
            _config(self.run, self.method, self.seed, self.rates),
            self.worker,
            find_token(self.token_file),
            self.server,
            give_up_s=self.give_up_s,
            tell=lambda line: say(console, line),
        )
        say(console, f"worker {self.worker}: the run is finished")


def _config(run: RunFlags, method: str, seed: int, rates: RateFlags) -> TrainConfig:
    config = apply_flags(run, method, seed, rates)
    from thinwire.train import asynchronous
    from thinwire.train.launch import resolve

    config = resolve(config)
    arrivals = asynchronous.without_rounds(config.method, config.workers)
    return dataclasses.replace(config, method=arrivals)
