"""The names that the Python blocks of a documentation page find when they run, one by one.

A page's blocks run in order and share their names. For each page, `SETUPS` says what exists before
its first block, and which of its words to replace by places on this machine. `python page_setups.py
PAGE` runs one page; under torchrun it is one rank of it.
"""

import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from elastic_team import TOKEN
from s3_server import in_aws, s3_server
from thinwire.experiments.grid import specs_of
from toy import adamw, build_model, descend, loss

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = 8

# Pages that do not run here, and what runs them.
RUN_BY_OTHERS = {"docs/tutorials/own-parts.md": "test_snippets.py runs it by pytest"}

Names = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The setup of one page."""

    names: Callable[[Path], AbstractContextManager[Names]]
    check: Callable[[Names], bool] = lambda names: True
    _: KW_ONLY
    instead: Mapping[str, str] = field(default_factory=dict)  # replacements in the page's text
    renew: Callable[[Names], object] = lambda names: None  # runs before each block
    first: int = 0  # earlier blocks are files that run on their own
    ranks: int = 1
    needs: tuple[str, ...] = ()  # modules without which the page is skipped

    @property
    def is_slow(self) -> bool:
        """True if the page needs servers or ranks."""
        return bool(self.needs) or self.ranks > 1


class Regressor(nn.Sequential):
    """A model that returns its loss, as transformers' do; a batch is a worker and a step."""

    def __init__(self) -> None:
        super().__init__(build_model())

    def forward(self, batch: tuple[int, int]) -> SimpleNamespace:
        worker, step = batch
        return SimpleNamespace(loss=loss(self[0], 1000 * worker + step, 0))


def common(**names: Any) -> Names:
    """A model, its optimizer, a method and its batches, and modules that pages take for granted."""
    model = Regressor()
    known = {"tw": tw, "torch": torch, "dataclasses": dataclasses, "train": train, "token": TOKEN}
    return known | {
        "model": model,
        "optimizer": adamw(model),
        "method": tw.presets.diloco(sync_every=4),
        "loader": [(0, step) for step in range(STEPS)],
        **names,
    }


def plain(folder: Path) -> AbstractContextManager[Names]:
    return contextlib.nullcontext(common())


@contextmanager
def one_rank(folder: Path) -> Iterator[Names]:
    """Names in a process group of one rank, or of those that torchrun started."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield common()
    finally:
        dist.destroy_process_group()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for batch in loader:
        descend(model(batch).loss, optimizer)


def watched(folder: Path) -> AbstractContextManager[Names]:
    names = common(loss=torch.tensor(2.0), tokens=64, seconds=0.5)
    names["outer"] = tw.OuterLoop(names["model"], names["optimizer"], names["method"])
    return contextlib.nullcontext(names)


@contextmanager
def mesh(folder: Path) -> Iterator[Names]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_rank(folder) as names:
        yield names | {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}


def trains_shards(names: Names) -> bool:
    """Whether a rank keeps half of the model, equal on both workers after a round."""
    ranks, outer = names["mesh"], names["outer"]
    for step in range(4):
        descend(names["model"]((ranks.get_local_rank("worker"), step)).loss, names["optimizer"])
        outer.step()
    own = torch.cat([p.to_local().flatten() for p in names["model"].parameters()])
    halves = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(halves, own, group=ranks.get_group("worker"))
    return outer.stats.rounds == 1 and torch.equal(*halves)


def asynchronous(folder: Path) -> AbstractContextManager[Names]:
    from thinwire.asynchronous import AsyncServer, AsyncWorker

    def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        train(model, optimizer, [(0, step) for step in range(steps)])

    names = common(AsyncServer=AsyncServer, AsyncWorker=AsyncWorker, build_model=Regressor)
    names |= {"k": 0, "now": time.monotonic, "steps_per_s": 100.0, "train": some_steps}
    return contextlib.nullcontext(names)


@contextmanager
def bucket(folder: Path) -> Iterator[Names]:
    """A server on this machine, set up through the variables that an S3 client reads."""
    with s3_server(folder) as endpoint:
        more = {"AWS_ALLOW_HTTP": "true", "THINWIRE_TOKEN": TOKEN}
        with mock.patch.dict(os.environ, in_aws(endpoint) | more):
            names = common(steps=STEPS, batch=lambda share, step: (share, step))
            yield names | {"loss_of": lambda batch: names["model"](batch).loss}


@contextmanager
def trainers(folder: Path) -> Iterator[Names]:
    import lightning
    from transformers import Trainer, TrainingArguments

    from trainer_workers import Windows

    with bucket(folder), contextlib.chdir(folder):
        given = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        yield common(
            Trainer=Trainer,
            TrainingArguments=TrainingArguments,
            args=TrainingArguments(output_dir="straight", **given),
            lightning=lightning,
            own_part=Windows(0),
            rows=Windows(0),
        )


def has_trained(names: Names) -> bool:
    return names["outer"].inner_step == STEPS


def another_llama(names: Names) -> None:
    """Build a new model for each block, because an optimizer belongs to one loop."""
    from trainer_workers import model

    names["model"] = model()
    names["optimizer"] = names["method"].inner.build(names["model"])


STORE = {"s3://my-bucket": "s3://run"}
TRAINERS = STORE | {
    "max_steps=10_000": f"max_steps={STEPS}",
    "resume_from_checkpoint=True)  # or without": ")",
}
SETUPS = {
    "README.md": Setup(one_rank, has_trained),
    # Two methods, with two numbers of workers each.
    "docs/comparing.md": Setup(plain, lambda names: len(specs_of(names["grid"]())) == 4),
    "docs/elastic.md": Setup(bucket, has_trained, instead=STORE, needs=("obstore",)),
    "docs/how-to/asynchronous.md": Setup(
        asynchronous, lambda names: names["server"].stats.arrivals == 1
    ),
    "docs/how-to/choose-a-method.md": Setup(plain),
    "docs/how-to/compose-a-method.md": Setup(plain),
    "docs/how-to/own-loop.md": Setup(
        one_rank, has_trained, renew=lambda names: names.update(common())
    ),
    "docs/how-to/trainers.md": Setup(
        trainers,
        renew=another_llama,
        instead=TRAINERS,
        needs=("obstore", "transformers", "lightning"),
    ),
    "docs/how-to/workers-of-several-ranks.md": Setup(
        mesh, trains_shards, instead={'"cuda"': '"cpu"'}, first=1, ranks=4
    ),
    "PYPI.md": Setup(one_rank, has_trained),
    "docs/security.md": Setup(one_rank),
    "docs/watching.md": Setup(watched),
}


def blocks_of(page: str) -> list[str]:
    return PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))


def run_page(page: str, folder: Path, *, blocks: list[str] | None = None) -> None:
    """Run the page's blocks, or `blocks`; an error names the block it comes from."""
    setup = SETUPS[page]
    with setup.names(folder) as names:
        found = blocks_of(page)[setup.first :] if blocks is None else blocks
        for number, block in enumerate(found, setup.first):
            for text, here in setup.instead.items():
                block = block.replace(text, here)
            setup.renew(names)
            exec(compile(block, f"{page}, block {number} of Python", "exec"), names)
        assert setup.check(names), f"{page}: its blocks run, and do not do what they should"


if __name__ == "__main__":
    run_page(sys.argv[1], Path(sys.argv[2]))
