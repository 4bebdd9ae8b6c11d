"""A worker of an elastic run: it comes and goes, and so do the others."""

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, final

from torch import Tensor

from thinwire.elastic.events import EventLog
from thinwire.elastic.token import find_token
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.outer import GradientAveraging
from thinwire.outer_loop import OuterLoop
from thinwire.train.config import TrainConfig
from thinwire.train.crew import Crew, in_own_stream
from thinwire.train.data import LoadedData
from thinwire.train.shares import ShareBatches
from thinwire.train.standing import Batches, Standing
from thinwire.train.worker import Worker
from thinwire.transport import Elastic, ElasticOptions, Transport

_LOG = logging.getLogger(__name__)

__all__ = ["ElasticCrew", "Membership", "Roaming"]

T = TypeVar("T")


class ElasticTransport(Protocol):
    """An elastic transport, as far as only such a one has it."""

    @property
    def events(self) -> EventLog:
        """What happened to the membership."""
        ...

    @property
    def identity(self) -> str:
        """The name under which this worker takes part."""
        ...

    def close(self) -> None:
        """Leave the run."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """How this worker takes part in an elastic run.

    Args:
        lighthouse: HOST:PORT, where `thinwire lighthouse` listens.
        identity: by which the others know this worker again; default the run folder's name and
            the host's, so that a restart in the same folder is the same worker.
        token_file: holds the run's token; default the environment variable THINWIRE_TOKEN.
        patience: share of a round that a slow worker is waited for; default the transport's.
        min_workers: with fewer nobody goes on; default the transport's.
    """

    lighthouse: str
    identity: str | None = None
    token_file: Path | None = None
    patience: float | None = None
    min_workers: int | None = None

    def check(self, config: TrainConfig) -> None:
        """Raise `ConfigurationError` if workers of `config` cannot come and go; says why."""
        self.check_launch(config.machine.worker_size)
        if isinstance(config.method.outer, GradientAveraging):
            raise _refused(
                f"by method {config.method.name!r}",
                "its outer state is the inner optimizer, which no newcomer has and no round heals",
                "pass a method with rounds, such as --method diloco",
            )

    def check_launch(self, worker_size: int) -> None:
        """Raise `ConfigurationError` if this process is not a worker by itself.

        Args:
            worker_size: ranks of a worker.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise _refused(
                "under torchrun",
                "torchrun ends all ranks when one of them dies",
                "start one thinwire train --elastic for each worker, without torchrun",
            )
        if worker_size > 1:
            raise _refused(
                f"with --worker-size {worker_size}",
                "an elastic worker is one process",
                "leave --worker-size out",
            )

    def connect(self, out: Path) -> Transport:
        """The connection to whoever is there.

        Args:
            out: the run's folder.
        """
        given = {"patience": self.patience, "min_workers": self.min_workers}
        chosen = {name: value for name, value in given.items() if value is not None}
        return Elastic(
            self.lighthouse,
            token=find_token(self.token_file),
            identity=self.identity or default_identity(out),
            terms=replace(ElasticOptions(), **chosen),
        )


def default_identity(out: Path) -> str:
    """The name of folder `out`, and of this host."""
    return f"{out.resolve().name}@{socket.gethostname()}"


def _refused(how: str, because: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"train with --elastic {how}", because=because, do=do)


@final
class Roaming(Standing):
    """A worker known by its identity, which reads the shares that it is dealt."""

    def __init__(self, identity: str) -> None:
        super().__init__(number=0, evaluators=1)
        mixed = hashlib.sha256(identity.encode()).digest()
        self._stream = int.from_bytes(mixed[:6], "little")

    def stream(self, rank: int) -> int:
        """The identity's own."""
        del rank
        return self._stream

    def batches(self, config: TrainConfig, data: LoadedData, outer: OuterLoop) -> Batches:
        """Those of the share that is held."""
        every = config.method.sync_every
        shares = data.shares(
            rows=config.global_batch // config.workers, sync_every=every, seed=config.seed
        )
        # The share first: asking for it may take this worker to where the others are.
        return ShareBatches(shares, lambda: (outer.share, outer.inner_step % every))


