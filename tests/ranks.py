"""Cases of ranks of several tests: `python ranks.py CASE` with torchrun's variables set."""

import contextlib
import dataclasses
import datetime
import gc
import importlib
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import thinwire as tw
from thinwire.testing.transports import (
    check_worker,
    gathered,
    swapped,
)
from thinwire.transport import Distributed, Posts, RoundTag, Transport, distributed
from toy import Team, adamw, build_model, descend, loss
from transport_checks import check_background, reduced

OUTER = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
TAG = RoundTag(what="a test payload", round=3)
BYTES = torch.zeros(1, dtype=torch.uint8)
STEPS = 5
ROUNDS = 20
# Offset of tcpi_bytes_sent and tcpi_bytes_retrans, both u64, in Linux's struct tcp_info.
TCP_INFO_BYTES_SENT = 200


def methods() -> list[tw.Method]:
    """Every preset and every kind of codec, each with both exchanges."""
    presets, codecs = tw.presets, tw.codecs
    dense = {"sync_every": 2, "outer": OUTER}
    per_role = codecs.PerRole(default=codecs.Quantise(bits=2), vector=codecs.CastBF16())
    halves = tw.Balanced(count=2)
    stochastic = codecs.Quantise(bits=4, rounding=codecs.Stochastic(seed=3))
    feedback = tw.ErrorFeedback()
    kinds = [
        presets.ddp(),
        presets.diloco(**dense),
        presets.muloco(**dense),
        *(presets.muloco(bits=bits, **dense) for bits in (16, 8, 4, 2, 1)),
        presets.sparseloco(sync_every=2),
        presets.sparse_muloco(sync_every=2),
        presets.diloco(codec=codecs.E3M0(), feedback=feedback, **dense),
        presets.diloco(codec=codecs.RandomK(k=512), feedback=feedback, **dense),
        presets.diloco(codec=stochastic, **dense),
        presets.diloco(codec=per_role, feedback=feedback, **dense),
        presets.streaming_diloco(fragments=halves, **dense),
        presets.streaming_diloco(fragments=halves, overlap=tw.Eager(), **dense),
        presets.streaming_muloco(fragments=halves, feedback=feedback, **dense),
    ]
    exchanges = (tw.Gather(), tw.ReduceScatter(owner_feedback=feedback))
    return [dataclasses.replace(kind, exchange=e) for kind in kinds for e in exchanges]


def train_in_process(workers: int) -> list[str]:
    return [
        Team(method, method.inner.build, workers).train(STEPS).loops[0].digest()
        for method in methods()
    ]


def train() -> None:
    for method in methods():
        print(train_one(method, STEPS).digest())


def train_one(
    method: tw.Method, steps: int = 9, before_step=lambda step: None, group=None, model=None
) -> tw.OuterLoop:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model() if model is None else model
    optimizer = method.inner.build(model)
    outer = tw.OuterLoop(model, optimizer, method, transport=Distributed(group))
    for step in range(steps):
        before_step(step)
        descend(loss(model, step, rank, workers=ranks), optimizer)
        outer.step()
    return outer


def carry() -> None:
    """Exchange by messages, then by collectives; afterwards nothing keeps gloo's threads alive."""
    transports = [Distributed()]
    distributed._backend_name = lambda group: "none that messages are for"
    transports.append(Distributed())
    for transport in transports:
        check_worker(transport)
        check_background(transport)
        # Only here do all workers wait for everyone's card.
        assert set(transport.announce(b"", TAG)) == set(range(transport.world_size))
    for threads in (3, 2):
        torch.set_num_threads(threads)
        for transport in transports:
            assert threads_of_reduction(transport) == threads
    del transport
    transports.pop(0).close()
    gc.collect()  # the error of an exchange and its traceback hold each other
    dist.destroy_process_group()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in names if "gloo" in name], names


def gossip_methods() -> list[tw.Method]:
    """Gossip in 4 and 16 bits, with a round in flight, and in fragments."""
    codecs = tw.codecs
    four_bits = {"codec": codecs.Quantise(bits=4), "feedback": tw.ErrorFeedback()}
    halves = tw.Balanced(count=2)
    changes = [{}, four_bits, {"overlap": tw.Delay(tau=1, mixing=0.5), "fragments": halves}]
    return [tw.presets.noloco(sync_every=2, **fields) for fields in changes]


