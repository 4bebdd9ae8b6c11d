"""Cases of ranks of test_sharding.py: `python sharded_ranks.py CASE` with torchrun's variables.

Four ranks are two workers of two ranks; a twin of two unsharded workers trains in every process.
"""

import datetime
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo  # imported after a process group exists, it would keep the group
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import thinwire as tw
from thinwire.blocks import LazyVector
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.sharding import by_holders
from thinwire.transport import Distributed, RoundTag
from toy import Team, descend, largest_difference, same_bits

OUTER = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
H, STEPS = 3, 10
HALVES = (slice(0, 4), slice(4, 8))  # halves of a batch, one for each rank of a worker
WIDTH, INNER = 66, 35  # two ranks cannot share 35 rows evenly
ADAMW, MUON = tw.inner.AdamW(lr=0.02), tw.inner.Muon(lr=0.02, weight_decay=0.1)


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embed = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(Block(inner) for _ in range(3))
            self.narrow = nn.Linear(WIDTH, 1)  # a single row: one of two ranks has none
            self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.narrow(x)


def batch(step: int, worker: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    tokens = torch.randint(11, (8, 5), generator=generator)
    return tokens[part], torch.randn(8, 5, 11, generator=generator)[part]


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return (model(tokens) - targets).square().mean()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))


def fsdp(inside: DeviceMesh) -> nn.Module:
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=inside)
    return fully_shard(model, mesh=inside)


def streaming(inner, **fields) -> tw.Method:
    return tw.presets.streaming_diloco(
        **{"inner": inner, "sync_every": H, "outer": OUTER, "layers": 2} | fields
    )


class Group:
    """One rank of a sharded worker. Both ranks of a worker read its whole batch, or half each."""

    def __init__(self, method: tw.Method, model: nn.Module, both: DeviceMesh, **options) -> None:
        self.both, self.worker = both, both.get_local_rank("worker")
        self.model, self.optimizer = model, method.inner.build(model)
        transport = Distributed(both["worker"])
        self.outer = tw.OuterLoop(model, self.optimizer, method, transport=transport, **options)

    def train(self, steps: int, *, halves: bool, first: int = 0, after=lambda: None) -> "Group":
        rank = self.both.get_local_rank("shard")
        part = HALVES[rank] if halves else slice(None)
        for step in range(first, first + steps):
            descend(loss(self.model, *batch(step, self.worker, part)), self.optimizer)
            self.outer.step()
            after()
        return self

    def full(self) -> list[Tensor]:
        values = self.outer.consensus().values()
        return [v.full_tensor() if isinstance(v, DTensor) else v for v in values]


def twin(method: tw.Method, steps: int, parts: Sequence[slice] = (slice(None),)) -> Team:
    """Two unsharded workers; a step's gradient is the mean of those of the batch's parts."""
    team = Team(method, method.inner.build, 2, model=Net)
    for step in range(steps):
        for worker, (model, optimizer) in enumerate(zip(team.models, team.optimizers, strict=True)):
            for part in parts:
                (loss(model, *batch(step, worker, part)) / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
        team.exchange()
    return team


def same_on(group: dist.ProcessGroup, text: str) -> bool:
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return len(set(texts)) == 1


def outer_parameters() -> None:
    """The same bits as two unsharded workers, even if each rank reads half of its worker's batch.

    Gradients of halves, added up, differ from those of the whole batch in their last bits. In 10
    steps that moves the anchor of two unsharded workers by up to 9e-5 with AdamW, and by 6e-3 with
    Muon, whose Newton-Schulz raises last bits by up to 493. So the twin of halves also averages
    them: (a + b) / 2 has the same bits whether FSDP's reduction or a single process adds.
    """
    both = mesh()
    exact = {"codec": tw.codecs.Identity()}
    for inner in (ADAMW, MUON):
        methods = [
            tw.presets.diloco(inner=inner, sync_every=H, outer=OUTER),
            streaming(inner, **exact),
            streaming(inner, overlap=tw.Eager(), **exact),
        ]
        for method in methods:
            whole = twin(method, STEPS).anchor()
            alike = Group(method, fsdp(both["shard"]), both).train(STEPS, halves=False)
            assert same_bits(alike.full(), whole), method
            halves = Group(method, fsdp(both["shard"]), both).train(STEPS, halves=True)
            assert same_bits(halves.full(), twin(method, STEPS, HALVES).anchor()), method
            # Controls: another order of the sum shows, and so does one half in place of both.
            assert 0 < largest_difference(halves.full(), whole) < 0.01
            assert largest_difference(halves.full(), twin(method, STEPS, HALVES[:1]).anchor()) > 0.1


def codecs() -> None:
    """On every shard, sent plus residual is what was moved; all workers agree."""
    both = mesh()
    keep = tw.ErrorFeedback(decay=1.0)
    codecs = (tw.codecs.TopK(k=256), tw.codecs.Quantise(bits=2), tw.codecs.E3M0())
    for inner, codec in zip((ADAMW, MUON, ADAMW), codecs, strict=True):
        method = streaming(inner, codec=codec, feedback=keep)
        group = Group(method, fsdp(both["shard"]), both)
        books = [Book(fragment) for fragment in group.outer._state.fragments]

        def check(group=group, books=books) -> None:
            assert same_on(both.get_group("worker"), group.outer.digest())
            for book in books:
                book.check()

        group.train(STEPS, halves=True, after=check)
        assert sum(book.rounds for book in books) >= 5


class Book:
    """Sums of what one fragment moved and sent."""

    def __init__(self, fragment) -> None:
        self.exchange, self.rounds = fragment.exchange, 0
        self.moved = self.sent = torch.zeros(fragment.outer.flat_anchor().numel())
        encode = self.exchange.encode

        def spied(delta: LazyVector, tag: RoundTag):
            self.moved = self.moved + delta.whole()
            messages = encode(delta, tag)
            codec, body = self.exchange._codecs[0], messages["whole"][HEADER_NBYTES:]
            self.sent = self.sent + codec.decode(body, round=tag.round)
            self.rounds += 1
            return messages

        self.exchange.encode = spied

    def check(self) -> None:
        residual = self.exchange.state_dict()["residual"]
        # A round rounds three sums of numbers below 4 once: 6 ulp of 2^-22 in four rounds each.
        torch.testing.assert_close(self.sent + residual, self.moved, rtol=0, atol=24 * 2**-22)


def replicated() -> None:
    """Replicated parameters stay equal on a worker's ranks, next to lossy shards."""
    both = mesh()
    for exchange in (tw.Gather(), tw.ReduceScatter(owner_feedback=tw.ErrorFeedback())):
        fields = {"codec": tw.codecs.TopK(k=256), "feedback": tw.ErrorFeedback()}
        method = streaming(ADAMW, exchange=exchange, **fields)
        model = Net(inner=36)
        for layer in model.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, both["shard"], plan)
        group = Group(method, model, both).train(STEPS, halves=False)
        assert same_on(both.get_group("worker"), group.outer.digest())
        held = {n: p.detach() for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert len(held) == 11
        assert same_on(both.get_group("shard"), tw.digest(held))
        assert not same_on(both.get_group("shard"), group.outer.digest())
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    mixed = {
        "plain": torch.ones(4),
        "cut": distribute_tensor(torch.ones(4), grid["shard"], [Shard(0)]),
        "copied": distribute_tensor(torch.ones(4), grid["shard"], [Replicate()]),
        "cut and copied": distribute_tensor(torch.ones(4), grid, [Replicate(), Shard(0)]),
        "cut again": distribute_tensor(torch.ones(8), grid["shard"], [Shard(0)]),
    }
    groups = [["plain"], ["cut", "cut again"], ["copied"], ["cut and copied"]]
    assert by_holders(mixed, mixed) == groups


def hybrid() -> None:
    """HSDP: both ranks of a worker hold all of it and average their gradients (g + g) / 2 = g."""
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("worker", "copy", "shard"))
    method = streaming(MUON, feedback=tw.ErrorFeedback())
    group = Group(method, fsdp(cube["copy", "shard"]), cube).train(STEPS, halves=False)
    assert same_bits(group.full(), twin(method, STEPS).anchor())
    assert same_on(dist.group.WORLD, group.outer.digest())
    # A single sharding, so no fragment is split.
    assert len(group.outer._state.fragments) == 3