@final
class ElasticCrew(Crew):
    """One worker; the others are wherever they are.

    Args:
        worker: over `transport`.
        transport: an elastic one.
    """

    def __init__(self, worker: Worker, transport: Transport) -> None:
        super().__init__([worker])
        self._worker, self._outer = worker, worker.outer
        self._transport = cast(ElasticTransport, transport)
        self._follow()

    @property
    def events(self) -> EventLog:
        """The transport's."""
        return self._transport.events

    @property
    def rests(self) -> bool:
        """At the boundaries of rounds."""
        return self._outer.inner_step % self._worker.config.method.sync_every == 0

    @property
    def tokens(self) -> int:
        """Those that this worker read itself."""
        config = self._worker.config
        rows = config.global_batch // config.workers
        return self.steps_taken * rows * config.data.sequence_length

    def present(self) -> dict[str, int]:
        """How many workers there are."""
        return {"workers": self._outer.workers}

    def arrive(self) -> int:
        """Ask for the share, and thereby take part: a newcomer is healed first."""
        _ = self._outer.share
        self._follow()
        return self.step

    def outer_step(self) -> None:
        """Exchange what is due, and go on from where the schedule then is."""
        try:
            super().outer_step()
        finally:
            self._follow()  # a round that failed was trained: a checkpoint of it says so

    def flush(self) -> None:
        """Exchange what is left."""
        self.each(lambda worker: worker.outer.flush())  # it is repeated until it counts
        self._follow()

    def settle(self) -> None:
        """Repeat the last round until it counts."""
        self.flush()

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """In this thread, with the worker's random stream."""
        return [in_own_stream(work)(self._worker)]

    def everywhere(self, values: Sequence[float]) -> list[float]:
        """This worker's alone: nobody waits for others outside of rounds."""
        return list(values)

    def capture(self, worker: Worker) -> dict[str, Any]:
        """What all share, and what only this worker has."""
        own = {
            "model": worker.model.state_dict(),
            "optimizer": worker.optimizer.state_dict(),
            "random": worker.stream.state_dict(),
            # Live weights hold what is in flight, which counts on nobody for whoever resumes.
            "feedback": [dict(held) for held in self._outer.unsent_feedback()],
            "steps_taken": self.steps_taken,
        }
        return {"shared": self._outer.shared_state(), "own": own}

    def resume(self, worker: Worker, state: dict[str, Any], *, workers: int) -> None:
        """Stand where the checkpoint was; whoever is ahead heals this worker later."""
        del workers
        if "shared" not in state:
            raise CheckpointError(
                "go on with --elastic from this checkpoint",
                because="it is of a run whose workers do not come and go",
                do="leave --elastic out, or pass another --out",
            )
        own = state["own"]
        self._outer.load_shared_state(state["shared"])
        worker.model.load_state_dict(own["model"])
        worker.optimizer.load_state_dict(own["optimizer"])
        worker.stream.load_state_dict(own["random"])
        self._load_feedback(own["feedback"])
        self.steps_taken = int(own["steps_taken"])
        self._follow()

    def _load_feedback(self, memories: Sequence[Mapping[str, Tensor]]) -> None:
        if not memories:
            return
        state = self._worker.outer.state_dict()
        fragments = [
            {**fragment, "exchange": memory}
            for fragment, memory in zip(state["fragments"], memories, strict=True)
        ]
        try:
            self._worker.outer.load_state_dict({**state, "fragments": fragments})
        except CheckpointError as error:
            # Shards of a reduction are cut by K, which was another one.
            _LOG.warning("going on without error feedback: %s", error)

    def close(self) -> None:
        """Leave the run."""
        self._worker.outer.close()
        self._transport.close()

    def abandon(self) -> None:
        """Leave the run."""
        self.close()

    def _follow(self) -> None:
        if self._worker.scheduler.last_epoch != self._outer.inner_step:
            self._worker.reschedule(self._outer.inner_step)