def gossip_in_process(workers: int) -> list[list[str]]:
    """Digests of every worker's own outer parameters, and of all workers', by method."""
    digests: list[list[str]] = [[] for _ in range(workers)]
    for method in gossip_methods():
        team = Team(method, method.inner.build, workers).train(STEPS)
        for loop in team.loops:
            loop.evaluating()
        for rank, loop in enumerate(team.loops):
            digests[rank] += [loop.digest(), tw.digest(loop.consensus())]
    return digests


def gossip() -> None:
    for method in gossip_methods():
        outer = train_one(method, STEPS)
        print(outer.digest(), tw.digest(outer.consensus()))


def gather(transport: Transport, payload: torch.Tensor):
    return transport.run(gathered(payload, transport.rank, transport.world_size), TAG)


def shards(ranks: int) -> list[torch.Tensor]:
    return [BYTES.clone() for _ in range(ranks)]


def sized(size: int) -> torch.Tensor:
    return BYTES.expand(size).contiguous()


def on_gpus() -> None:
    torch.cuda.set_device(dist.get_rank())
    transport = Distributed()
    check_worker(transport)
    check_background(transport)


def threads_of_reduction(transport: Distributed) -> int:
    seen = []

    def reduce(received):
        seen.append((torch.get_num_threads(), threading.current_thread()))
        return received[0]

    transport.run(reduced(shards(transport.world_size), transport.rank, reduce), TAG).wait()
    assert seen[0][1] is not threading.main_thread()
    return seen[0][0]


def first_of(received):
    return received[0]


DIFFERENT = {
    "sizes_of_gathers": lambda rank, size, ranks: gathered(sized(size), rank, ranks),
    "sizes_of_shards": lambda rank, size, ranks: reduced(
        [sized(size).clone() for _ in range(ranks)], rank, first_of
    ),
    "sizes_of_results": lambda rank, size, ranks: reduced(
        shards(ranks), rank, lambda received: sized(size)
    ),
    "sizes_of_swaps": lambda rank, size, ranks: swapped(sized(size), rank, 1 - rank),
    # Worker 1 gathers while the others reduce.
    "kinds": lambda rank, size, ranks: (
        gathered(BYTES, rank, ranks) if rank == 1 else reduced(shards(ranks), rank, first_of)
    ),
    # Worker 0 would swap with a worker that swaps with another.
    "peers": lambda rank, size, ranks: swapped(BYTES, rank, [1, 2, 1][rank]),
}


def fails_in_reduce(rank: int, size: int, ranks: int) -> Posts[list[torch.Tensor]]:
    """Worker 0 cannot use what it gets, so the others wait for its result in vain."""

    def reduce(received):
        if rank == 0:
            raise tw.MismatchError("use it", because="it is odd", do="send even ones")
        return received[0]

    return reduced(shards(ranks), rank, reduce)


def mistakes() -> None:
    """Every case on a group of its own, all of them at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kinds = DIFFERENT | {"fails_in_reduce": fails_in_reduce}
    for_others = {2: ("sizes_of_results", "kinds", "peers"), 3: ("sizes_of_swaps",)}[ranks]
    cases = [case for case in kinds if case not in for_others]
    transports = [hasty() for _ in cases]
    dist.barrier()
    started_s, waits = time.perf_counter(), []
    for case, transport in zip(cases, transports, strict=True):
        posts = kinds[case](rank, 70 if rank == 1 else 100, ranks)
        waits.append(transport.run(posts, TAG).wait)
    for case, wait in zip(cases, waits, strict=True):
        told = "none"
        try:
            wait()
        except tw.ThinwireError as error:
            told = f"{type(error).__name__} {error} {time.perf_counter() - started_s}"
        print(case, told.replace("\n", " "))
    dist.barrier()


def leave() -> None:
    """All but the last leave with exchanges in flight."""
    transport = Distributed()
    gather(transport, BYTES).wait()
    if transport.rank == transport.world_size - 1:
        dist.barrier()
        time.sleep(60)
    reducing = reduced(shards(transport.world_size), transport.rank, first_of)
    _pending = [gather(transport, BYTES), transport.run(reducing, TAG), gather(transport, BYTES)]
    dist.barrier()
    time.sleep(1)  # nobody may still be starting when the first rank leaves
    print("leaving", flush=True)
    raise SystemExit(7)


def child_exits() -> None:
    """Rank 0 forks children that exit during an exchange, which must finish."""
    transport = Distributed()
    gather(transport, BYTES).wait()
    for _ in range(5):
        if transport.rank == 0:
            pending = gather(transport, BYTES + 1)
            time.sleep(0.1)  # the thread that carries it waits for the others by now
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        if transport.rank:
            pending = gather(transport, BYTES + 1)
        assert [int(payload) for payload in pending.wait()] == [1] * transport.world_size
    dist.barrier()
    print("done")


def hasty() -> Distributed:
    """A transport with a timeout of two seconds, once all ranks are up."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    transport = Distributed(group)
    transport.announce(b"", TAG)
    dist.barrier()
    return transport


