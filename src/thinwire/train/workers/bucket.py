"""A worker of a run whose workers share an object store and nothing else."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigurationError
from thinwire.security.token import TOKEN_VARIABLE, find_token
from thinwire.train.config import TrainConfig
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.ranks import under_torchrun
from thinwire.train.workers.worker import Worker, named_run
from thinwire.transport import Bucket, Transport

_LOOK_S, _GRACE_S = 0.2, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig:
    """Which worker of which run this is, and where its messages lie.

    Args:
        url: of the store, as `tw.transport.Bucket` takes it.
        worker: its number, from 0.
        run: its name, the same on all workers.
    """

    url: str
    worker: int
    run: str

    @property
    def run_name(self) -> str:
        """Its place and its name there."""
        return named_run(self.url, self.run)

    def identity_in(self, out: Path) -> str:
        """The run's name and the worker's number: folders of two workers may have one name."""
        del out
        return f"{self.run} worker {self.worker}"

    def check(self, config: TrainConfig) -> None:
        """Raise `ConfigurationError` if this process cannot be that worker of `config`."""
        if under_torchrun() or config.machine.worker_size > 1:
            raise ConfigurationError(
                "train with --bucket under torchrun",
                because="a worker that exchanges over an object store is one process here",
                do="start one thinwire train --bucket for each worker, without torchrun and "
                "--worker-size; a script of your own may have a Bucket for each rank",
            )

    def connect(self, config: TrainConfig) -> Bucket:
        """The connection to the other workers; sealed where THINWIRE_TOKEN is set.

        What others have sent since this worker's oldest checkpoint stays.
        """
        periods, every = config.periods, config.method.sync_every
        rounds = -(-periods.checkpoint_steps // every) * periods.keep_checkpoints
        return Bucket(
            self.url,
            rank=self.worker,
            workers=config.workers,
            run=self.run,
            token=find_token() if os.environ.get(TOKEN_VARIABLE) else None,
            keep=2 + rounds,
            timeout_s=config.machine.timeout_s,
        )


class BucketWorker(WorkerGroup):
    """One worker here; the others may run at other times.

    So nothing but rounds is exchanged: each worker evaluates alone, on all windows, and has
    checkpoints of its own.

    Args:
        worker: connected by `transport`.
        transport: over an object store.
    """

    def __init__(self, worker: Worker, transport: Transport) -> None:
        super().__init__([worker])
        self.checkpoint_ranks = 1  # each worker writes its own
        self._transport = transport
        self._ended = threading.Event()

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Waits for the others that last longer than a few seconds after it was asked."""

        def watch() -> None:
            while not self._ended.wait(_LOOK_S):
                # Between two steps it ends by itself, with a checkpoint.
                if asked() and not self._ended.wait(_GRACE_S):
                    self._transport.close()
                    return

        threading.Thread(target=watch, name="thinwire-leave", daemon=True).start()

    def abandon(self) -> None:
        """Let go of the store; what was written stays for the others."""
        self._ended.set()
        self._transport.close()
