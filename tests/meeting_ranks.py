"""Cases of ranks of workers that meet at THINWIRE_AT: `python meeting_ranks.py CASE`.

Each method whose number is in METHODS meets at a port of PORTS, or in a run of its own.
torch.distributed's default group joins the ranks of one worker, as a trainer would have it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.address import Address
from toy import Team, adamw, build_model, descend, loss, sgd

WORKER, WORKERS = (int(os.environ.get(name, "0")) for name in ("WORKER", "WORKERS"))
PORTS = os.environ.get("PORTS", "").split()
STEPS = 10
REDUCED = tw.ReduceScatter(owner_feedback=tw.ErrorFeedback())
HALVES = {"sync_every": 4, "fragments": tw.Balanced(count=2), "overlap": tw.Delay(tau=1)}
METHODS = [
    tw.presets.diloco(sync_every=3),
    tw.presets.muloco(bits=2, sync_every=3),
    tw.presets.muloco(bits=2, sync_every=3, exchange=REDUCED),
    tw.presets.streaming_diloco(**HALVES),
    tw.presets.sparse_muloco(**HALVES),
    tw.presets.noloco(sync_every=3),
]
CHOSEN = [int(number) for number in os.environ.get("METHODS", "0 1 2 3 4 5").split()]


def in_one_process(workers: int) -> list[list[str]]:
    """The digests of every worker, by method."""
    return [Team(method, adamw, workers).train(STEPS).flush().digests() for method in METHODS]


def address_of(place: int) -> str:
    at = Address.read(os.environ["THINWIRE_AT"])
    if PORTS:
        return str(replace(at, place=f"127.0.0.1:{PORTS[place]}"))
    return str(replace(at, run=f"{at.run}-{place}"))


def trained(
    outer: tw.OuterLoop, model: nn.Module, optimizer: Any, first: int = 0, after=lambda step: None
) -> tw.OuterLoop:
    joined = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    for step in range(first, STEPS):
        block = ranks * WORKER + rank
        descend(loss(model, step, block, workers=ranks * WORKERS), optimizer)
        outer.step()
        after(step)
    outer.flush()
    return outer


def train(wrapped: Callable[[nn.Module], nn.Module] = lambda model: model, group=None) -> None:
    """Print the digests and counts of every method."""
    told = []
    for place, number in enumerate(CHOSEN):
        model = wrapped(build_model())
        optimizer = adamw(model)
        known = {"connect": address_of(place), "ddp_group": group}
        outer = trained(tw.OuterLoop(model, optimizer, METHODS[number], **known), model, optimizer)
        stats = outer.stats
        names = ("sent_bytes", "received_bytes", "peak_sent_bytes_per_step")
        told.append({"digest": outer.digest(), "requests": dict(stats.requests)})
        told[-1] |= {name: getattr(stats, name) for name in names}
        outer.transport.close()
    print(json.dumps(told))


def train_ddp(*, divided: bool = True) -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    train(DistributedDataParallel, dist.group.WORLD if divided else None)


def train_ddp_undivided() -> None:
    train_ddp(divided=False)


def differ() -> None:
    """Check that FSDP shards, and models of two seeds, are not accepted as replicas."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    told, models = [], (fully_shard(build_model()), build_model(dist.get_rank()))
    for place, model in enumerate(models):
        known = {"connect": address_of(place), "ddp_group": dist.group.WORLD}
        try:
            tw.OuterLoop(model, [], METHODS[0], **known)
        except tw.MismatchError as error:
            told.append(str(error))
    print(json.dumps(told))


def train_with_checkpoints() -> None:
    """Train until killed after step KILL_AT; resume from the file if it exists."""
    file, kill_at = os.environ["CHECKPOINT"], int(os.environ.get("KILL_AT", -1))
    model = build_model()
    optimizer = adamw(model)
    outer = tw.OuterLoop(model, optimizer, METHODS[CHOSEN[0]])
    parts, first = (model, optimizer, outer), 0
    if os.path.exists(file):
        first, *states = torch.load(file)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def after(step: int) -> None:
        if step == 3 and first == 0:
            torch.save([step + 1, *(part.state_dict() for part in parts)], file)
        if step == kill_at:
            time.sleep(0.5)  # messages in flight arrive, or not
            os.kill(os.getpid(), signal.SIGKILL)

    print(trained(outer, model, optimizer, first, after).digest())


def count_bytes() -> None:
    """Print bytes sent and received, then written and read: what we count, then what Linux does."""
    torch.manual_seed(0)
    model = nn.Linear(1031, 1019)
    optimizer = sgd(model)
    outer = tw.OuterLoop(model, optimizer, tw.presets.muloco(bits=1, sync_every=1))

    def counted() -> list[int]:
        with open("/proc/self/io") as file:
            read, written = (int(line.split()[1]) for line in file.readlines()[:2])
        return [outer.stats.sent_bytes, outer.stats.received_bytes, written, read]

    counts = []
    for _ in range(6):
        model.weight.grad, model.bias.grad = torch.randn(1019, 1031), torch.randn(1019)
        optimizer.step()
        outer.step()
        counts.append(counted())
    # Without the first round, in which modules are imported.
    print(json.dumps([last - first for first, last in zip(counts[0], counts[-1], strict=True)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
