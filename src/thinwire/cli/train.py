"""`thinwire train`, `thinwire join` and `thinwire serve`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.address import AT_VARIABLE, Address, of_environment
from thinwire.cli.flags import (
    At,
    Option,
    Rare,
    StoreFlags,
    Switch,
    TrainFlags,
    default_out,
    flag,
    given_in,
    read_address,
    write_settings,
)
from thinwire.cli.output import closing_line, noted_signals, say
from thinwire.errors import ConfigurationError, MismatchError, ThinwireError, check
from thinwire.security.token import optional_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.train.config import TrainConfig
    from thinwire.train.launch import ElasticConfig
    from thinwire.train.observers import Observer


@dataclass(frozen=True, kw_only=True)
class Train(TrainFlags):
    """Train K workers: simulated in this process, or one per rank under torchrun.

    $ thinwire train --method muloco --workers 4
    $ torchrun --nproc-per-node 4 -m thinwire train --method muloco --out runs/b
    $ thinwire train --config runs/b/run.toml --out runs/again
    """

    resume: Switch = False
    """Continue from the newest checkpoint in --out."""
    tensorboard: Switch = False
    """Write TensorBoard scalars into the run's folder."""
    wandb: Option[str] = None
    """Report to this project of Weights & Biases."""
    trackio: Option[str] = None
    """Report to this project of trackio."""

    def main(self, console: Console) -> None:
        """Run the command."""
        check(
            not of_environment(),
            "train all workers in this process, or among the ranks of torchrun",
            because=f"{AT_VARIABLE} has the address of a run",
            do=f"thinwire join, to train as one of its workers, or unset {AT_VARIABLE}",
        )
        config = self.train_config()
        check(
            self.workers in (None, config.workers),
            f"train {self.workers} workers under torchrun",
            because=f"its ranks are {config.workers}",
            do="leave --workers out, or start as many ranks",
        )
        self.train(console, config, None)

    def train(
        self, console: Console, config: TrainConfig, connection: ElasticConfig | None
    ) -> None:
        """Train the workers of this process, or the one that `connection` connects."""
        from thinwire.train.trainer import resume, train
        from thinwire.train.workers.ranks import is_lead

        # Ranks agree on the name, because nobody makes the folder before all of them have met.
        out = self.out or default_out(self.method, resume=self.resume)
        begin = resume if self.resume else train
        observers = partial(self._observers, out, connection, console)
        stop = noted_signals(signal.SIGTERM, signal.SIGINT)
        summary = begin(config, out, observers, elastic=connection, stop=stop)
        if is_lead():
            say(console, closing_line(summary, out))

    def _observers(
        self,
        out: Path,
        connection: ElasticConfig | None,
        console: Console,
        config: TrainConfig,
        step: int,
    ) -> Sequence[Observer]:
        from thinwire.train.observers import OnRecord, Terminal, tensorboard, tracker

        if self.resume:
            found = f"continues from step {step}" if step else "has no checkpoint: begins at step 0"
            say(console, f"{out}: {found}")
        is_fixed = connection is None or connection.is_fixed
        team = f"K={config.workers}" if is_fixed else "elastic"

        @cache
        def write_once() -> None:
            # Written late: a run that cannot start leaves nothing. A full disk ends no training.
            with suppress(OSError):
                write_settings(out, self.settings(config))

        observers: list[Observer] = [
            OnRecord(lambda _: write_once()),
            Terminal(console, title=f"{self.method} {team}", steps=config.steps),
        ]
        if self.tensorboard:
            observers.append(tensorboard(out / "tensorboard"))
        # The workers of a run form one group, and a worker has the same name everywhere.
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


# Flags without a meaning for a worker of thinwire serve.
_OF_ROUNDS: Final = frozenset(
    ("identity", "patience", "min_workers", "resume", "tensorboard", "wandb", "trackio")
)


