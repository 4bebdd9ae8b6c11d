"""What the ranks of test_transports.py do: `python ranks.py CASE` with torchrun's variables set."""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.testing import payload_of
from thinwire.transport import Distributed, Label
from toy import Team, adamw, build_model, largest_difference, loss

OUTER = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


def methods() -> list[tw.Method]:
    return [
        tw.presets.ddp(),
        tw.presets.diloco(sync_every=4, outer=OUTER),
        tw.presets.muloco(sync_every=3, bits=16, outer=OUTER),
    ]


def train_in_process(workers: int) -> list[str]:
    return [
        Team(method, method.inner.build, workers).train(9).loops[0].digest() for method in methods()
    ]


def train() -> None:
    for method in methods():
        print(train_one(method).digest())


def train_one(
    method: tw.Method, steps: int = 9, before_step=lambda step: None, group=None
) -> tw.OuterLoop:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = method.inner.build(model)
    outer = tw.OuterLoop(model, optimizer, method, transport=Distributed(group))
    for step in range(steps):
        before_step(step)
        loss(model, step, rank, workers=ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    return outer


def carry() -> None:
    transport = Distributed()
    label = Label(what="a test payload", round=1)
    pending = [transport.start(payload_of(transport.rank, n), label) for n in (1, 7, 100_003)]
    for n, p in zip((1, 7, 100_003), pending, strict=True):
        for rank, payload in enumerate(p.wait()):
            assert torch.equal(payload, payload_of(rank, n))
    cards = transport.introduce(b"x" * transport.rank)
    assert cards == {rank: b"x" * rank for rank in range(transport.world_size)}


def die() -> None:
    def maybe_die(step: int) -> None:
        if dist.get_rank() == 1 and step == 3:
            os._exit(9)

    report(lambda: train_one(tw.presets.diloco(sync_every=2, outer=OUTER), 9, maybe_die))


def silent() -> None:
    def maybe_sleep(step: int) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and step == 3:
            time.sleep(9)
            os._exit(0)

    # Only the exchanges are in a hurry: how long processes take to start is the machine's affair.
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    report(lambda: train_one(tw.presets.diloco(sync_every=2, outer=OUTER), 9, maybe_sleep, group))


def differ() -> None:
    report(lambda: train_one(tw.presets.diloco(sync_every=4 + dist.get_rank(), outer=OUTER)))


def report(work) -> None:
    started_s = time.perf_counter()
    try:
        work()
    except tw.ThinwireError as error:
        print(type(error).__name__, error, time.perf_counter() - started_s, flush=True)
        os._exit(1)


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup, int]:
    """Two workers of two ranks: my worker's ranks, my twins in the other worker, my worker."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    return mesh["shard"], mesh.get_group("worker"), mesh.get_local_rank("worker")


def train_group(model, inside, across, worker: int) -> tuple[tw.OuterLoop, tw.Method]:
    """Nine steps of DiLoCo of a worker of two ranks, each with its quarter of the batch."""
    optimizer = adamw(model)
    method = tw.presets.diloco(sync_every=3, outer=OUTER)
    outer = tw.OuterLoop(model, optimizer, method, transport=Distributed(across))
    for step in range(9):
        loss(model, step, 2 * worker + inside.get_local_rank(), workers=4).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        if step == 4:
            with outer.evaluating(), torch.no_grad():
                loss(model, step, 0)
    return outer, method


def ddp_groups() -> None:
    inside, across, worker = groups()
    model = DistributedDataParallel(build_model(), process_group=inside.get_group())
    print(train_group(model, inside, across, worker)[0].digest())


def fsdp_groups() -> None:
    """Distance to two unsharded workers on the same batches, and the digest of my shards."""
    inside, across, worker = groups()
    model = fully_shard(build_model(), mesh=inside)
    outer, method = train_group(model, inside, across, worker)
    full = [p.full_tensor().detach() for p in model.parameters()]
    unsharded = Team(method, adamw, 2).train(9).anchor()
    print(largest_difference(full, unsharded), outer.digest())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
