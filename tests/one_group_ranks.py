"""Cases of ranks of test_one_group.py: `python one_group_ranks.py CASE`."""

import datetime
import os
import sys

import torch
import torch.distributed as dist

import thinwire as tw
from ranks import gather
from thinwire.transport import Distributed
from toy import Team, adamw, build_model, descend, loss

METHOD = tw.presets.diloco(sync_every=2, overlap=tw.Delay(tau=1))
LOOPS = 20
STEPS = 6


class InTheMiddleError(Exception):
    """An error of a user's script."""


def expected(loops: int, workers: int) -> list[str]:
    """Digests after two rounds of loops whose models have different seeds."""
    teams = [
        Team(METHOD, adamw, workers, model=lambda s=seed: build_model(s)) for seed in range(loops)
    ]
    return [team.train(STEPS).loops[0].digest() for team in teams]


class Loop:
    """An outer loop and what it trains."""

    def __init__(self, seed: int) -> None:
        self.model = build_model(seed)
        self.optimizer = adamw(self.model)
        self.outer = tw.OuterLoop(self.model, self.optimizer, METHOD, transport=Distributed())

    def begin(self, step: int) -> None:
        descend(
            loss(self.model, step, dist.get_rank(), workers=dist.get_world_size()), self.optimizer
        )
        self.outer.begin()

    def train(self, *, fails_at: int | None = None) -> str:
        for step in range(STEPS):
            self.begin(step)
            if step == fails_at:
                raise InTheMiddleError
            self.outer.finish()
        return self.outer.digest()


def one_after_another() -> None:
    """Closed, dropped, or failed with an exchange under way, whose errors are kept."""
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


def at_once() -> None:
    """No two ranks begin the exchanges of different loops in one order."""
    loops = [Loop(seed) for seed in range(LOOPS)]
    orders = [loops, loops[::-1], loops[14:] + loops[:14]]
    order = orders[dist.get_rank()]
    for step in range(STEPS):
        for loop in order:
            loop.begin(step)
        for loop in reversed(order):
            loop.outer.finish()
    for loop in loops:
        print(loop.outer.digest())


def exchanged(transport: Distributed, value: int) -> list[int]:
    return [int(received) for received in begun(transport, value).wait()]


def begun(transport: Distributed, value: int):
    return gather(transport, torch.tensor([value], dtype=torch.uint8))


def left_under_way() -> None:
    """Rank 1 sends what no other rank asks for, and later transports exchange as much."""
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    left = Distributed()
    exchanged(left, 100 + rank)
    if rank == 1:
        _pending = begun(left, 77)
    del left
    for number in range(LOOPS):
        transport = Distributed()
        for exchange in range(3):
            found = exchanged(transport, (number + exchange + rank) % 70)
            assert found == [(number + exchange + other) % 70 for other in everyone], found
    print("done", flush=True)
    dist.barrier()
    os._exit(0)


def closed() -> None:
    transport = Distributed()
    exchanged(transport, 1)
    transport.close()
    try:
        begun(transport, 1)
    except tw.ExchangeError as error:
        print(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    globals()[sys.argv[1]]()
    dist.barrier()  # some exchanges are under way, which a rank that ends would break
    dist.destroy_process_group()