def host_memory() -> None:
    both = mesh()
    method = streaming(MUON, codec=tw.codecs.Quantise(bits=4), feedback=tw.ErrorFeedback())
    here, there = (
        Group(method, fsdp(both["shard"]), both, outer_device=device).train(STEPS, halves=True)
        for device in (None, "cpu")
    )
    assert here.outer.digest() == there.outer.digest()
    assert there.outer.stats.peak_outer_device_bytes < here.outer.stats.peak_outer_device_bytes / 2


def checkpoints() -> None:
    """With torch.distributed.checkpoint, every rank's outer state has a key of its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    both = mesh()
    method = streaming(MUON, feedback=tw.ErrorFeedback(), overlap=tw.Delay(tau=2, mixing=0.5))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    # Workers' weights differ within a round, so every worker has a checkpoint of its own.
    group = Group(method, fsdp(both["shard"]), both).train(4, halves=True)
    mine = f"{folder[0]}/worker{group.worker}"
    key = f"outer.rank{both.get_local_rank('shard')}"
    inside = both.get_group("shard")

    def state(group: Group) -> dict:
        model, optimizer = get_state_dict(group.model, group.optimizer)
        return {"model": model, "optimizer": optimizer, key: group.outer.state_dict()}

    dcp.save(state(group), checkpoint_id=mine, process_group=inside)
    group.train(STEPS - 4, first=4, halves=True)
    again = Group(method, fsdp(both["shard"]), both)
    saved = state(again)
    dcp.load(saved, checkpoint_id=mine, process_group=inside)
    set_state_dict(
        again.model,
        again.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    again.outer.load_state_dict(saved[key])
    again.train(STEPS - 4, first=4, halves=True)
    assert again.outer.digest() == group.outer.digest()


def refused() -> None:
    both = mesh()
    method = tw.presets.diloco(sync_every=H, outer=OUTER)
    rank, inside = both.get_local_rank("worker"), both["shard"]
    square = nn.Linear(4, 4, bias=False)
    square.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), inside, [Shard(rank)]))
    with pytest.raises(tw.MismatchError, match=r"sharding\.weight.*dim=0.*dim=1"):
        tw.OuterLoop(square, [], method, transport=Distributed(both["worker"].get_group()))
    summand = DTensor.from_local(torch.ones(4, 4), inside, [Partial()])
    square.weight = nn.Parameter(summand)
    with pytest.raises(tw.ConfigurationError, match=r"'weight'.*Partial"):
        tw.OuterLoop(square, [], method, transport=Distributed(both["worker"].get_group()))
    # Also data parallel over the workers, whose gradients are then already averaged.
    model = fully_shard(Net(), mesh=both)
    with pytest.raises(tw.MismatchError, match="sharding"):
        tw.OuterLoop(model, [], method, transport=Distributed(both["worker"].get_group()))


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        for case in sys.argv[1].split(","):
            globals()[case]()
            print(case, "done", flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        # Peers may be in a collective that this rank will never join.
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
