"""Elastic workers that print JSON lines: `python elastic_worker.py MODULE.FUNCTION ARGUMENTS`."""

import datetime
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported after a process group exists, it would keep the group
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire as tw

# Loaded here, so that forked processes need not load them.
import thinwire.cli
import thinwire.elastic.session
import thinwire.elastic.worker_ranks
from thinwire.handshake import digest
from thinwire.transport.address import split_address
from thinwire.transport.base import Post, wrapped
from toy import adamw, build_model, loss


def tell(**what) -> None:
    sys.stdout.write(json.dumps({"at_s": time.time(), **what}) + "\n")
    sys.stdout.flush()


def build_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    stack = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(4)])
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), stack, torch.nn.Linear(6, 3))


def work(store: str, identity: str, options: dict) -> None:
    """One worker with a toy model, which ends with status 1 if the run has no place for it.

    Options: steps, every (H), method, exchange, step_s (how long an inner step takes), terms (of
    `ElasticOptions`), checkpoint (a file to write after every step and to start from), layers (a
    model with a stack of them), die (["step", n]: in the n-th among three workers; others:
    `halt_in`, the n-th exchange among `among` workers, three), stops_there (instead of dying),
    ranks (index, S and HOST:PORT: this is one rank of S that the model is sharded over and that
    meet there), sharding (fsdp, hsdp or tensor; the latter with layers) and snapshot_after (of
    `Elastic`).
    """
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        train(store, identity, options)
    except (tw.ThinwireError, RuntimeError) as error:
        # FSDP's collectives also fail when another rank is lost.
        if not isinstance(error, tw.ThinwireError) and "ranks" not in options:
            raise
        tell(error=str(error), kind=type(error).__name__)
        os._exit(1)
    # Threads that torch leaves running must not decide how this process ends.
    os._exit(0)


def train(store: str, identity: str, options: dict) -> None:
    kind, moment = options.get("die", ("never", 0))
    model = build_layers() if options.get("layers") else build_model()
    group = None
    if "ranks" in options:
        group = connect_ranks(*options["ranks"])
        tell(connected=options["ranks"])
        shard(model, options.get("sharding", "fsdp"))
    optimizer = adamw(model)
    known = {"run": "run", "identity": identity, "least_wait_s": 1.0, "group": group}
    known["options"] = tw.transport.ElasticOptions(**options.get("terms", {}))
    known["snapshot_after"] = options.get("snapshot_after", 1e9)
    elastic = tw.transport.Elastic(store, **known)
    elastic.events.listen(lambda event: tell(event=event.describe()))
    if kind in ("started", "owner", "landed"):
        number = signal.SIGSTOP if options.get("stops_there") else signal.SIGKILL
        halt = partial(os.kill, os.getpid(), number)
        halt_in(elastic, kind, moment, options.get("among", 3), halt)
    fields = {"sync_every": options.get("every", 4)}
    if options.get("exchange") == "reduce_scatter":
        fields["exchange"] = tw.exchange.ReduceScatter()
    method = tw.presets.from_text(options.get("method", "diloco"), **fields)
    outer = tw.OuterLoop(model, optimizer, method, transport=elastic)
    checkpoint = Path(options.get("checkpoint", "none"))
    if checkpoint.exists():
        outer.load_state_dict(torch.load(checkpoint, weights_only=True))
    outer.join()
    steps_together = 0
    while (step := outer.inner_step) < options.get("steps", 40) or not outer.flush():
        share = outer.share
        tell(step=step, share=share, workers=outer.workers, version=outer.stats.rounds)
        steps_together += outer.workers == 3
        if (kind, moment) == ("step", steps_together):
            os.kill(os.getpid(), signal.SIGKILL)
        loss(model, step, share % 5, workers=5).backward()
        time.sleep(options.get("step_s", 0.01))
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        save(outer, options)
    ends = {"version": outer.stats.rounds, "last_step": outer.inner_step}
    tell(digest=digest_of(outer), shard=outer.digest(), **ends)
    save(outer, options)
    outer.close()


def halt_in(elastic: Any, moment: str, number: int, among: int, halt: Callable[[], None]) -> None:
    """Halt in an exchange that has "started", has its shards ("owner"), or has "landed"."""
    run, exchanges, due = elastic.run, count(1), [moment]

    def faulty(posts, tag):
        if elastic.world_size != among or next(exchanges) != number:
            return run(posts, tag)

        def carry(post: Post):
            received = yield post
            reached("landed" if post.is_to_all(elastic.world_size) else "owner")
            return received

        under_way = run(wrapped(posts, carry), tag)
        reached("started")
        return under_way

    def reached(point: str) -> None:
        if point in due:
            due.clear()
            halt()

    elastic.run = faulty


def connect_ranks(index: int, size: int, meeting: str) -> Any:
    """The default process group, of the ranks of this worker."""
    minute = datetime.timedelta(seconds=60)
    host, port = split_address(meeting)
    store = dist.TCPStore(host, port, is_master=index == 0, timeout=minute)
    dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=minute)
    return dist.group.WORLD


def shard(model: torch.nn.Module, how: str) -> None:
    """Shard `model` over all ranks by FSDP2, HSDP or tensor parallelism."""
    ranks = dist.get_world_size()
    if how == "tensor":
        plans = [ColwiseParallel(), RowwiseParallel()]
        plan = {str(index): plans[index % 2] for index in range(len(model[1]))}
        parallelize_module(model[1], init_device_mesh("cpu", (ranks,)), plan)
        return
    shape, names = ((ranks, 1), ("replica", "shard")) if how == "hsdp" else ((ranks,), ("shard",))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def digest_of(outer: tw.OuterLoop) -> str:
    """Digest of all outer parameters, shards gathered."""
    if not dist.is_initialized():
        return outer.digest()
    values = outer.consensus().items()
    return digest({n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values})


def save(outer: tw.OuterLoop, options: dict) -> None:
    if "checkpoint" in options:
        unfinished = Path(options["checkpoint"] + ".partial")
        torch.save(outer.state_dict(), unfinished)
        unfinished.rename(options["checkpoint"])


if __name__ == "__main__":
    module, _, name = sys.argv[1].rpartition(".")
    getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
