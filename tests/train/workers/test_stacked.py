"""Stacked workers compute what those on threads do, up to rounding."""

import copy
import dataclasses
import json
import os
from typing import final

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import thinwire as tw
from thinwire.errors import ConfigurationError
from thinwire.train import launch, recipes
from thinwire.train.config import Machine, Periods, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import resume, train
from thinwire.train.workers.group import ThreadedWorkers
from thinwire.train.workers.model_stack import (
    ModelStack,
    _kind_for,
    _MappedModule,
    _StackedEmbedding,
    _StackedLinear,
)
from thinwire.train.workers.stacked import PerWorkerStep, StackedStep, StackedWorkers
from thinwire.train.workers.worker import token_losses

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "attention_bias": True,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 256,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
METHODS = ["ddp", "diloco", "muloco", "streaming_diloco:tau=2", "sparseloco:density=1/8"]
STACKED = Machine(device="cpu", threads=1, simulation="stacked")
THREADS = Machine(device="cpu", threads=1)


@pytest.fixture
def tiny(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("thin wire worker anchor round step mean payload sends a " * 400)

    def make(method: str = "diloco", architecture=LLAMA, **changes) -> TrainConfig:
        file = tmp_path / f"{architecture['model_type']}.json"
        file.write_text(json.dumps(architecture))
        config = dataclasses.replace(
            recipes.laptop(method),
            model=Model(size=str(file)),
            data=Data(corpus=str(text), sequence_length=16, validation_sequences=6),
            workers=5,
            steps=8,
            global_batch=10,
            periods=Periods(log_steps=2, evaluate_steps=4, checkpoint_steps=4),
            machine=THREADS,
        )
        if method != "ddp":
            config = dataclasses.replace(
                config, method=dataclasses.replace(config.method, sync_every=3)
            )
        return dataclasses.replace(config, **changes)

    return make


def group_of(
    config: TrainConfig, *, machine: Machine, dtype=torch.float32
) -> ThreadedWorkers | StackedWorkers:
    config = dataclasses.replace(config, machine=machine)
    data = config.data.load()
    threads = launch.assemble(dataclasses.replace(config, machine=THREADS), data)
    assert isinstance(threads, ThreadedWorkers)
    for worker in threads.workers:
        worker.model.to(dtype)
    if machine.simulation == "threads":
        return threads
    threads.close()
    return StackedWorkers(threads.workers, threads=1, sample=data.validation)


def advance(group: ThreadedWorkers | StackedWorkers, steps: int) -> list[list[float]]:
    losses = []
    for _ in range(steps):
        losses.append(group.inner_step())
        group.outer_step()
    return losses


def weights(group: ThreadedWorkers | StackedWorkers) -> torch.Tensor:
    """[K, N]."""
    return torch.stack(
        [
            torch.cat([p.detach().flatten().double() for p in worker.model.parameters()])
            for worker in group.workers
        ]
    )


def models(architecture=LLAMA, count: int = 3, seed: int = 0) -> list[nn.Module]:
    from transformers import AutoConfig

    values = {key: value for key, value in architecture.items() if key != "architectures"}
    config = AutoConfig.for_model(**values)
    made = []
    for index in range(count):
        torch.manual_seed(seed + index)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape), alpha=0.05)
        made.append(model)
    return made


def windows(count: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (count, batch, 12), generator=torch.Generator().manual_seed(1))


