"""torchtitan 0.3 as one of several workers, each a torchrun of its own with FSDP2 inside.

Needs: pip install -e . torchtitan==0.3.0

With this folder on PYTHONPATH, on the first node and on the second (there WORKER=1):

THINWIRE_AT="tcp://node0:29400?workers=2&worker=0" torchrun --nproc-per-node 8 \
    -m torchtitan.train --module torchtitan_trainer --config debug --dump_folder outputs/worker0

`debug` trains torchtitan's debug model on bytes. For a model of yours write a function like it, and
give `as_worker` its Trainer.Config. torchtitan needs a GPU.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import thinwire as tw


class PartOfData(BaseDataLoader):
    """A data loader of which every worker reads a part: torchtitan knows its own ranks only."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`whole` is what `worker` of `workers` reads a part of."""

        whole: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        worker: int = 0
        workers: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **given: Any) -> None:
        self._loader = config.whole.build(
            dp_world_size=config.workers * dp_world_size,
            dp_rank=config.worker * dp_world_size + dp_rank,
            **given,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where it was."""
        self._loader.load_state_dict(state_dict)


class OuterTrainer(Trainer):
    """torchtitan's world is the worker's; the workers meet apart from it, rank by rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """`sync_every` is H, inner steps in a round (`--sync_every`)."""

        sync_every: int = 30

    def __init__(self, config: Config) -> None:
        transport = tw.connect()
        data = PartOfData.Config(
            whole=config.dataloader, worker=transport.rank, workers=transport.world_size
        )
        super().__init__(dataclasses.replace(config, dataloader=data))
        parts = self.model_parts
        # From the initial weights: checkpoints are loaded when training begins.
        self.outer = tw.OuterLoop(
            parts[0] if len(parts) == 1 else nn.ModuleList(parts),
            list(self.optimizers.optimizers),
            tw.presets.diloco(sync_every=config.sync_every),
            transport=transport,
        )
        # Its tensors differ from rank to rank, and DCP keeps one value for a key.
        self.checkpointer.states[f"thinwire.{torch.distributed.get_rank()}"] = self.outer
        if config.validator.enable:
            self._validate_outer_parameters()

    def _validate_outer_parameters(self) -> None:
        validate = self.validator.validate

        def validate_outer(model_parts: list[nn.Module], step: int) -> None:
            with self.outer.evaluating():
                validate(model_parts, step)

        self.validator.validate = validate_outer

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Exchange what is due after the inner step, and what is left after the last one."""
        super().train_step(data_iterator)
        self.outer.step()
        if self.step == self.config.training.steps:
            # Before the last checkpoint, whose model then is the outer parameters.
            self.outer.flush()
            ExitStack().enter_context(self.outer.evaluating())  # to the end

    def train(self) -> None:
        """Train, and say what was exchanged."""
        super().train()
        worker, rank = self.outer.transport.rank, torch.distributed.get_rank()
        logger.info(f"worker {worker}.{rank}: {self.outer.stats} {self.outer.digest()}")


def as_worker(config: Trainer.Config, *, sync_every: int) -> OuterTrainer.Config:
    """A Trainer's config as that of one worker of several."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["debug"] = dataclasses.replace(config.debug, seed=config.debug.seed or 0)  # same weights
    return OuterTrainer.Config(**fields, sync_every=sync_every)


# -- what `--config debug` trains on -------------------------------------------------------------

TEXT = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()


class Bytes(BaseDataLoader):
    """Windows of a text, drawn by rank and number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`infinite` is what torchtitan's validator sets: this one never ends."""

        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._rank, self._length, self._rows = dp_rank, seq_len, local_batch_size
        self._read = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            draws = torch.Generator().manual_seed(1_000_003 * self._rank + self._read)
            self._read += 1
            starts = torch.randint(len(TEXT) - self._length - 1, (self._rows,), generator=draws)
            windows = torch.stack([TEXT[s : s + self._length + 1] for s in starts])
            yield {"input": windows[:, :-1].contiguous()}, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read, under a key for this rank."""
        return {f"read.{self._rank}": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the next batch."""
        self._read = state_dict[f"read.{self._rank}"]


class NoTokenizer(BaseTokenizer):
    """Bytes need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """There is nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Not called."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Not called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Number of byte values."""
        return 256


def debug() -> OuterTrainer.Config:
    """torchtitan's debug model, for a minute: checkpoints fall between rounds."""
    config = Trainer.Config(
        model_spec=model_registry("debugmodel"),
        tokenizer=NoTokenizer.Config(),
        dataloader=Bytes.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=64, steps=12),
        checkpoint=CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False),
        validator=Validator.Config(enable=True, freq=4, steps=2, dataloader=Bytes.Config()),
    )
    return as_worker(config, sync_every=5)
