"""A worker of an elastic run, in which workers join and leave at any time."""

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.address import Address, connect
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.transport import Elastic
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.outer import GradientAveraging
from thinwire.security.token import find_token
from thinwire.train.config import TrainConfig
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.ranks import Ranks, load_model, load_optimizer, plain, under_torchrun
from thinwire.train.workers.worker import Worker, WorkerIdentity
from thinwire.transport import Transport

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """How this worker takes part in a run with others.

    Args:
        at: address of the run, with this worker's number where the number of workers is fixed.
        identity: the name by which the others know this worker; default the run folder's name
            and the host's, so that a restart in the same folder is the same worker.
        token_file: holds the run's token; default the environment variable THINWIRE_TOKEN.
        patience: share of a round that a slow worker is waited for; default the transport's.
        min_workers: with fewer workers a round waits for more; default the transport's.
    """

    at: Address
    identity: str | None = None
    token_file: Path | None = None
    patience: float | None = None
    min_workers: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the same workers take part from the beginning to the end."""
        return self.at.worker is not None

    @property
    def run_name(self) -> str:
        """By which its workers are shown as one group."""
        return str(replace(self.at, worker=None, workers=None))

    def identity_in(self, out: Path) -> str:
        """The name by which the others know the worker whose folder is `out`."""
        if self.is_fixed:
            return f"{self.at.run} worker {self.at.worker}".strip()
        return self.identity or f"{out.resolve().name}@{socket.gethostname()}"

    def check(self, config: TrainConfig) -> None:
        """Raise `ConfigurationError` if this process cannot be such a worker of `config`."""
        self.check_launch(config.machine.worker_size)
        if not self.is_fixed:
            if isinstance(config.method.outer, GradientAveraging):
                raise _refused(
                    f"by method {config.method.name!r}",
                    "a newcomer cannot download the inner optimizer's state, which workers share",
                    "pass a method with rounds, as --method diloco, or an address with numbers",
                )
            config.method.check_elastic()

    def check_launch(self, worker_size: int) -> None:
        """Raise `ConfigurationError` if the processes here are not one worker of so many ranks."""
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1
        if ranks != worker_size:
            raise _refused(
                f"with --worker-size {worker_size} in {ranks} process{'es' if ranks > 1 else ''}",
                "all ranks of one torchrun are one worker, which ends with any of them",
                f"start one torchrun --nproc-per-node {worker_size} each, or 1 without torchrun",
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
            # What others have sent since this worker's oldest checkpoint stays.
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


def _refused(how: str, because: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"join {how}", because=because, do=do)


def identity_of(name: str) -> WorkerIdentity:
    """A worker known by its name, whose random numbers a restart is not given by another's."""
    mixed = hashlib.sha256(name.encode()).digest()
    return WorkerIdentity(first_stream=int.from_bytes(mixed[:6], "little"))


class FixedWorker(WorkerGroup):
    """One of a fixed number of workers that meet in an object store, or a rank of it.

    The others may run at other times. So nothing but rounds is exchanged: each worker evaluates
    alone, on all windows, and has a folder with checkpoints of its own.

    Args:
        worker: connected by `transport`.
        transport: of the worker.
        ranks: of the worker, which are the default process group if they are several.
    """

    def __init__(self, worker: Worker, transport: Transport, ranks: Ranks) -> None:
        super().__init__([worker])
        self._worker, self._outer = worker, worker.outer
        self._transport, self._ranks = transport, ranks
        self.checkpoint_ranks = ranks.size
        self.stops_alone = ranks.size == 1

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Waits for the others, and for the store."""
        if isinstance(self._transport, Elastic):
            self._transport.leave_when(asked)

    def all_gather(self, values: Sequence[float]) -> list[float]:
        """Over this worker's ranks alone: workers wait for each other only in rounds."""
        return self._ranks.gather(values)

    def close(self) -> None:
        """Leave the run."""
        self.abandon()
        if self._ranks.size > 1:
            dist.destroy_process_group()
        self._worker.close()

    def abandon(self) -> None:
        """Leave the run, but not the process group: that waits for ranks that may be gone."""
        self._outer.close()
        self._transport.close()


class ElasticWorker(FixedWorker):
    """One worker of a run in which workers join and leave, or a rank of it."""

    def __init__(self, worker: Worker, transport: Elastic, ranks: Ranks) -> None:
        super().__init__(worker, transport, ranks)
        self.events = self._log = transport.events
        self._follow()

    @property
    def can_checkpoint(self) -> bool:
        """At the boundaries of rounds."""
        return self._outer.inner_step % self._worker.config.method.sync_every == 0

    @property
    def tokens(self) -> int:
        """Tokens that this worker read itself."""
        config = self._worker.config
        rows = config.global_batch // config.workers
        return self.steps_taken * rows * config.data.sequence_length

    def record_fields(self) -> dict[str, int]:
        """How many workers there are now."""
        return {"workers": self._outer.workers}

    def join_run(self) -> int:
        """Join, downloading the model if behind, and take the step at which the others are."""
        self._outer.join()
        self._follow()
        return self.step

    def outer_step(self) -> None:
        """Exchange what is due, and put the schedule where the outer loop then is."""
        try:
            super().outer_step()
        finally:
            self._follow()  # also after a failed round: its steps were taken, and are saved

    def flush(self) -> None:
        """Exchange what is left, as often as it takes for the round to count."""
        self.each(lambda worker: worker.outer.flush())
        self._follow()

    finish_last_round = flush

    def capture(self, worker: Worker) -> dict[str, Any]:
        """What all workers share, and what only this one has."""
        own = {
            "model": plain(worker.model.state_dict()),
            "optimizer": plain(worker.optimizer.state_dict()),
            "random": worker.stream.state_dict(),
            # As before sending what is in flight: a worker that resumes has lost that round, but
            # its local weights still hold the work, and the next round sends it.
            "feedback": [dict(held) for held in self._outer.unsent_feedback()],
            "steps_taken": self.steps_taken,
        }
        return {"shared": self._outer.shared_state(), "own": own}

    def resume(self, worker: Worker, state: dict[str, Any], *, workers: int) -> None:
        """Go back to the checkpoint; joining the run then catches up with the others."""
        del workers
        if "shared" not in state:
            raise CheckpointError(
                "join with this checkpoint",
                because="it is of a run with a fixed number of workers",
                do="pass another --out",
            )
        own = state["own"]
        self._outer.load_shared_state(state["shared"])
        load_model(worker.model, own["model"])
        load_optimizer(worker.optimizer, own["optimizer"])
        worker.stream.load_state_dict(own["random"])
        if not self._outer.load_feedback(own["feedback"]):
            # Under reduce-scatter the feedback is cut into K shards, and K was another one.
            _LOG.warning("going on without error feedback: it is of another number of workers")
        self.steps_taken = int(own["steps_taken"])
        self._follow()

    def file_failed(self, error: CheckpointError) -> None:
        """Note it as an event: the run goes on without this worker's files."""
        self._log.note("unsaved", round=self._outer.stats.rounds, why=str(error))

    def _follow(self) -> None:
        if self._worker.scheduler.last_epoch != self._outer.inner_step:
            self._worker.reschedule(self._outer.inner_step)