# -- the same as on threads ------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_in_fp64_stacked_workers_end_where_those_on_threads_do(tiny, method, accumulate) -> None:
    """What remains is rounding: the models' own fp32 parts (norms, loss) and the fp32 exchange."""
    config = tiny(method, accumulate=accumulate)
    ends, losses = [], []
    for machine in (THREADS, STACKED):
        group = group_of(config, machine=machine, dtype=torch.float64)
        start = weights(group)
        losses.append(torch.tensor(advance(group, 8)))
        ends.append(weights(group))
        group.close()
    moved = (ends[0] - start).norm(dim=1)
    assert ((ends[1] - ends[0]).norm(dim=1) / moved).max() < 1e-4
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_in_fp32_a_run_ends_with_the_loss_of_threads(tiny, tmp_path, method: str) -> None:
    config = tiny(method)
    other = dataclasses.replace(config, seed=1)
    threads = train(config, tmp_path / "threads")
    stacked = train(dataclasses.replace(config, machine=STACKED), tmp_path / "stacked")
    assert stacked["val_loss"] == pytest.approx(threads["val_loss"], rel=1e-3)
    assert train(other, tmp_path / "control")["val_loss"] != pytest.approx(
        threads["val_loss"], rel=1e-3
    )
    exact = {"sent_bytes_per_worker", "received_bytes_per_worker", "parameters", "tokens", "steps"}
    assert {f: stacked[f] for f in exact} == {f: threads[f] for f in exact}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "stacked" / "model")
    assert sum(p.numel() for p in saved.parameters()) == stacked["parameters"]


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_gradient_is_that_of_its_own_model(architecture, count, batch) -> None:
    own = models(architecture, count)
    read = windows(count, batch)
    wanted = []
    for model, mine in zip(own, read, strict=True):
        token_losses(model, mine).mean().backward()
        wanted.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    stack = ModelStack(own, read.flatten(0, 1))
    stack.losses(read).sum().backward()
    stack.share_gradients()
    for model, gradients in zip(own, wanted, strict=True):
        for name, p in model.named_parameters():
            assert (p.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-8, name
    if count > 1:
        first, second = (
            wanted[i][
                "transformer.wte.weight" if architecture is GPT2 else "model.embed_tokens.weight"
            ]
            for i in (0, 1)
        )
        assert (first - second).norm() > 0.1 * first.norm()


def test_weights_are_what_they_were_and_views_of_the_stack() -> None:
    own = models()
    before = [{n: p.detach().clone() for n, p in model.named_parameters()} for model in own]
    stack = ModelStack(own, windows(1)[0])
    for index, (model, values) in enumerate(zip(own, before, strict=True)):
        for name, p in model.named_parameters():
            assert torch.equal(p, values[name])
            assert torch.equal(stack.parameters[name][index], p)
            p.data.fill_(index)
            assert bool((stack.parameters[name][index] == index).all())


@pytest.mark.parametrize("bias", [False, True])
def test_the_batched_product_equals_the_map_over_workers(bias) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3, bias=bias) for _ in range(4)]
    joint = nn.Linear(5, 3, bias=bias)
    joint.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
    if bias:
        joint.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
    x = torch.randn(8, 7, 10)[..., ::2]  # not contiguous
    outputs = []
    for kind in (_MappedModule, _StackedLinear):
        owner = kind("layer", joint, 4)
        owner.rows = 8
        outputs.append(owner(x))
    torch.testing.assert_close(outputs[0], outputs[1])
    wanted = torch.cat([layer(rows) for layer, rows in zip(layers, x.split(2), strict=True)])
    torch.testing.assert_close(outputs[1], wanted)
    swapped = torch.cat([layers[0](rows) for rows in x.split(2)])
    assert not torch.allclose(outputs[1], swapped)


@final
class Gain(nn.Module):
    """A norm's gain, by which a row is multiplied; `summed` mixes all of its numbers instead."""

    def __init__(self, *, summed: bool) -> None:
        super().__init__()
        self.weight, self.summed = nn.Parameter(torch.ones(5)), summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight.sum() if self.summed else self.weight)


@pytest.mark.parametrize(
    ("module", "broadcasts"),
    [
        (Gain(summed=False), True),
        (Gain(summed=True), False),  # summed over all workers' weights
        (nn.LayerNorm(5), False),  # torch refuses a weight of two dimensions
    ],
)
def test_weights_broadcast_where_that_is_what_the_map_gives(module, broadcasts) -> None:
    torch.manual_seed(0)
    made = [copy.deepcopy(module) for _ in range(3)]
    joint = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        own = [torch.randn(parameter.shape) for _ in made]
        for each, weight in zip(made, own, strict=True):
            each.get_parameter(name).data = weight
        setattr(joint, name, nn.Parameter(torch.stack(own)))
    owner = _MappedModule("norm", joint, 3)
    owner.rows = 6
    x = torch.randn(6, 7, 10)[..., ::2]
    wanted = torch.cat([each(rows) for each, rows in zip(made, x.split(2), strict=True)])
    for _ in range(2):  # the first call decides
        torch.testing.assert_close(owner(x), wanted)
        assert owner.broadcasts is broadcasts


@pytest.mark.parametrize("padding", [None, 2])
def test_embeddings_are_those_of_each_worker(padding) -> None:
    torch.manual_seed(0)
    tables = [nn.Embedding(11, 3, padding_idx=padding) for _ in range(2)]
    joint = nn.Embedding(11, 3, padding_idx=padding)
    joint.weight = nn.Parameter(torch.stack([table.weight.detach() for table in tables]))
    owner = _kind_for(joint)("table", joint, 2)
    assert type(owner) is _StackedEmbedding
    owner.rows = 4
    ids = torch.randint(0, 11, (4, 13))
    wanted = torch.cat([table(rows) for table, rows in zip(tables, ids.split(2), strict=True)])
    found = owner(ids)
    assert torch.equal(found, wanted)
    for value in (found, wanted):
        (value * torch.arange(found.numel()).view_as(found)).sum().backward()
    for gradient, table in zip(joint.weight.grad, tables, strict=True):
        torch.testing.assert_close(gradient, table.weight.grad)


