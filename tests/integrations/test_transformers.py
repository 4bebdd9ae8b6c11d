from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

import thinwire as tw
from thinwire.integrations.launch import check_apart, check_same_step
from thinwire.integrations.shares import ShareDataset
from thinwire.integrations.transformers import TransformersCallback
from trainer_workers import (
    METHODS,
    SAVED_AT,
    STEPS,
    Companion,
    Windows,
    check_a_plain_worker,
    facts,
    hugging_face_arguments,
    hugging_face_trainer,
    is_anchor,
    is_put_back,
    lone_end,
    model,
)


def train(net, method: tw.Method, out: Path, resume: bool) -> tuple[dict, tw.OuterLoop]:
    optimizer = method.inner.build(net)
    given = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    given |= {"save_strategy": "steps", "save_steps": SAVED_AT, "per_device_train_batch_size": 4}
    given |= {"eval_strategy": "steps", "eval_steps": 8, "logging_steps": 8}
    outer = tw.OuterLoop(net, optimizer, method)
    args = hugging_face_arguments(out, lr_scheduler_type="constant", **given)
    trainer = hugging_face_trainer(args, net, Windows(0), optimizer)
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED_AT}") if resume else None)
    logs = trainer.state.log_history
    rounds = [line["outer/rounds"] for line in logs if "loss" in line]
    losses = [(line["step"], line["eval_loss"]) for line in logs if "eval_loss" in line]
    told = {"losses": losses, "logged_rounds": rounds}
    return facts(net, outer) | told, outer


@pytest.mark.slow_cases("streaming", "sparse")
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_is_a_plain_loop_also_when_resumed(method: str, tmp_path: Path) -> None:
    """Accumulated steps count once."""
    found = check_a_plain_worker(train, method, tmp_path)
    assert found["steps"] == 24
    if method == "diloco":
        assert found["logged_rounds"] == [2, 4, 6]


@pytest.mark.parametrize("at", [6, 12])
def test_a_worker_that_comes_late_is_at_the_others_step(at: int, tmp_path: Path) -> None:
    """If the run is over it trains no step of it."""
    method, lasts = tw.presets.diloco(sync_every=H), 12
    there = Companion(method, at, lasts, lambda net: net)

    class Lockstep(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            if state.global_step < lasts:
                there.begin()

        def on_step_end(self, args, state, control, **given):
            if there.outer.inner_step < lasts or at < lasts:
                there.finish()

    def falling(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    given = {"ignore_data_skip": True, "per_device_train_batch_size": 4, "logging_steps": H}
    trainer, callback = build(
        tmp_path, method=method, transport=there.late, scheduler=falling, max_steps=lasts, **given
    )
    trainer.add_callback(Lockstep())
    losses = []
    trainer.model.register_forward_hook(lambda *given: losses.append(given[-1].loss.item()))
    trained((trainer, callback))
    there.outer.finish()
    assert (trainer.state.global_step, callback.outer.inner_step) == (lasts, lasts)
    assert callback.outer.digest() == there.outer.digest()
    assert is_anchor(trainer.model, callback.outer)
    if at < lasts:
        assert len(losses) == lasts - at
        for group in trainer.optimizer.param_groups:
            assert group["lr"] == group["initial_lr"] * 0.5**lasts
        logs = [line for line in trainer.state.log_history if "loss" in line]
        assert [(line["step"], line["outer/workers"]) for line in logs] == [(9, 2), (12, 2)]
        # A loss is a mean over the steps that this worker trained, not over those of the run.
        found = [line["loss"] for line in logs]
        assert found == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], rel=1e-3)


def build(out: Path, *, optimizer=None, method=None, transport=None, scheduler=None, **changes):
    net = model()
    method = tw.presets.diloco(sync_every=4) if method is None else method
    mine = method.inner.build(net)
    outer, rows = tw.OuterLoop(net, mine, method, transport=transport), Windows(0)
    if transport is not None:
        rows = ShareDataset(rows, lambda: outer, rows_per_step=4)
    args = hugging_face_arguments(out, **{"max_steps": 8, "save_strategy": "no", **changes})
    optimizers = mine if optimizer is None else optimizer(net), scheduler and scheduler(mine)
    return hugging_face_trainer(args, net, rows, *optimizers), TransformersCallback(outer)


def trained(built):
    """The same trainer and callback, once they have trained."""
    trainer, callback = built
    callback.add_to(trainer)
    trainer.train()
    return trainer, callback


def best_model(every: int) -> dict:
    strategies = {"eval_strategy": "steps", "save_strategy": "steps"}
    return {"load_best_model_at_end": True, "eval_steps": every, "save_steps": every} | strategies


def test_trainers_own_optimizer_is_refused(tmp_path: Path) -> None:
    trainer, callback = build(tmp_path, optimizer=lambda net: torch.optim.SGD(net.parameters()))
    with pytest.raises(tw.ConfigurationError, match=r"optimizers=\(optimizer, None\)"):
        callback.add_to(trainer)
    trainer.add_callback(callback)  # by hand: when training begins
    with pytest.raises(tw.ConfigurationError, match="another optimizer"):
        trainer.train()


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_what_shards_in_its_own_way_is_refused(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Neither runs here: accelerate's state is set as it would be, also by `accelerate launch`."""
    trainer, callback = build(tmp_path)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType[kind])
    with pytest.raises(tw.ConfigurationError, match=f"a worker with {kind} inside Trainer"):
        callback.add_to(trainer)


