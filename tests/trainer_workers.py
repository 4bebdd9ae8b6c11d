"""Workers under other libraries' trainers, and checks of them.

`elastic_team.Team(work="trainer_workers.elastic_FUNCTION")` starts workers that come and go.
"""

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

import thinwire as tw
from elastic_twin import ElasticHub
from language_models import llama
from processes import rank_environment
from thinwire.integrations.shares import ShareDataset
from thinwire.transport.address import split_address

STEPS, SAVED_AT = 24, 8
METHODS = {
    "diloco": lambda: tw.presets.diloco(sync_every=4),
    "streaming": lambda: tw.presets.streaming_diloco(sync_every=6, layers=2, tau=2),
    "sparse": lambda: tw.presets.sparse_muloco(sync_every=4, density=1 / 32),
}
ELASTIC_STEPS, H, BATCH, ACCUMULATED, RATE = 60, 5, 2, 2, 0.002


def tell(**what) -> None:
    print(json.dumps({"at_s": time.time(), **what}), flush=True)


class Windows(torch.utils.data.Dataset):
    """Rows of equal length, drawn by worker and index."""

    def __init__(self, worker: int, count: int = 512) -> None:
        self.worker, self.count = worker, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(1_000_003 * self.worker + index)
        start = torch.randint(32, (1,), generator=draws)
        tokens = (start + 3 * torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return llama()


def is_anchor(net: nn.Module, outer: tw.OuterLoop) -> bool:
    anchor = outer.consensus()
    return all(torch.equal(p, anchor[name]) for name, p in net.named_parameters())


def facts(net: nn.Module, outer: tw.OuterLoop) -> dict[str, Any]:
    return {
        "digest": outer.digest(),
        "rounds": outer.stats.rounds,
        "steps": outer.inner_step,
        "model_is_anchor": is_anchor(net, outer),
    }


# -- trainers --------------------------------------------------------------------------------------


def hugging_face_arguments(out: Path, **given) -> Any:
    """Arguments for Trainer, which joins the ranks of this worker if there are several."""
    from transformers import TrainingArguments

    ddp = {"ddp_backend": "gloo"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(out), **{**quiet, **ddp, **given})


def hugging_face_trainer(args: Any, net: nn.Module, rows: Any, *optimizers: Any) -> Any:
    from transformers import Trainer

    given = {"train_dataset": rows, "eval_dataset": Windows(99, 8)}
    return Trainer(model=net, args=args, optimizers=(*optimizers, None)[:2], **given)


def lightning_trainer(out: Path, *callbacks: Any, **given) -> Any:
    import lightning

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, **given},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=out,
        callbacks=list(callbacks),
    )


def lightning_module(net: nn.Module, configure: Callable[[], Any]) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(**batch).loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(**batch).loss)

        def configure_optimizers(self):
            return configure()

    return Module()


def lightning_saves(folder: str | Path, every: int) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(
        dirpath=folder, every_n_train_steps=every, save_top_k=-1, filename="{step}"
    )


def check_a_plain_worker(
    train: Callable[[nn.Module, tw.Method, Path, bool], tuple[dict[str, Any], tw.OuterLoop]],
    name: str,
    out: Path,
) -> dict[str, Any]:
    """Check a worker against a loop by hand, also when resumed; returns what `train` reports."""
    method, net, seen = METHODS[name](), model(), []

    def see(module: nn.Module, args: Any, batch: dict[str, Any]) -> None:
        seen.extend([batch["input_ids"]] * module.training)

    net.register_forward_pre_hook(see, with_kwargs=True)
    straight, outer = train(net, method, out, False)
    assert straight["model_is_anchor"]
    resumed, _ = train(model(), method, out, True)
    # Lightning lists the losses of this process, Trainer those of the run.
    resumed["losses"] = straight["losses"][:-2] + resumed["losses"][-2:]
    assert resumed == straight
    if name == "diloco":  # in the others, a last bit decides what is sent
        found = parameters_to_vector(outer.consensus().values())
        assert (found - by_hand(method, seen)).abs().max() < 1e-5
        assert (found - parameters_to_vector(model().parameters())).abs().max() > 1e-2
    return straight


