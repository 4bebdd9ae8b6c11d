"""Cases of ranks of test_rendezvous.py and others: `python rendezvous_ranks.py CASE`.

torch.distributed's default group joins the ranks of one worker, as a trainer would have it.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from toy import adamw, build_model, descend, loss

WORKERS = int(os.environ.get("WORKERS", "1"))
WORKER = int(os.environ.get("WORKER", "0"))


# For each rendezvous of a case that has several; 0 where workers meet elsewhere.
PORTS = [int(port) for port in os.environ.get("PORTS", "").split()]
METHODS = {
    "diloco": tw.presets.diloco(sync_every=3),
    "2 bit, reduced": tw.presets.muloco(
        bits=2, sync_every=3, exchange=tw.ReduceScatter(owner_feedback=tw.ErrorFeedback())
    ),
    "sparse, streamed": tw.presets.sparse_muloco(
        sync_every=4, fragments=tw.Balanced(count=2), overlap=tw.Delay(tau=1)
    ),
    "pairs": tw.presets.noloco(sync_every=3),
}


def at(port: int) -> str:
    return f"tcp://127.0.0.1:{port}?workers={WORKERS}&worker={WORKER}"


def steps(
    model: nn.Module, rank: int, ranks: int, name: str = "diloco", ddp_group=None
) -> tw.OuterLoop:
    optimizer = adamw(model)
    outer = tw.OuterLoop(model, optimizer, METHODS[name], ddp_group=ddp_group)
    for step in range(9):
        block = ranks * WORKER + rank
        descend(loss(model, step, block, workers=ranks * WORKERS), optimizer)
        outer.step()
    return outer


def full(outer: tw.OuterLoop) -> list:
    values = outer.consensus().values()
    return [(v.full_tensor() if hasattr(v, "full_tensor") else v).tolist() for v in values]


def train() -> None:
    outer = steps(build_model(), 0, 1)
    print(json.dumps({"digest": outer.digest(), "weights": full(outer)}))


def train_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = build_model()
    fully_shard(model)
    outer = steps(model, dist.get_rank(), dist.get_world_size())
    print(json.dumps({"digest": outer.digest(), "weights": full(outer)}))


def train_ddp(*, divided: bool = True) -> None:
    """Every method with DDP inside; the digest of what one rank holds, and what it sent."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    group = dist.group.WORLD if divided else None
    ranks = dist.get_world_size()
    told = {}
    for name, port in zip(METHODS, PORTS, strict=False):
        if port:
            os.environ["THINWIRE_AT"] = at(port)
        model = DistributedDataParallel(build_model())
        outer = steps(model, dist.get_rank(), ranks, name, group)
        stats = outer.stats
        told[name] = {
            "digest": outer.digest(),
            "sent_bytes": stats.sent_bytes,
            "peak": stats.peak_sent_bytes_per_step,
            "requests": dict(stats.requests),
        }
    print(json.dumps(told))


def train_ddp_undivided() -> None:
    train_ddp(divided=False)


def differ() -> None:
    """FSDP shards are no replicas, and neither are models of two seeds."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    sharded, told = build_model(), []
    fully_shard(sharded)
    for model, port in zip((sharded, build_model(dist.get_rank())), PORTS, strict=False):
        os.environ["THINWIRE_AT"] = at(port)
        try:
            tw.OuterLoop(model, [], METHODS["diloco"], ddp_group=dist.group.WORLD)
        except tw.MismatchError as error:
            told.append(str(error))
    print(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