def count_wire() -> None:
    """Print the bytes of `ROUNDS` rounds as counted by the kernel and by the outer loop."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 64), nn.Linear(64, 512), nn.Linear(512, 3))
    method = tw.presets.muloco(bits=2, sync_every=1, exchange=tw.Gather())
    before = list[int]()

    def note(step: int) -> None:
        if step == 0:
            before.append(kernel_sent_bytes())

    outer = train_one(method, ROUNDS, note, model=model)
    stats, total_bytes = outer.stats, kernel_sent_bytes() - before[0]
    dist.barrier()  # gloo closes connections to an ended rank, and their counts are gone
    print(total_bytes, stats.sent_bytes, stats.rounds, stats.peak_sent_bytes_per_step)


def kernel_sent_bytes() -> int:
    """Payload bytes that the kernel sent over my TCP connections, without retransmissions."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            sent, again = struct.unpack_from("=QQ", info, TCP_INFO_BYTES_SENT)
            total += sent - again  # a busy machine retransmits packets that are merely late
    return total


def silent() -> None:
    """The last rank waits for a key that nobody sets, until the first rank ends with the store."""

    def maybe_wait(step: int) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and step == 3:
            with contextlib.suppress(dist.DistError):
                dist.distributed_c10d._get_default_store().wait(["no such key"])
            os._exit(0)

    # A short timeout for exchanges only, because processes may take long to start.
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    report(lambda: train_one(tw.presets.diloco(sync_every=2, outer=OUTER), 9, maybe_wait, group))


def report(work) -> None:
    started_s = time.perf_counter()
    try:
        work()
    except tw.ThinwireError as error:
        print(type(error).__name__, error, time.perf_counter() - started_s, flush=True)
        os._exit(1)


def averaged_by_ddp() -> None:
    """A trainer's wrapper averages over the ranks that are workers."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build_model())
    report(lambda: train_one(tw.presets.diloco(sync_every=2, outer=OUTER), 4, model=model))


# -- many loops on one group -----------------------------------------------------------------------

DELAYED = tw.presets.diloco(sync_every=2, overlap=tw.Delay(tau=1))
LOOPS, LOOP_STEPS = 20, 6


class InTheMiddleError(Exception):
    """An error of a user's script."""


def expected(loops: int, workers: int) -> list[str]:
    """Digests after two rounds of loops whose models have different seeds."""
    teams = [
        Team(DELAYED, adamw, workers, model=lambda s=seed: build_model(s)) for seed in range(loops)
    ]
    return [team.train(LOOP_STEPS).loops[0].digest() for team in teams]


class Loop:
    """An outer loop and what it trains."""

    def __init__(self, seed: int) -> None:
        self.model = build_model(seed)
        self.optimizer = adamw(self.model)
        self.outer = tw.OuterLoop(self.model, self.optimizer, DELAYED, transport=Distributed())

    def begin(self, step: int) -> None:
        descend(
            loss(self.model, step, dist.get_rank(), workers=dist.get_world_size()), self.optimizer
        )
        self.outer.begin()

    def train(self, *, fails_at: int | None = None) -> str:
        for step in range(LOOP_STEPS):
            self.begin(step)
            if step == fails_at:
                raise InTheMiddleError
            self.outer.finish()
        return self.outer.digest()


