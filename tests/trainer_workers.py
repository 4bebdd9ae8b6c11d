"""Workers under other libraries' trainers, and checks that start them as real processes.

`python trainer_workers.py LIBRARY METHOD MODE OUT` is one of a fixed number. MODE is straight, kill
(dies after inner step 15) or resume (from the checkpoint of step 8). It ends with a line of JSON.
Those that come and go are what `elastic_team.Team(work="trainer_workers.elastic_FUNCTION")` starts.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from forked import Forked
from language_models import llama
from processes import ended, free_port, rank_environment
from thinwire.integrations.shares import ShareDataset
from thinwire.transport.address import split_address

STEPS, KILLED_AT, SAVED_AT = 24, 15, 8
METHODS = {
    "diloco": lambda: tw.presets.diloco(sync_every=4),
    "streaming": lambda: tw.presets.streaming_diloco(sync_every=6, layers=2, tau=2),
    "sparse": lambda: tw.presets.sparse_muloco(sync_every=4, density=1 / 32),
}
WORKER = int(os.environ.get("WORKER", "0"))
ELASTIC_STEPS, H, BATCH, ACCUMULATED, RATE = 60, 5, 2, 2, 0.002


def tell(**what) -> None:
    print(json.dumps({"at_s": time.time(), **what}), flush=True)


class Windows(torch.utils.data.Dataset):
    """Rows of equal length, drawn by worker and index."""

    def __init__(self, worker: int, count: int = 512, *, says_rows: bool = False) -> None:
        self.worker, self.count, self.says_rows = worker, count, says_rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.says_rows:
            tell(row=index)
        draws = torch.Generator().manual_seed(1_000_003 * self.worker + index)
        start = torch.randint(32, (1,), generator=draws)
        tokens = (start + 3 * torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return llama()


def adapted(net: nn.Module) -> nn.Module:
    """`net` with adapters of rank 2, which are all that is trained."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        return get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def is_anchor(net: nn.Module, outer: tw.OuterLoop) -> bool:
    anchor = outer.consensus()
    return all(torch.equal(p, anchor[name]) for name, p in net.named_parameters())


def facts(net: nn.Module, outer: tw.OuterLoop) -> dict[str, Any]:
    return {
        "digest": outer.digest(),
        "rounds": outer.stats.rounds,
        "steps": outer.inner_step,
        "sent_bytes": outer.stats.sent_bytes,
        "model_is_anchor": is_anchor(net, outer),
    }


# -- trainers --------------------------------------------------------------------------------------


def hugging_face_arguments(out: Path, **given) -> Any:
    """Trainer joins the ranks of this worker when it gets them, if there are several."""
    from transformers import TrainingArguments

    ddp = {"ddp_backend": "gloo"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(out), **quiet, **ddp, **given)


def lightning_trainer(out: Path, *callbacks: Any, **given) -> Any:
    import lightning

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        accelerator="cpu",
        **{"devices": 1, **given},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=out,
        callbacks=list(callbacks),
    )


def lightning_module(
    net: nn.Module, configure: Callable[[], Any], losses: list[float] | None = None
) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            loss = self.net(**batch).loss
            if losses is not None:
                losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(**batch).loss)

        def configure_optimizers(self):
            return configure()

    return Module()


def lightning_watch(before_batch: Callable, after_batch: Callable) -> tuple[Any, list[dict]]:
    """A callback for batches, and the metrics that it notes after each evaluation."""
    from lightning.pytorch.callbacks import Callback

    logs: list[dict] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            before_batch(trainer, index)

        def on_train_batch_end(self, trainer, *_):
            after_batch(trainer)

        def on_validation_end(self, trainer, module):
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            logs.append({"step": trainer.global_step, **found})

    return Watch(), logs


def lightning_saves(folder: str | Path, every: int) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(
        dirpath=folder, every_n_train_steps=every, save_top_k=-1, filename="{step}"
    )


# -- a fixed number of workers ---------------------------------------------------------------------


def train_by_hugging_face(method: tw.Method, mode: str, out: Path) -> dict:
    from transformers import Trainer, TrainerCallback

    from thinwire.integrations.transformers import TransformersCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if mode == "kill" and state.global_step == KILLED_AT:
                os._exit(9)

    net = model()
    optimizer = method.inner.build(net)
    args = hugging_face_arguments(
        out,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        warmup_steps=4,
        logging_steps=8,
        save_strategy="steps",
        save_steps=SAVED_AT,
        eval_strategy="steps",
        eval_steps=8,
    )
    ranks = dist.group.WORLD if dist.is_initialized() else None
    outer = tw.OuterLoop(net, optimizer, method, ddp_group=ranks)
    trainer = Trainer(
        model=net,
        args=args,
        train_dataset=Windows(WORKER),
        eval_dataset=Windows(99, 16),
        optimizers=(optimizer, None),
        callbacks=[Kill()],
    )
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=True if mode == "resume" else None)
    logs = trainer.state.log_history
    return {
        **facts(net, outer),
        "losses": [(line["step"], line["eval_loss"]) for line in logs if "eval_loss" in line],
        "logged_rounds": [line["outer/rounds"] for line in logs if "loss" in line],
        "is_ddp": type(trainer.model_wrapped).__name__ == "DistributedDataParallel",
    }