def test_one_optimizer_steps_where_it_computes_the_same(tiny) -> None:
    kinds = {}
    for method in METHODS:
        group = group_of(tiny(method), machine=STACKED)
        kinds[method] = {type(stack.stepper) for stack in group._stacks}
        group.close()
    assert kinds == {m: {PerWorkerStep if m == "ddp" else StackedStep} for m in METHODS}


def test_signs_step_as_one(tiny) -> None:
    config = tiny("diloco")
    method = dataclasses.replace(config.method, inner=tw.inner.SignSGD(lr=1e-3, weight_decay=0.1))
    config, ends = dataclasses.replace(config, method=method), []
    for machine in (THREADS, STACKED):
        group = group_of(config, machine=machine, dtype=torch.float64)
        start = weights(group)
        advance(group, 4)
        ends.append(weights(group))
        kinds = {type(s.stepper) for s in group._stacks} if machine is STACKED else set()
        group.close()
    assert kinds == {StackedStep}
    # A gradient of nearly 0 may have another sign: few, and each is off by two rates.
    assert ((ends[0] - ends[1]).abs() > 1e-6).double().mean() < 1e-3
    assert ((ends[0] - start).abs() > 1e-4).double().mean() > 0.5


class Unknown(torch.optim.AdamW):
    """Nobody knows what this one does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnknownInner(tw.inner.InnerOptimizer):
    lr: float = 1e-3

    def build(self, model):
        return Unknown(model.parameters(), lr=self.lr, weight_decay=0.0)


def test_an_unknown_optimizer_steps_for_each_worker(tiny) -> None:
    config = tiny("diloco")
    config = dataclasses.replace(
        config, method=dataclasses.replace(config.method, inner=UnknownInner())
    )
    groups = [group_of(config, machine=m, dtype=torch.float64) for m in (THREADS, STACKED)]
    start = weights(groups[0])
    assert {type(stack.stepper) for stack in groups[1]._stacks} == {PerWorkerStep}
    for group in groups:
        advance(group, 5)
        group.close()
    ends = [weights(group) for group in groups]
    assert (ends[0] - ends[1]).norm() < 1e-4 * (ends[0] - start).norm()


def test_autocast_computes_in_bf16(tiny) -> None:
    half = dataclasses.replace(STACKED, precision="bf16")
    config = tiny()
    losses = {}
    for name, machine in (("fp32", STACKED), ("bf16", half)):
        made = dataclasses.replace(config, machine=machine)
        group = launch.assemble(made, made.data.load())
        losses[name] = torch.tensor(group.inner_step())
        group.close()
    assert not torch.equal(losses["fp32"], losses["bf16"])
    torch.testing.assert_close(losses["fp32"], losses["bf16"], rtol=2e-2, atol=0)


# -- checkpoints -----------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["ddp", "diloco", "muloco", "streaming_diloco:tau=2"])
def test_a_stopped_run_resumes_bit_for_bit(tiny, tmp_path, monkeypatch, method) -> None:
    config = tiny(method, machine=STACKED)
    whole = train(config, tmp_path / "whole")
    real = StackedWorkers.inner_step

    def stop(group):
        if group.step == 6:
            raise Stop
        return real(group)

    monkeypatch.setattr(StackedWorkers, "inner_step", stop)
    with pytest.raises(Stop):
        train(config, tmp_path / "stopped")
    monkeypatch.setattr(StackedWorkers, "inner_step", real)
    assert resume(config, tmp_path / "stopped")["outer_digest"] == whole["outer_digest"]


@pytest.mark.parametrize("method", ["diloco", "muloco"])
def test_a_checkpoint_is_that_of_workers_on_threads(tiny, method) -> None:
    """The same keys, shapes and sizes: none of the stack is in a worker's file."""
    states = []
    for machine in (THREADS, STACKED):
        group = group_of(tiny(method), machine=machine)
        advance(group, 4)
        states.append(group.capture(group.workers[1]))
        group.close()
    assert outline(states[0]) == outline(states[1])
    for tensor in tensors(states[1]):
        assert tensor.untyped_storage().nbytes() <= max(t.nbytes for t in tensors(states[0]))