def by_hand(method: tw.Method, batches: list[torch.Tensor]) -> torch.Tensor:
    """The outer parameters after inner steps of two batches each."""
    net = model()
    optimizer = method.inner.build(net)
    with tw.OuterLoop(net, optimizer, method) as outer:
        for number, tokens in enumerate(batches):
            (net(input_ids=tokens, labels=tokens).loss / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return parameters_to_vector(outer.consensus().values())


def lone_end() -> tw.transport.Transport:
    """The transport of a lone worker of an elastic run."""
    hub = ElasticHub()
    end = hub.connect("a")
    hub.set_members(end)
    return end


def is_put_back(outer: tw.OuterLoop, steps: int) -> None:
    """Make a run go on without the last `steps` of its only worker, once."""
    flush, left = outer.flush, [steps]

    def flush_or_not() -> bool:
        if left:
            outer._state.step -= left.pop()
            outer._state.dealt += 1
            return False
        return flush()

    outer.flush = flush_or_not


class Companion:
    """A worker of an elastic run in this thread, at step `at` of `steps` when one joins late."""

    def __init__(
        self, method: tw.Method, at: int, steps: int, named: Callable[[nn.Module], nn.Module]
    ) -> None:
        hub, self.net, self.steps = ElasticHub(), model(), steps
        there, self.late = hub.connect("there"), hub.connect("late")
        self.optimizer = method.inner.build(self.net)
        self.outer = tw.OuterLoop(named(self.net), self.optimizer, method, transport=there)
        hub.set_members(there)
        for _ in range(at - (at < steps)):
            self.begin()
            self.outer.finish()
        hub.set_members(there, self.late)
        if at < steps:
            self.begin()
        else:
            self.outer.begin(last=True)

    def begin(self) -> None:
        tokens = Windows(1)[self.outer.inner_step]["input_ids"][None]
        self.net(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.outer.begin()

    def finish(self) -> None:
        self.outer.finish()
        if self.outer.inner_step == self.steps:
            self.outer.begin(last=True)


# -- workers that come and go ----------------------------------------------------------------------


def factor(step: int) -> float:
    """Factor of the learning rate, which decays linearly."""
    return 1 - step / ELASTIC_STEPS


class Elastic:
    """A worker that comes and goes, under any trainer."""

    def __init__(self, store: str, identity: str, options: dict) -> None:
        torch.set_num_threads(1)
        # A newcomer takes the others' weights, so its own may differ.
        self.net = model(sum(identity.encode()))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.method = tw.presets.diloco(sync_every=H)
        group = {"group": dist.group.WORLD} if "ranks" in options else {}
        self.transport = tw.transport.Elastic(
            store, run="run", identity=identity, least_wait_s=1.0, **group
        )
        self.transport.events.listen(lambda event: tell(event=event.describe()))
        self.folder = f"{options['out']}/{identity}"
        self.step_s = options["step_s"]

    def shares(self, outer: Callable[[], tw.OuterLoop]) -> ShareDataset:
        return ShareDataset(Windows(0, 100_000), outer, rows_per_step=BATCH * ACCUMULATED)

    def say_step(self, outer: tw.OuterLoop, step: int) -> None:
        tell(step=step, share=outer.share, workers=outer.workers, version=outer.stats.rounds)
        time.sleep(self.step_s)

    def finish(self, outer: tw.OuterLoop, net: nn.Module) -> None:
        found = facts(net, outer)
        tell(**found, version=found["rounds"], last_step=found["steps"])
        outer.close()
        os._exit(0)


def elastic_hugging_face(store: str, identity: str, options: dict) -> None:
    from transformers import PrinterCallback, TrainerCallback

    from thinwire.integrations.transformers import TransformersCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            worker.say_step(outer, state.global_step)

    # Environment variables by which a trainer joins the ranks of this worker.
    index, ranks, meeting = options.get("ranks", (0, 1, ""))
    if ranks > 1:
        host, port = split_address(meeting)
        os.environ |= rank_environment(index, ranks, port) | {"MASTER_ADDR": host}
    args = hugging_face_arguments(
        Path(options["out"], identity),
        max_steps=ELASTIC_STEPS,
        per_device_train_batch_size=BATCH // ranks,
        gradient_accumulation_steps=ACCUMULATED,
        ignore_data_skip=True,
        eval_strategy="steps",
        eval_steps=4 * H,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
    )
    worker = Elastic(store, identity, options)
    outer = tw.OuterLoop(worker.net, worker.optimizer, worker.method, transport=worker.transport)
    rows = worker.shares(lambda: outer)
    trainer = hugging_face_trainer(args, worker.net, rows, worker.optimizer, worker.schedule)
    trainer.add_callback(Watch())
    trainer.remove_callback(PrinterCallback)  # its output is not JSON
    TransformersCallback(outer).add_to(trainer)
    trainer.train()
    worker.finish(outer, worker.net)


def elastic_lightning(store: str, identity: str, options: dict) -> None:
    from lightning.pytorch.callbacks import Callback

    from thinwire.integrations.lightning import LightningCallback

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index % ACCUMULATED == 0:
                worker.say_step(callback.outer, trainer.global_step)

    def own_rows(rows: list) -> Any:
        return torch.utils.data.default_collate(rows[index::ranks])

    index, ranks, meeting = options.get("ranks", (0, 1, ""))
    given: dict[str, Any] = {}
    if ranks > 1:
        os.environ |= rank_environment(index, ranks, int(meeting.rpartition(":")[2]))
        os.environ["TORCHELASTIC_RUN_ID"] = "as torchrun has it"
        dist.init_process_group("gloo")
        given = {"devices": ranks, "strategy": "ddp"}
    worker = Elastic(store, identity, options)
    callback = LightningCallback(worker.method, transport=worker.transport)
    saves = lightning_saves(worker.folder, 4)
    # An epoch is a round.
    given |= {"accumulate_grad_batches": ACCUMULATED, "check_val_every_n_epoch": 1}
    trainer = lightning_trainer(
        options["out"], callback, Watch(), saves, max_steps=ELASTIC_STEPS, **given
    )
    scheduler = {"scheduler": worker.schedule, "interval": "step"}
    module = lightning_module(worker.net, lambda: ([worker.optimizer], [scheduler]))
    trainer.fit(
        module,
        torch.utils.data.DataLoader(
            worker.shares(lambda: callback.outer), batch_size=BATCH, collate_fn=own_rows
        ),
        torch.utils.data.DataLoader(Windows(99, 8), batch_size=4),
    )
    worker.finish(callback.outer, module)