def train_by_lightning(method: tw.Method, mode: str, out: Path) -> dict:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from thinwire.integrations.lightning import LightningCallback

    def kill(trainer) -> None:
        if mode == "kill" and trainer.global_step == KILLED_AT:
            os._exit(9)

    net, callback = model(), LightningCallback(method)
    watch, logs = lightning_watch(lambda *_: None, kill)
    saves = lightning_saves(out, SAVED_AT)
    given = {"accumulate_grad_batches": 2, "val_check_interval": 16}
    trainer = lightning_trainer(out, callback, watch, saves, max_steps=STEPS, **given)
    module = lightning_module(net, lambda: method.inner.build(net))
    trainer.fit(
        module,
        StatefulDataLoader(Windows(WORKER), batch_size=4),
        torch.utils.data.DataLoader(Windows(99, 16), batch_size=4),
        ckpt_path=str(out / f"step={SAVED_AT}.ckpt") if mode == "resume" else None,
    )
    losses = [(line["step"], line["val_loss"]) for line in logs]
    return {**facts(module, callback.outer), "losses": losses}


LIBRARIES = {"transformers": train_by_hugging_face, "lightning": train_by_lightning}


def run_team(library: str, method: str, mode: str, out: Path, *, ranks: int = 1) -> list[dict]:
    """The last line of each rank of two workers; empty if they were killed."""
    at = f"tcp://127.0.0.1:{free_port()}?workers=2&worker="
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    team = []
    for worker in range(2):
        own = environment | {"WORKER": str(worker), "THINWIRE_AT": f"{at}{worker}"}
        port = free_port()
        for rank in range(ranks):
            joined = rank_environment(rank, ranks, port) if ranks > 1 else {}
            team.append(Forked([__file__, library, method, mode, str(out)], joined | own))
    for process in ended(team):
        # Of two that are killed one may die of the other's death.
        assert (process.returncode != 0) == (mode == "kill"), process.stderr
    return [] if mode == "kill" else [json.loads(p.stdout.splitlines()[-1]) for p in team]


def check_a_killed_team_resumes(
    library: str, method: str, out: Path, *, ranks: int = 1
) -> list[dict]:
    """Digests, bytes and losses equal those of a run that was left alone; returns what it said."""
    straight = run_team(library, method, "straight", out / "straight", ranks=ranks)
    assert len({each["digest"] for each in straight}) == 1
    assert straight[0]["losses"] == straight[ranks]["losses"]
    assert straight[0]["model_is_anchor"]
    run_team(library, method, "kill", out / "killed", ranks=ranks)
    resumed = run_team(library, method, "resume", out / "killed", ranks=ranks)
    for before, after in zip(straight, resumed, strict=True):
        # Lightning's list is of this process, Trainer's of the run.
        assert before["losses"][-2:] == after["losses"][-2:]
        for key in ("digest", "rounds", "steps", "model_is_anchor"):
            assert before[key] == after[key], key
        # Trainer saves what its first rank holds, whose parts may be a byte shorter each.
        assert abs(before["sent_bytes"] - after["sent_bytes"]) <= (0 if ranks == 1 else 32)
    return straight


# -- workers that come and go ----------------------------------------------------------------------


def factor(step: int) -> float:
    """Factor of the learning rate, which falls in a straight line."""
    return 1 - step / ELASTIC_STEPS


class Elastic:
    """A worker that comes and goes, under any trainer."""

    def __init__(self, store: str, identity: str, options: dict) -> None:
        torch.set_num_threads(1)
        if (start := options.get("start")) is not None:
            # Only now: to import a trainer takes longer than a run of these.
            while not Path(start).exists():
                time.sleep(0.01)
            options["resume"] = json.loads(Path(start).read_text())
        # A newcomer takes the others' weights, whatever its own were.
        self.net = model(sum(identity.encode()))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.method = tw.presets.from_text(options.get("method", "diloco"), sync_every=H)
        self.transport = tw.transport.Elastic(
            store,
            run="run",
            identity=identity,
            options=tw.transport.ElasticOptions(**options.get("terms", {})),
            least_wait_s=1.0,
            **({"group": dist.group.WORLD} if "ranks" in options else {}),
        )
        self.transport.events.listen(lambda event: tell(event=event.describe()))
        self.folder = f"{options['out']}/{identity}"
        self.step_s = options.get("step_s", 0.05)

    def shares(self, outer: Callable[[], tw.OuterLoop]) -> ShareDataset:
        rows = Windows(0, 100_000, says_rows=True)
        return ShareDataset(rows, outer, rows_per_step=BATCH * ACCUMULATED)

    def say_step(self, outer: tw.OuterLoop, step: int) -> None:
        rate, version = self.optimizer.param_groups[0]["lr"], outer.stats.rounds
        # Of the step that has just been trained: in `share`, which is another one after a round.
        tell(step=step, share=outer.share, workers=outer.workers, version=version, rate=rate)
        time.sleep(self.step_s)

    def finish(self, outer: tw.OuterLoop, net: nn.Module, logs: list[dict], steps: int) -> None:
        found = facts(net, outer)
        ends = {"version": found["rounds"], "last_step": found["steps"], "trainer_steps": steps}
        tell(**found, **ends, logs=logs)
        outer.close()
        os._exit(0)