@dataclass(frozen=True, kw_only=True)
class JoinCommand(Train, StoreFlags):
    """Train as one worker of a run; without numbers in the address workers join and leave any time.

    $ thinwire join 'hub://TOKEN@HOST:PORT/first' --method muloco --out runs/here
    $ thinwire join 'tcp://node0:29400?workers=2&worker=0' --out runs/0
    """

    at: At = None
    """s3://BUCKET/RUN, hub://..., file://...; with ?workers=K&worker=0, also tcp://; default
    THINWIRE_AT."""
    asynchronous: Switch = False
    """Train for thinwire serve, without rounds."""
    identity: Option[str] = None
    """Name of this worker; default that of --out and of this host."""
    patience: Rare[float] = None
    """Share of a round that a slow worker is waited for."""
    min_workers: Rare[int] = None
    """With fewer workers a round waits for more."""

    def main(self, console: Console) -> None:
        """Run the command."""
        address = Address.read(self.at)
        if address.run:
            address = read_address(self.at)
        joining = replace(
            self, workers=self.workers or address.workers, threads=self.threads or _openmp_threads()
        )
        check(
            address.workers in (None, joining.workers),
            f"join with --workers {joining.workers} at {address}",
            because=f"the address has {address.workers} workers",
            do="leave --workers out",
        )
        try:
            if self.asynchronous:
                joining._work(address, console)
            else:
                joining._join(address, console)
        except MismatchError:
            if address.run:
                self._check_engine(address)
            raise

    def _join(self, address: Address, console: Console) -> None:
        given = given_in(self)
        own = {n: given[n] for n in ("identity", "patience", "min_workers") if n in given}
        check(
            address.worker is None or not own,
            f"use {', '.join(map(flag, own))} at {address}",
            because="a fixed number of workers have numbers, and all wait for all",
            do="leave it out, or the numbers of the address",
        )
        from thinwire.train.launch import ElasticConfig

        connection = ElasticConfig(at=address, token_file=self.token_file, **own)
        self.train(console, self.train_config(is_member=True), connection)

    def _work(self, address: Address, console: Console) -> None:
        from thinwire.asynchronous.objects import AsyncStoreWorker
        from thinwire.train import asynchronous

        number = address.worker
        if number is None or not address.run:
            raise ConfigurationError(
                f"join {address} with --asynchronous",
                because="the workers of thinwire serve have numbers, and a store",
                do="pass s3://BUCKET/RUN?workers=K&worker=0, or the like",
            )
        unused = [flag(name) for name in given_in(self) if name in _OF_ROUNDS]
        check(
            not unused,
            f"use {', '.join(unused)} with --asynchronous",
            because="the server keeps the records, and a worker goes on from what is in --out",
            do="leave it out",
        )
        config, token = self.arrivals_config(), optional_token(self.token_file)
        connect = partial(
            AsyncStoreWorker,
            store=address.place,
            run=address.run,
            token=token,
            patience_s=config.machine.timeout_s,
        )
        asynchronous.work(config, number, self.out, connect, partial(say, console))
        say(console, f"worker {number}: the run is finished")

    def _check_engine(self, address: Address) -> None:
        """Raise `ConfigurationError` if the workers of the run at `address` are of another kind."""
        from thinwire.asynchronous.objects import read_status

        token = optional_token(self.token_file)
        try:
            found = read_status(address.place, run=address.run, token=token)
        except ThinwireError:  # must not hide the first error
            return
        check(
            self.asynchronous == bool(found),
            f"join {address} {'with' if self.asynchronous else 'without'} --asynchronous",
            because="it is a run of thinwire serve" if found else "no thinwire serve has begun it",
            do="pass it, and ?workers=K&worker=0, for a run of thinwire serve, and for no other",
        )


def _openmp_threads() -> int | None:
    """OMP_NUM_THREADS, which torchrun also sets, to 1 for its ranks."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and "RANK" not in os.environ else None


@dataclass(frozen=True, kw_only=True)
class ServeCommand(TrainFlags, StoreFlags):
    """Hold the parameters of an asynchronous run, whose workers do not wait for each other.

    - workers join with thinwire join --asynchronous and the same flags
    - the method's outer SGD becomes delayed Nesterov with the same rates
    - with the same --out, a server continues from its checkpoint

    $ thinwire serve s3://my-bucket/first --workers 4 --out runs/server
    """

    equal_steps: Switch = False
    """Give slow workers as many inner steps as the fastest."""
    grace_s: float = 0.0
    """Seconds to wait for other arrivals after the first."""
    lost_after_s: float = 300.0
    """Seconds of silence after which a worker counts as lost."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.asynchronous import AsyncOptions
        from thinwire.asynchronous.objects import AsyncStoreServer
        from thinwire.train import asynchronous

        address = read_address(self.at)
        check(
            address.workers is None,
            f"serve {address}",
            because="its numbers are those of a worker",
            do=f"leave them out, and pass --workers {address.workers}",
        )
        config = self.arrivals_config()
        out = self.out or default_out(f"async-{self.method}")
        if not (out / "config.json").exists():
            write_settings(out, self.settings(config))
        options = AsyncOptions(
            dynamic_steps=not self.equal_steps, grace_s=self.grace_s, lost_after_s=self.lost_after_s
        )
        token, log = optional_token(self.token_file), partial(say, console)
        connect = partial(
            AsyncStoreServer, store=address.place, run=address.run, token=token, log=log
        )
        summary = asynchronous.serve(config, out, options, connect)
        say(console, closing_line(summary, out))
