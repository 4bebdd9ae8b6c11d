"""Cases of ranks of test_replicated.py: `python replicated_ranks.py CASE`.

Four ranks are two workers of two, except for the mistake of the case. Each prints its error and
the seconds until it.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import thinwire as tw
from thinwire.transport import Distributed
from toy import build_model

METHOD = tw.presets.diloco(sync_every=2)
TIMEOUT_S = 2


def group_with_me(*groups: tuple[int, ...]):
    """Make all `groups`, as every rank must; return the one with this rank."""
    mine = None
    for ranks in groups:
        made = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=TIMEOUT_S))
        mine = made if dist.get_rank() in ranks else mine
    return mine


def build(across, ddp_group) -> None:
    dist.barrier()
    started_s = time.perf_counter()
    try:
        tw.OuterLoop(build_model(), [], METHOD, transport=Distributed(across), ddp_group=ddp_group)
        print("built")
    except tw.ThinwireError as error:
        print(f"{type(error).__name__}: {error}")
    print(time.perf_counter() - started_s)


def across():
    return group_with_me((0, 2), (1, 3))


def inside():
    return group_with_me((0, 1), (2, 3))


def unless(group, others: bool):
    """None where `others` holds; every rank makes the group."""
    return None if others else group


# What joins the workers, and a worker's ranks.
CASES = {
    "right": lambda: (across(), inside()),
    "workers_group": lambda: (group := across(), group),
    "all_ranks": lambda: (across(), dist.group.WORLD),
    # The second worker passes what making the first one's group returned to it.
    "not_in_group": lambda: (across(), dist.new_group([0, 1])),
    "other_mesh": lambda: (across(), DeviceMesh("cpu", [0, 1])),
    # The second rank of each worker believes that its worker is the only one.
    "alone": lambda: (group_with_me((0, 2), (1,), (3,)), inside()),
    "one_worker_undivided": lambda: (across(), unless(inside(), dist.get_rank() > 1)),
    "first_ranks_only": lambda: (across(), unless(inside(), dist.get_rank() % 2 == 1)),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    build(*CASES[sys.argv[1]]())
    dist.barrier()
    dist.destroy_process_group()