@pytest.mark.parametrize(
    ("method", "eval_steps"),
    [
        (tw.presets.diloco(sync_every=4), 6),
        (tw.presets.diloco(sync_every=4, overlap=tw.Delay(tau=1)), 4),
        (tw.presets.streaming_diloco(sync_every=4, layers=2), 4),
    ],
    ids=["between rounds", "overlapped", "streamed"],
)
def test_a_best_model_that_was_not_evaluated_is_refused(tmp_path, method, eval_steps) -> None:
    trainer, callback = build(tmp_path, method=method, **best_model(eval_steps))
    with pytest.raises(tw.ConfigurationError, match=r"load the best model.*multiples of 4"):
        callback.add_to(trainer)


def test_the_best_model_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    trainer, callback = build(tmp_path, **best_model(4))
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.3  # so that the first is the best
    trained((trainer, callback))
    losses = {h["step"]: h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h}
    assert trainer.evaluate()["eval_loss"] == min(losses.values())


def test_steps_that_a_scaler_skips_count(tmp_path: Path) -> None:
    """Accelerate has no fp16 without an accelerator: its scaler is set here as it would set it."""
    trainer, callback = build(tmp_path, max_grad_norm=0.0)
    callback.add_to(trainer)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = next(trainer.model.parameters())
    overflows = iter([False, True, True, *[False] * 5])
    weight.register_hook(lambda grad: grad * float("inf") if next(overflows) else grad)
    trainer.train()
    assert scaler.get_scale() == 2.0
    assert (callback.outer.inner_step, callback.outer.stats.rounds) == (8, 2)


def test_workers_of_other_ranks_or_steps_than_the_trainers_are_refused() -> None:
    given = {"workers": 2, "inner_step": 3, "is_elastic": False}
    loop = SimpleNamespace(transport=tw.transport.Distributed(), **given)
    with pytest.raises(tw.ConfigurationError, match=r"2 workers under one torchrun.*THINWIRE_AT"):
        check_apart(loop, 2)
    with pytest.raises(tw.ConfigurationError, match=r"from step 8.*at inner step 3"):
        check_same_step(loop, 8)
    check_same_step(loop, 3)
    check_apart(loop, 1)
    loop.transport = tw.transport.Sealed(loop.transport, "a secret of many characters")
    with pytest.raises(tw.ConfigurationError, match="2 workers under one torchrun"):
        check_apart(loop, 2)
    loop.is_elastic = True
    wanted = r"worker of 2 ranks in an elastic run.*join with 1 of them"
    with pytest.raises(tw.ConfigurationError, match=wanted):
        check_apart(loop, 2)
    check_apart(loop, 1)


H = 3
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def build_elastic(out: Path, **changes):
    """A lone worker."""
    given = {"max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    given |= {"ignore_data_skip": True, "save_steps": 5, "save_strategy": "steps"}
    given |= {"logging_steps": 1, **changes}
    return build(out, method=tw.presets.diloco(sync_every=H), transport=lone_end(), **given)


class Beginning(TrainerCallback):
    """What is there when training begins."""

    def __init__(self, outer: tw.OuterLoop) -> None:
        self.outer = outer

    def on_train_begin(self, args, state, control, **given):
        self.found = (self.outer.inner_step, state.global_step, self.outer.stats.rounds)
        self.is_anchor = is_anchor(given["model"], self.outer)


def test_elastic_checkpoints_resume_at_the_end_and_at_the_last_round(tmp_path: Path) -> None:
    trainer, callback = trained(build_elastic(tmp_path))
    # Those who watch the run see the loss that is logged.
    *_, last = (logged["loss"] for logged in trainer.state.log_history if "loss" in logged)
    assert callback.outer.transport.metrics.loss == last
    # The run is over: it trains no step.
    late, other = build_elastic(tmp_path)
    other.add_to(late)
    late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert (late.state.global_step, other.outer.inner_step) == (7, 7)
    assert other.outer.digest() == callback.outer.digest()
    assert is_anchor(late.model, other.outer)
    resumed, other = build_elastic(tmp_path)
    other.add_to(resumed)
    beginning = Beginning(other.outer)
    resumed.add_callback(beginning)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    # Two steps of its second round are lost, as with a worker that is killed.
    assert (beginning.found, beginning.is_anchor) == ((5, 5, 1), True)
    assert (resumed.state.global_step, other.outer.stats.rounds) == (7, 3)


def test_a_worker_that_is_put_back_leaves_the_run_to_the_others(tmp_path: Path) -> None:
    """A Trainer has no epochs for steps that are taken again."""
    trainer, callback = build_elastic(tmp_path)
    is_put_back(callback.outer, H)
    trained((trainer, callback))
    assert trainer.state.global_step == callback.outer.inner_step == 7 - H
    assert is_anchor(trainer.model, callback.outer)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ignore_data_skip": False}, r"ignore_data_skip=True.*ShareDataset"),
        ({"scheduler": PLATEAU}, r"ReduceLROnPlateau.*function of the step"),
        (best_model(H), "load the best model at the end of an elastic run"),
    ],
    ids=["skipped data", "metric", "best model"],
)
def test_what_elastic_workers_cannot_do_is_refused(changes: dict, why: str, tmp_path) -> None:
    built = build_elastic(tmp_path, **changes)
    with pytest.raises(tw.ConfigurationError, match=why):
        trained(built)