def elastic_hugging_face(store: str, identity: str, options: dict) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback

    from thinwire.integrations.transformers import TransformersCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            worker.say_step(outer, state.global_step)

    # The variables by which a trainer joins the ranks of this worker.
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
        logging_steps=H,
        eval_strategy="steps",
        eval_steps=4 * H,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
    )
    worker = Elastic(store, identity, options)
    outer = tw.OuterLoop(worker.net, worker.optimizer, worker.method, transport=worker.transport)
    trainer = Trainer(
        model=worker.net,
        args=args,
        train_dataset=worker.shares(lambda: outer),
        eval_dataset=Windows(99, 8),
        optimizers=(worker.optimizer, worker.schedule),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)  # which is no JSON
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    worker.finish(outer, worker.net, trainer.state.log_history, trainer.state.global_step)


def elastic_lightning(store: str, identity: str, options: dict) -> None:
    from thinwire.integrations.lightning import LightningCallback

    def say_step(trainer, index: int) -> None:
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
    watch, logs = lightning_watch(say_step, lambda _: None)
    saves = lightning_saves(worker.folder, 4)
    # An epoch is a round.
    given |= {"accumulate_grad_batches": ACCUMULATED, "check_val_every_n_epoch": 1}
    trainer = lightning_trainer(
        options["out"], callback, watch, saves, max_steps=ELASTIC_STEPS, **given
    )
    scheduler = {"scheduler": worker.schedule, "interval": "step"}
    module = lightning_module(worker.net, lambda: ([worker.optimizer], [scheduler]))
    trainer.fit(
        module,
        torch.utils.data.DataLoader(
            worker.shares(lambda: callback.outer), batch_size=BATCH, collate_fn=own_rows
        ),
        torch.utils.data.DataLoader(Windows(99, 8), batch_size=4),
        ckpt_path=options.get("resume"),
    )
    worker.finish(callback.outer, module, logs, trainer.global_step)


def check_an_elastic_worker_comes_back(
    work: str, folder: Path, last_checkpoint: Callable[[Path], Any] | None
) -> list[list[dict]]:
    """Kill and restart one of three workers with different weights; all must end alike.

    It resumes from what `last_checkpoint` finds in its folder, or from nothing.

    Returns:
        What each worker that came to the end has logged; the restarted one is the last.
    """
    from elastic_team import Team

    with Team(folder, work=work) as team:
        start = folder / "start"
        restarted = team.start("b", out=str(folder / "out"), start=str(start))
        workers = team.start_all(*"abc", out=str(folder / "out"))
        killed = workers[1]
        # In the middle of a round, with a checkpoint of the middle of an earlier one.
        team.until(lambda: killed.steps()[-1]["step"] > 16 and killed.steps()[-1]["step"] % H > 1)
        killed.kill()
        # The others go on, so that the checkpoint is behind them.
        team.until(lambda: workers[0].version > killed.version + 1)
        resume = None if last_checkpoint is None else last_checkpoint(folder / "out" / "b")
        (folder / "resume").write_text(json.dumps(resume))
        (folder / "resume").rename(start)
        alive = team.finish(90)
        assert alive == [restarted, workers[0], workers[2]]
        assert restarted.events("healed"), team.report()
        assert restarted.steps()[0]["step"] > killed.steps()[-1]["step"]
        rows = [line["row"] for w in team.workers for line in w.records if "row" in line]
        assert len(rows) == len(set(rows))
        for worker in alive:
            ends = [worker.last(key) for key in ("last_step", "trainer_steps", "model_is_anchor")]
            assert ends == [ELASTIC_STEPS, ELASTIC_STEPS, True]
            steps = [line["step"] for line in worker.steps()]
            assert steps == sorted(set(steps))
            assert steps[-1] == ELASTIC_STEPS - 1
            for line in worker.steps():
                assert line["rate"] == pytest.approx(RATE * factor(line["step"]), rel=1e-9)
        return [worker.last("logs") for worker in (workers[0], workers[2], restarted)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, name, mode, out = sys.argv[1:]
    print(
        json.dumps(LIBRARIES[library](METHODS[name](), mode, Path(out) / str(WORKER))), flush=True
    )
    if dist.is_initialized():
        dist.destroy_process_group()
