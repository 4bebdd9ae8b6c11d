from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback

import thinwire as tw
from elastic_twin import ElasticHub
from thinwire.integrations.launch import check_apart, check_same_step
from thinwire.integrations.shares import ShareDataset
from thinwire.integrations.transformers import TransformersCallback
from trainer_workers import (
    METHODS,
    Windows,
    check_a_killed_team_resumes,
    check_an_elastic_worker_comes_back,
    hugging_face_arguments,
    is_anchor,
    model,
    run_team,
    train_by_hugging_face,
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "streaming", "sparse"])
def test_two_workers_killed_and_resumed_end_as_if_left_alone(method: str, tmp_path: Path) -> None:
    check_a_killed_team_resumes("transformers", method, tmp_path)


@pytest.mark.slow
def test_workers_of_two_ddp_ranks_send_every_byte_once(tmp_path: Path) -> None:
    straight = check_a_killed_team_resumes("transformers", "sparse", tmp_path, ranks=2)
    assert all(each["is_ddp"] for each in straight)
    alone, _ = run_team("transformers", "sparse", "straight", tmp_path / "alone")
    assert sum(each["sent_bytes"] for each in straight[:2]) == alone["sent_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("resume", [None, lambda _: True], ids=["with nothing", "checkpoint"])
def test_an_elastic_worker_that_was_killed_comes_back(resume, tmp_path: Path) -> None:
    work = "trainer_workers.elastic_hugging_face"
    logs = check_an_elastic_worker_comes_back(work, tmp_path, resume)
    assert len({history[-1]["outer/rounds"] for history in logs}) == 1
    for history in logs:
        assert max(line["outer/workers"] for line in history) == 3
        assert history[-1]["outer/sent_bytes"] > 0
    undisturbed, restarted = logs[0], logs[-1]
    # A loss is a mean over the steps that this worker trained, not over those of the run.
    losses = {line["step"]: line["loss"] for line in undisturbed if "loss" in line}
    own = [line for line in restarted if "loss" in line and line["step"] > 20]
    for line in (own[0], own[-1]):
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=0.1)
    evaluated = [[h["eval_loss"] for h in history if "eval_loss" in h][-1] for history in logs]
    assert len(set(evaluated)) == 1


def build(out: Path, *, optimizer=None, method=None, transport=None, scheduler=None, **changes):
    net = model()
    method = tw.presets.diloco(sync_every=4) if method is None else method
    mine = method.inner.build(net)
    outer, rows = tw.OuterLoop(net, mine, method, transport=transport), Windows(0)
    if transport is not None:
        rows = ShareDataset(rows, lambda: outer, rows_per_step=4)
    trainer = Trainer(
        model=net,
        args=hugging_face_arguments(out, **{"max_steps": 8, "save_strategy": "no", **changes}),
        train_dataset=rows,
        eval_dataset=Windows(99, 8),
        optimizers=(
            mine if optimizer is None else optimizer(net),
            None if scheduler is None else scheduler(mine),
        ),
    )
    return trainer, TransformersCallback(outer)


def trained(built):
    """The same trainer and callback, once they have trained."""
    trainer, callback = built
    callback.add_to(trainer)
    trainer.train()
    return trainer, callback


def best_model(every: int) -> dict:
    strategies = {"eval_strategy": "steps", "save_strategy": "steps"}
    return {"load_best_model_at_end": True, "eval_steps": every, "save_steps": every} | strategies


def test_accumulated_steps_count_once_and_its_logs_have_rounds(tmp_path: Path) -> None:
    found = train_by_hugging_face(METHODS["diloco"](), "straight", tmp_path)
    assert (found["steps"], found["rounds"]) == (24, 6)
    assert found["logged_rounds"] == [2, 4, 6]
    assert found["model_is_anchor"]


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


class FakeLoop:
    workers, inner_step, is_elastic = 2, 3, False
    transport = tw.transport.Distributed()


def test_workers_of_other_ranks_or_steps_than_the_trainers_are_refused() -> None:
    loop = FakeLoop()
    with pytest.raises(tw.ConfigurationError, match=r"2 workers under one torchrun.*THINWIRE_AT"):
        check_apart(loop, 2)
    with pytest.raises(tw.ConfigurationError, match=r"from step 8.*at inner step 3"):
        check_same_step(loop, 8)
    check_same_step(loop, 3)
    check_apart(loop, 1)
    loop.is_elastic = True
    wanted = r"worker of 2 ranks in an elastic run.*join with 1 of them"
    with pytest.raises(tw.ConfigurationError, match=wanted):
        check_apart(loop, 2)
    check_apart(loop, 1)


H = 3
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def build_elastic(out: Path, **changes):
    """A lone worker."""
    hub = ElasticHub()
    end = hub.connect("a")
    hub.set_members(end)
    given = {"max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    given |= {"ignore_data_skip": True, "save_steps": 5, "save_strategy": "steps"}
    given |= {"logging_steps": 1, **changes}
    return build(out, method=tw.presets.diloco(sync_every=H), transport=end, **given)


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
    # One that comes when the run is over trains no step of it.
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
