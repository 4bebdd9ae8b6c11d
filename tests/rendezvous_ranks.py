"""What the ranks of test_rendezvous.py do: `python rendezvous_ranks.py CASE`.

torch.distributed's default group joins the ranks of one worker, as a trainer would have it.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from toy import adamw, build_model, loss

WORKERS = int(os.environ["THINWIRE_WORKERS"])
WORKER = int(os.environ["THINWIRE_WORKER"])


def steps(model: nn.Module, rank: int, ranks: int) -> tw.OuterLoop:
    optimizer = adamw(model)
    outer = tw.OuterLoop(model, optimizer, tw.presets.diloco(sync_every=3))
    for step in range(9):
        block = ranks * WORKER + rank
        loss(model, step, block, workers=ranks * WORKERS).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    return outer


def full(outer: tw.OuterLoop) -> list:
    values = outer.anchor().values()
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
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