def one_after_another() -> None:
    """Loops that are closed, dropped, or fail with an exchange in flight, whose errors are kept."""
    errors = []
    for seed in range(LOOPS):
        if seed % 4 == 3:
            try:
                Loop(seed).train(fails_at=3)
            except InTheMiddleError as error:
                errors.append(error)
        loop = Loop(seed)
        print(loop.train())
        if seed % 2:
            loop.outer.close()
    dist.barrier()  # an ending rank would break exchanges that are still in flight


def at_once() -> None:
    """No two ranks begin the exchanges of different loops in the same order."""
    loops = [Loop(seed) for seed in range(LOOPS)]
    orders = [loops, loops[::-1], loops[14:] + loops[:14]]
    order = orders[dist.get_rank()]
    for step in range(LOOP_STEPS):
        for loop in order:
            loop.begin(step)
        for loop in reversed(order):
            loop.outer.finish()
    for loop in loops:
        print(loop.outer.digest())
    dist.barrier()


def die() -> None:
    def maybe_die(step: int) -> None:
        if dist.get_rank() == 1 and step == 3:
            os._exit(9)

    report(lambda: train_one(tw.presets.diloco(sync_every=2, outer=OUTER), 9, maybe_die))


def left_under_way() -> None:
    """Rank 1 sends messages that no rank receives, and later transports exchange as many."""
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    left = Distributed()
    gather(left, BYTES + 100).wait()
    if rank == 1:
        _pending = gather(left, BYTES + 77)
    dist.barrier()  # rank 1 has sent it before rank 0 closes the connection
    del left
    for number in range(LOOPS):
        transport = Distributed()
        for exchange in range(3):
            found = gather(transport, BYTES + (number + exchange + rank) % 70).wait()
            wanted = [(number + exchange + other) % 70 for other in everyone]
            assert [int(payload) for payload in found] == wanted
    dist.barrier()
    os._exit(0)


# -- ddp_group=: two workers of two ranks, except for the mistake of a case ------------------------

TIMEOUT_S = 2


def group_with_me(*groups: tuple[int, ...]):
    """Make all `groups`, as every rank must; return the one with this rank."""
    mine = None
    for ranks in groups:
        made = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=TIMEOUT_S))
        mine = made if dist.get_rank() in ranks else mine
    return mine


def ddp_group() -> None:
    method = tw.presets.diloco(sync_every=2)
    for case, groups in GROUPS[sys.argv[1]].items():
        across, ddp_group = groups()
        dist.barrier()
        started_s, told = time.perf_counter(), "built"
        try:
            transport = Distributed(across)
            tw.OuterLoop(build_model(), [], method, transport=transport, ddp_group=ddp_group)
        except tw.ThinwireError as error:
            told = f"{type(error).__name__}: {error}"
        print(case, told.replace("\n", " "), time.perf_counter() - started_s)
        dist.barrier()


def across():
    return group_with_me((0, 2), (1, 3))


def inside():
    return group_with_me((0, 1), (2, 3))


def unless(group, others: bool):
    """`group`, or None if `others` holds; every rank makes the group."""
    return None if others else group


# The group that joins the workers, and the one that joins a worker's ranks.
GROUPS = {
    "ddp_group": {
        "right": lambda: (across(), inside()),
        "workers_group": lambda: (group := across(), group),
        "all_ranks": lambda: (across(), dist.group.WORLD),
        # The second rank of each worker believes that its worker is the only one.
        "alone": lambda: (group_with_me((0, 2), (1,), (3,)), inside()),
        "one_worker_undivided": lambda: (across(), unless(inside(), dist.get_rank() > 1)),
    },
    "ddp_group_in_vain": {  # some wait for a timeout
        # The second worker passes the result of making the first worker's group.
        "not_in_group": lambda: (across(), dist.new_group([0, 1])),
        "other_mesh": lambda: (across(), DeviceMesh("cpu", [0, 1])),
        "first_ranks_only": lambda: (across(), unless(inside(), dist.get_rank() % 2 == 1)),
    },
}
ddp_group_in_vain = ddp_group


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "carry":
        # Imported after the group exists, it would keep the group alive until the end.
        importlib.import_module("torch._dynamo")
    backend = "nccl" if sys.argv[1] == "on_gpus" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
