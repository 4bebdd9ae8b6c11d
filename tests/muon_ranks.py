"""Cases of ranks of test_muon.py: `python muon_ranks.py CASE` with torchrun's variables.

Each compares a sharded run with an unsharded twin in the same process, to the bit.
"""

import datetime
import itertools
import sys
import warnings
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # imported after a process group exists, it would keep the group forever
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from thinwire.errors import ConfigurationError
from thinwire.optim import Muon, muon, muon_groups, parameter_roles
from thinwire.optim.newton_schulz import orthogonalise
from thinwire.optim.roles import parameter_layouts

SETTINGS = {"lr": 0.05, "weight_decay": 0.3}
VARIANTS = [{"nesterov": False, "scale": "spectral"}, {"nesterov": True, "scale": "rms"}]
STEPS = 3


class Llama(nn.Module):
    """A feed-forward block and a norm, which two and four ranks share unevenly."""

    def __init__(self, inner: int, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.narrow = nn.Linear(width, 1)
        self.unused = nn.Linear(width, inner)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.norm(x)
        x = x + self.down(torch.tanh(self.gate(h)) * self.up(h)) + self.narrow(x)
        return self.head(x)


def built(inner: int = 7) -> Llama:
    torch.manual_seed(0)
    return Llama(inner)


def backward(model: nn.Module, seed: int) -> None:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()


def optimizer_of(model: nn.Module, **settings) -> Muon:
    return Muon(muon_groups(model, **SETTINGS), **settings)


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def check_against_twin(model: nn.Module, twin: nn.Module, **settings) -> None:
    """Step both on the sharded model's gradients, and compare weights and momenta to the bit."""
    assert parameter_roles(model) == parameter_roles(twin)
    assert parameter_layouts(model) == parameter_layouts(twin)
    optimizer, optimizer_of_twin = optimizer_of(model, **settings), optimizer_of(twin, **settings)
    pairs = zip(optimizer.param_groups, optimizer_of_twin.param_groups, strict=True)
    assert all(described(group) == described(other) for group, other in pairs)
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    pairs = list(zip(model.named_parameters(), twin.parameters(), strict=True))
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        for (_, p), q in pairs:
            q.grad = None if p.grad is None else whole(p.grad)
        optimizer.step()
        optimizer_of_twin.step()
    for (name, p), q in pairs:
        assert torch.equal(whole(p), q.detach()), name
        assert torch.equal(q.detach(), start[name]) is name.startswith("unused"), name
        for key, kept in optimizer_of_twin.state[q].items():
            sharded = isinstance(p, DTensor) and key != "step"
            assert isinstance(optimizer.state[p][key], DTensor) is sharded, name
            assert torch.equal(whole(optimizer.state[p][key]), kept), (name, key)


def described(group: dict) -> tuple:
    return group["rule"], group.get("layout"), [tuple(p.shape) for p in group["params"]]


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    model.norm.register_forward_pre_hook(lambda _, args: placed(args[0], mesh, [Shard(1)]))
    return parallelize_module(model, mesh, plan)


def fsdp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for settings in VARIANTS:
        check_against_twin(fully_shard(built(), mesh=mesh), built(), **settings)


def tp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for settings in VARIANTS:
        model = tensor_parallel(built(inner=8), mesh)
        assert isinstance(model.gate.weight, DTensor)
        assert not isinstance(model.narrow.weight, DTensor)
        check_against_twin(model, built(inner=8), **settings)
        # If ranks split the sequence, a norm's gradient is a sum that is still pending.
        assert model.norm.weight.grad.placements == (Partial(),)


def placed(full: Tensor, mesh: DeviceMesh, placements) -> DTensor:
    everywhere = [Replicate()] * mesh.ndim
    return DTensor.from_local(full.clone(), mesh, everywhere, run_check=False).redistribute(
        placements=placements
    )


SHAPES = {
    "kernel": [(5, 3, 2), (2, 3, 2), (5, 3, 2)],
    "experts": [(1, 3, 5), (3, 3, 5), (4, 5, 3), (4, 5, 3)],
    # Some have equal shards on one rank and different ones on others.
    "odd": [(5, 7), (4, 7), (1, 6), (7, 1), (1, 1), (0, 3), *[(5, 7)] * 4, (13, 11)],
    # Wide, because a tall matrix's update is transposed in memory; shards fill whole vectors.
    "even": [(16, 64)] * 5,
}
WHOLE, IN_OUT = ("odd", "out_in"), ("odd", "in_out")
KERNELS = [("kernel", "kernel"), ("kernel", "transposed_kernel")]
KINDS = [WHOLE, IN_OUT, *KERNELS, ("experts", "out_in"), ("experts", "in_out")]


def step_both(mesh: DeviceMesh, placements, kind: tuple[str, str], dtype, **settings):
    """Parameters and twins after a few steps, with momenta, and the twins' initial values."""
    generator = torch.Generator().manual_seed(1)
    shapes, layout = SHAPES[kind[0]], kind[1]
    # Small weights, so that rounding does not swallow an update.
    start = [torch.randn(shape, generator=generator).mul(0.01).to(dtype) for shape in shapes]
    ours = [nn.Parameter(placed(full, mesh, placements)) for full in start]
    twins = [nn.Parameter(full.clone()) for full in start]
    group = {"rule": "muon", "layout": layout, **SETTINGS}
    both = [Muon([{"params": params, **group}], **settings) for params in (ours, twins)]
    for _ in range(STEPS):
        for p, twin in zip(ours, twins, strict=True):
            twin.grad = torch.randn(twin.shape, generator=generator).to(dtype)
            p.grad = placed(twin.grad, mesh, placements)
        for optimizer in both:
            optimizer.step()
    for p, twin in zip(ours, twins, strict=True):
        momentum = whole(both[0].state[p]["momentum_buffer"])
        assert torch.equal(momentum, both[1].state[twin]["momentum_buffer"]), (placements, kind)
    return [(whole(p), q.detach(), w) for p, q, w in zip(ours, twins, start, strict=True)]


def check_placements(mesh: DeviceMesh, several) -> None:
    exact = [(kind, torch.float32) for kind in KINDS]
    exact += [(WHOLE, torch.float64), (("even", "out_in"), torch.bfloat16)]
    for placements, (kind, dtype) in itertools.product(several, exact):
        for p, twin, start in step_both(mesh, placements, kind, dtype, nesterov=True):
            assert torch.equal(p, twin), (placements, kind, dtype, twin.shape)
            assert not twin.numel() or not torch.equal(twin, start)
    for placements in several:
        # On the CPU, torch rounds a + alpha b in bf16 by where in memory an element lies.
        for p, twin, start in step_both(mesh, placements, WHOLE, torch.bfloat16):
            distance = (p.double() - twin.double()).norm()
            assert distance <= 0.01 * (twin.double() - start.double()).norm(), twin.shape


def placements_1d() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_placements(mesh, [[Shard(0)], [Shard(1)], [Replicate()]])


def shares() -> None:
    """Each rank solves its share of the matrices of one shape, here one at a time."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    params = [nn.Parameter(placed(torch.randn(5, 7), mesh, [Shard(0)])) for _ in range(6)]
    for p in params:
        p.grad = p.detach().clone()
    with (
        patch.object(muon, "BATCH_ELEMENTS", 35),
        patch.object(muon, "orthogonalise", side_effect=orthogonalise) as solve,
    ):
        Muon([{"params": params, "rule": "muon"}]).step()
    solved = [len(call.args[0]) for call in solve.call_args_list]
    assert solved == [1] * len(range(dist.get_rank(), 6, ranks)), solved


def placements_2d() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    several = itertools.permutations([Replicate(), Shard(0), Shard(1)], 2)
    strided = _StridedShard(0, split_factor=2)
    check_placements(mesh, [*several, (Shard(0), Shard(0)), (strided, Shard(0))])


def fsdp_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = fully_shard(tensor_parallel(built(inner=8), mesh["tensor"]), mesh=mesh["shard"])
    placements = model.gate.weight.placements
    assert isinstance(placements[0], _StridedShard), placements
    check_against_twin(model, built(inner=8))


def refusals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    summed = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    for rule in ("muon", "adamw"):
        with pytest.raises(ConfigurationError, match="holds a summand of its values"):
            Muon([{"params": [summed], "rule": rule}])
    local = torch.ones(1 + 2 * dist.get_rank(), 4)
    ragged = DTensor.from_local(local, mesh, [Shard(0)], shape=(4, 4), stride=(4, 1))
    with pytest.raises(ConfigurationError, match="by its placements"):
        Muon([{"params": [nn.Parameter(ragged)], "rule": "muon"}])
    model = fully_shard(built(), mesh=mesh)
    optimizer = optimizer_of(model)
    optimizer.step()  # fine without any gradient, and does nothing
    assert not optimizer.state
    backward(model, 0)
    if dist.get_rank() == 1:
        model.up.weight.grad = None
    with pytest.raises(ConfigurationError, match="others have none"):
        optimizer.step()


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for case in sys.argv[1].split(","):
        globals()[case]()
        print(case, flush=True)
    dist.destroy_process_group()
