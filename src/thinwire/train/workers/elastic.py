"""The place of one process among the workers of a run that it joins."""

import hashlib
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.address import Address, connect
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.transport import Elastic
from thinwire.errors import check
from thinwire.security.token import find_token
from thinwire.train.config import TrainConfig
from thinwire.train.workers.ranks import under_torchrun
from thinwire.train.workers.worker import WorkerIdentity
from thinwire.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """Address and settings with which this process joins a run.

    Args:
        at: address of the run, with this worker's number where the number of workers is fixed.
        identity: name of this worker in the run; default the names of the run folder and the host,
            so that a restart in the same folder is the same worker.
        token_file: has the run's token; default the environment variable THINWIRE_TOKEN.
        patience: part of a round that the others wait for a slow worker; default the transport's.
        min_workers: a round waits for this many workers; default the transport's.
    """

    at: Address
    identity: str | None = None
    token_file: Path | None = None
    patience: float | None = None
    min_workers: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the number of workers is fixed."""
        return self.at.worker is not None

    @property
    def run_name(self) -> str:
        """Name under which its workers are shown as one group."""
        return str(replace(self.at, worker=None, workers=None))

    def identity_in(self, out: Path) -> str:
        """Name in the run of the worker whose folder is `out`."""
        if self.is_fixed:
            return f"{self.at.run} worker {self.at.worker}".strip()
        return self.identity or f"{out.resolve().name}@{socket.gethostname()}"

    def check(self, config: TrainConfig) -> None:
        """Raise `ConfigurationError` if this process cannot be such a worker of `config`."""
        self.check_launch(config.machine.worker_size)
        if not self.is_fixed:
            config.method.check_elastic()

    def check_launch(self, worker_size: int) -> None:
        """Raise `ConfigurationError` if the processes here are not one worker of so many ranks."""
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1
        check(
            ranks == worker_size,
            f"join with --worker-size {worker_size} in {ranks} process{'es' if ranks > 1 else ''}",
            because="all ranks of one torchrun are one worker, which ends with any of them",
            do=f"start one torchrun --nproc-per-node {worker_size} each, or 1 without torchrun",
        )

    def connect(self, config: TrainConfig, out: Path, group: Any = None) -> Transport:
        """The connection to the other workers, sealed if there is a token.

        Args:
            config: of the run.
            out: the run's folder.
            group: of the ranks of this worker; None is a worker of one.
        """
        token = None if self.token_file is None else find_token(self.token_file)
        if not self.at.run:
            return connect(str(self.at), token=token, timeout_s=config.machine.timeout_s)
        given = {"patience": self.patience, "min_workers": self.min_workers}
        chosen: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
        more: dict[str, Any] = {} if group is None else {"group": group}
        if self.is_fixed:
            chosen["timeout_s"] = config.machine.timeout_s
            # Messages of the others since this worker's oldest checkpoint stay.
            periods, every = config.periods, config.method.sync_every
            rounds = -(-periods.checkpoint_steps // every) * periods.keep_checkpoints
            more |= {"workers": config.workers, "worker": self.at.worker, "keep": 2 + rounds}
        else:
            more["identity"] = self.identity_in(out)
        return Elastic(
            self.at.place,
            run=self.at.run,
            token=token,
            options=ElasticOptions(**chosen),
            **more,
        )

    def place(self, transport: Transport) -> WorkerIdentity:
        """Which worker of the run is connected by `transport`.

        In an elastic run its random numbers follow from its name: a restart is the same worker.
        """
        if (k := self.at.worker) is not None:
            return WorkerIdentity(block=k, first_stream=k)
        assert isinstance(transport, Elastic)
        mixed = hashlib.sha256(transport.identity.encode()).digest()
        return WorkerIdentity(first_stream=int.from_bytes(mixed[:6], "little"))
