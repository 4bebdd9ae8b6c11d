"""The complete description of a training run."""

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from thinwire.errors import ConfigurationError, check, check_range, check_whole
from thinwire.method import Method, describe
from thinwire.train.data import Data
from thinwire.train.models import Model

_MOST: Final = 2**53  # what JSON and floats hold exactly
_MOST_THREADS: Final = 2**15
_SOON_S: Final = 1e-3
_YEAR_S: Final = 366 * 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """Linear from 0 to 1 over the warm-up, then half a cosine down to `final_fraction`.

    Args:
        warmup_steps: inner steps of warm-up; two to four rounds suit DiLoCo.
        final_fraction: fraction of the learning rate that is left at the end.

    Source: the schedules of DiLoCo (arXiv 2311.08105) and MuLoCo (arXiv 2505.23725).

    >>> [round(WarmupCosine(warmup_steps=2).factor(t, steps=4), 2) for t in range(4)]
    [0.5, 1.0, 0.55, 0.1]
    """

    warmup_steps: int = 20
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps, least=0, most=_MOST)
        check_range("final_fraction", self.final_fraction, most=1)

    def factor(self, step: int, *, steps: int) -> float:
        """The factor on the learning rate of inner step `step` (from 0) out of `steps`."""
        t = step + 1
        if t <= self.warmup_steps:
            return t / self.warmup_steps
        progress = min(1.0, (t - self.warmup_steps) / max(1, steps - self.warmup_steps))
        cosine = 1 + math.cos(math.pi * progress)
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * cosine


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Intervals of a run, in inner steps; 0 means only at the end, and for checkpoints never.

    Args:
        log_steps: between two records of `metrics.jsonl`.
        evaluate_steps: between two evaluations of the outer parameters.
        checkpoint_steps: between two checkpoints.
        keep_checkpoints: number of checkpoints on disk.
    """

    log_steps: int = 10
    evaluate_steps: int = 0
    checkpoint_steps: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("log_steps", "evaluate_steps", "checkpoint_steps"):
            check_whole(name, getattr(self, name), least=0, most=_MOST)
        check_whole("keep_checkpoints", self.keep_checkpoints, most=_MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Devices, precision and processes of a run.

    Args:
        device: "auto" takes a GPU if the machine has one.
        precision: "bf16" runs forward and backward under autocast; weights stay fp32.
        compile: torch.compile the model.
        threads: CPU threads per rank; 0 shares the cores evenly between the ranks of this host.
            It changes the order of sums: a run resumed with another number differs in low bits.
        timeout_s: seconds after which a silent worker, or an asynchronous server, is an error;
            where workers come and go, the default waits as long as measured rounds say.
        outer_device: where the outer state is between rounds: None is the device, "cpu" the host's
            memory.
        worker_size: S, ranks per worker, over which FSDP2 shards the model (torchrun only). It
            changes the order of sums and the draws of dropout, and nothing else.
    """

    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    threads: int = 0
    timeout_s: float = 600.0
    outer_device: Literal["cpu"] | None = None
    worker_size: int = 1

    def __post_init__(self) -> None:
        check(
            self.precision in ("fp32", "bf16"),
            f"train in precision {self.precision!r}",
            because="it is neither fp32 nor bf16",
            do="pass one of them",
        )
        check_whole("threads", self.threads, least=0, most=_MOST_THREADS)
        check_whole("worker_size", self.worker_size, most=_MOST)
        check_range("timeout_s", self.timeout_s, least=_SOON_S, most=_YEAR_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A run: everything that decides what it computes.

    Args:
        method: how the workers train.
        model: the model to train.
        data: the data to train on.
        workers: K.
        steps: inner steps of every worker.
        global_batch: sequences per inner step over all workers, so that methods and K are compared
            at equal tokens.
        accumulate: micro-batches into which a rank cuts its part of a batch.
        schedule: factor on the inner learning rate over the run.
        clip_norm: largest norm of a gradient; 0 clips nothing.
        seed: seed of initial weights, data order and dropout.
        periods: intervals of logs, evaluations and checkpoints.
        machine: devices, precision and processes.

    Raises:
        ConfigurationError: the numbers do not fit each other; the error names them.
    """

    method: Method
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    workers: int = 4
    steps: int = 400
    global_batch: int = 16
    accumulate: int = 1
    schedule: WarmupCosine = field(default_factory=WarmupCosine)
    clip_norm: float = 1.0
    seed: int = 0
    periods: Intervals = field(default_factory=Intervals)
    machine: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "global_batch", "accumulate"):
            check_whole(name, getattr(self, name), most=_MOST)
        check_whole("seed", self.seed, least=0, most=_MOST)
        check_range("clip_norm", self.clip_norm)
        size = self.machine.worker_size
        parts = self.workers * size * self.accumulate
        if self.global_batch % parts:
            workers = f"{self.workers} workers" + (f" of {size} ranks" if size > 1 else "")
            what = f"split a global batch of {self.global_batch} sequences"
            because = f"{workers} of {self.accumulate} micro-batches need a multiple of {parts}"
            do = "change --global-batch, --workers, --worker-size or --accumulate"
            raise ConfigurationError(what, because=because, do=do)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all workers together read in one inner step."""
        return self.global_batch * self.data.sequence_length

    def describe(self) -> dict[str, Any]:
        """The configuration as JSON-able data.

        Raises:
            ConfigurationError: the model's file cannot be read.
        """
        described = describe(self)
        # As the flag spells it, and as older run folders do, so that those can be resumed.
        described["machine"]["compile"] = "yes" if self.machine.compile else "no"
        described["model"] = self.model.describe()
        return described