def test_threads_go_on_from_a_stacked_checkpoint(tiny) -> None:
    stacked, threads = (
        group_of(tiny(), machine=m, dtype=torch.float64) for m in (STACKED, THREADS)
    )
    advance(stacked, 3)
    for mine, other in zip(stacked.workers, threads.workers, strict=True):
        threads.resume(other, copy.deepcopy(stacked.capture(mine)), workers=5)
    assert torch.equal(weights(stacked), weights(threads))
    losses = [torch.tensor(advance(group, 3)) for group in (stacked, threads)]
    stacked.close()
    threads.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


def test_a_group_goes_back_to_a_checkpoint_bit_for_bit(tiny) -> None:
    group = group_of(tiny("muloco"), machine=STACKED)
    advance(group, 3)
    kept = [copy.deepcopy(group.capture(worker)) for worker in group.workers]
    losses, end = advance(group, 3), weights(group)
    for worker, state in zip(group.workers, kept, strict=True):
        group.resume(worker, state, workers=5)
    assert not torch.equal(weights(group), end)
    assert advance(group, 3) == losses
    assert torch.equal(weights(group), end)
    group.close()


def outline(state):
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [outline(value) for value in state]
    return tuple(state.shape) if isinstance(state, torch.Tensor) else type(state).__name__


def tensors(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors(value)


# -- what cannot be stacked ------------------------------------------------------------------------


class Output:
    def __init__(self, logits):
        self.logits = logits


class Small(nn.Module):
    def __init__(self, middle: nn.Module):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(256, 4), middle, nn.Linear(4, 256)

    def forward(self, input_ids):
        return Output(self.head(self.middle(self.embed(input_ids))))


class OverRows(nn.Module):
    """Its first dimension is time, which may happen to be a multiple of the rows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x.transpose(0, 1)).transpose(0, 1)


class AcrossRows(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(256, 256))

    def forward(self, input_ids):
        return Output(self.table[input_ids])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Small(nn.Dropout(0.5)), "dropout"),
        (lambda: Small(OverRows()), "mixes the sequences"),
        (lambda: Small(AcrossRows()), "mixes the sequences"),
        (lambda: Small(Counting()), "buffer 'middle.calls'"),
        (lambda: Small(Norm()), "BatchNorm|running|in-place|inplace"),
        (Bare, "parameter 'table'"),
    ],
)
def test_a_model_that_cannot_be_stacked_is_refused_by_name(make, named) -> None:
    model = make()
    made = [copy.deepcopy(model) for _ in range(3)]  # workers start from the same weights
    # Time is a multiple of the 6 rows of the attempt.
    read = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigurationError, match=f"(?s)simulate the workers stacked.*({named})"):
        ModelStack(made, read)


def test_the_same_model_without_what_is_refused_is_taken() -> None:
    read = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(0))
    assert ModelStack([Small(nn.Identity()) for _ in range(3)], read).size == 3


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'model\.layers\.0\.mlp\.gate' returns tuple"):
        ModelStack(models(MIXTRAL), windows(1)[0])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here")
def test_a_group_that_is_bound_to_a_core_has_one_stack(tiny) -> None:
    """As a job of a comparison is: more stacks would only take turns."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        group = group_of(tiny(), machine=STACKED)
    finally:
        os.sched_setaffinity(0, mine)
    assert isinstance(group, StackedWorkers)
    assert len(group._stacks) == 1
    group.close()


def test_stacked_workers_are_not_compiled() -> None:
    with pytest.raises(ConfigurationError, match="compile"):
        Machine(simulation="stacked", compile=True)


def test_ranks_of_torchrun_are_not_stacked(tiny, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ConfigurationError, match="process of its own"):
        launch.resolve(tiny(machine=STACKED))


def test_a_diverging_worker_is_named(tiny, tmp_path) -> None:
    config = tiny(machine=STACKED)
    group = group_of(config, machine=STACKED)
    with torch.no_grad():
        next(iter(group.workers[3].model.parameters())).fill_(float("nan"))
    with pytest.raises(tw.NonFiniteError, match=r"worker 3.*gradient of model\."):
        group.inner_step()
    group.close()


def test_a_checkpoint_folder_is_no_larger(tiny, tmp_path) -> None:
    sizes = []
    for name, machine in (("a", THREADS), ("b", STACKED)):
        train(tiny(machine=machine), tmp_path / name)
        files = (tmp_path / name / "checkpoints").glob("*.pt")
        sizes.append(sum(file.stat().st_size for file in files))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
