"""A worker of an elastic run, in which workers join and leave at any time."""

import hashlib
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.elastic.bucket.transport import ElasticBucket
from thinwire.elastic.transport import Elastic, ElasticOptions
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.outer import GradientAveraging
from thinwire.security.token import find_token
from thinwire.train.config import TrainConfig
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.ranks import Ranks, load_model, load_optimizer, plain
from thinwire.train.workers.worker import Worker, WorkerIdentity, named_run

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig(ABC):
    """How this worker takes part in an elastic run.

    Args:
        identity: the name by which the others know this worker; default the run folder's name
            and the host's, so that a restart in the same folder is the same worker.
        token_file: holds the run's token; default the environment variable THINWIRE_TOKEN.
        patience: share of a round that a slow worker is waited for; default the transport's.
        min_workers: with fewer workers a round waits for more; default the transport's.
    """

    identity: str | None = None
    token_file: Path | None = None
    patience: float | None = None
    min_workers: int | None = None

    def check(self, config: TrainConfig) -> None:
        """Raise `ConfigurationError` if workers of `config` cannot join and leave; says why."""
        self.check_launch(config.machine.worker_size)
        if isinstance(config.method.outer, GradientAveraging):
            raise _refused(
                f"by method {config.method.name!r}",
                "its workers share the inner optimizer's state, which a newcomer cannot download",
                "pass a method with rounds, such as --method diloco",
            )
        config.method.check_elastic()

    @abstractmethod
    def check_launch(self, worker_size: int) -> None:
        """Raise `ConfigurationError` if the processes here are not one worker.

        Args:
            worker_size: ranks of a worker.
        """

    @property
    @abstractmethod
    def run_name(self) -> str:
        """What the run is called where its workers are shown as one group."""

    @abstractmethod
    def connect(self, out: Path, group: Any = None) -> Elastic | ElasticBucket:
        """The connection to the other workers.

        Args:
            out: the run's folder.
            group: of the ranks of this worker; None is a worker of one.
        """

    def identity_in(self, out: Path) -> str:
        """The name by which the others know the worker whose folder is `out`."""
        return self.identity or default_identity(out)

    def _options(self) -> ElasticOptions:
        given = {"patience": self.patience, "min_workers": self.min_workers}
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(ElasticOptions(), **chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseConfig(ElasticConfig):
    """How this worker takes part in a run that has a lighthouse.

    Args:
        lighthouse: HOST:PORT, where `thinwire lighthouse` listens.
    """

    lighthouse: str

    def check_launch(self, worker_size: int) -> None:
        """Raise if the ranks here are not those of one worker."""
        ranks = _ranks_here()
        if ranks != worker_size:
            raise _refused(
                f"and --worker-size {worker_size} in {ranks} process{'es' if ranks > 1 else ''}",
                "all ranks of one torchrun are one worker, which ends with any of them",
                f"start one torchrun --nproc-per-node {worker_size} for each worker"
                if worker_size > 1
                else "start one thinwire train --elastic for each worker, without torchrun, or "
                f"pass --worker-size {ranks} to shard a worker over these ranks",
            )

    @property
    def run_name(self) -> str:
        """HOST:PORT, for a lighthouse has one run."""
        return self.lighthouse

    def connect(self, out: Path, group: Any = None) -> Elastic:
        """The connection by way of the lighthouse."""
        token = find_token(self.token_file)
        try:
            return Elastic(
                self.lighthouse,
                token=token,
                identity=self.identity_in(out),
                options=self._options(),
                group=group,
            )
        except OSError as error:
            raise ConfigurationError(
                f"reach the lighthouse at {self.lighthouse}",
                because=str(error),
                do="correct the address, or try again when the name can be looked up",
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticBucketConfig(ElasticConfig):
    """How this worker takes part in a run whose workers share an object store and nothing else.

    Args:
        url: of the store, as `tw.transport.ElasticBucket` takes it.
        run: name of the run there, the same on all workers.
    """

    url: str
    run: str

    def check_launch(self, worker_size: int) -> None:
        """Raise if this worker would be several ranks."""
        ranks = max(_ranks_here(), worker_size)
        if ranks > 1:
            raise _refused(
                f"{self.url} and {ranks} ranks for one worker",
                "a worker of a run over an object store is one process",
                "leave out torchrun and --worker-size, or start a thinwire lighthouse and pass "
                "its HOST:PORT to --elastic",
            )

    @property
    def run_name(self) -> str:
        """Its place and its name there."""
        return named_run(self.url, self.run)

    def connect(self, out: Path, group: Any = None) -> ElasticBucket:
        """The connection by way of the store, sealed if there is a token."""
        assert group is None
        return ElasticBucket(
            self.url,
            run=self.run,
            token=None if self.token_file is None else find_token(self.token_file),
            identity=self.identity_in(out),
            options=self._options(),
        )


def _ranks_here() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def default_identity(out: Path) -> str:
    """The name of folder `out`, and of this host."""
    return f"{out.resolve().name}@{socket.gethostname()}"


def _refused(how: str, because: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"train with --elastic {how}", because=because, do=do)


def identity_of(name: str) -> WorkerIdentity:
    """A worker known by its name, whose random numbers a restart is not given by another's."""
    mixed = hashlib.sha256(name.encode()).digest()
    return WorkerIdentity(first_stream=int.from_bytes(mixed[:6], "little"))


class ElasticWorker(WorkerGroup):
    """One worker of an elastic run, or a rank of it; the others are other processes.

    Args:
        worker: connected by `transport`.
        transport: an elastic one.
        ranks: of the worker, which are the default process group if they are several.
    """

    def __init__(self, worker: Worker, transport: Elastic | ElasticBucket, ranks: Ranks) -> None:
        super().__init__([worker])
        self._worker, self._outer = worker, worker.outer
        self._transport, self._ranks = transport, ranks
        self.events = transport.events
        # Every elastic worker has a folder of its own.
        self.checkpoint_ranks = ranks.size
        self.stops_alone = ranks.size == 1
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

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Waits for the others, and for what they meet at."""
        self._transport.leave_when(asked)

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

    def all_gather(self, values: Sequence[float]) -> list[float]:
        """Over this worker's ranks alone: elastic workers wait for each other only in rounds."""
        return self._ranks.gather(values)

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
                "go on with --elastic from this checkpoint",
                because="it is of a run with a fixed number of workers",
                do="leave --elastic out, or pass another --out",
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
        self._transport.events.note("unsaved", round=self._outer.stats.rounds, why=str(error))

    def close(self) -> None:
        """Leave the run."""
        self.abandon()
        if self._ranks.size > 1:
            dist.destroy_process_group()
        self._worker.close()

    def abandon(self) -> None:
        """Leave the run, but not the process group: that waits for ranks that may be gone."""
        self._worker.outer.close()
        self._transport.close()

    def _follow(self) -> None:
        if self._worker.scheduler.last_epoch != self._outer.inner_step:
            self._worker.reschedule(self._outer.inner_step)
