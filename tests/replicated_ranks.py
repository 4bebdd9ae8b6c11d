"""What the ranks of test_replicated.py do: `python replicated_ranks.py CASE`.

Four ranks, which are two workers of two, but for what the case does wrong. Each says what it is
told, and how long that took.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.transport import Distributed
from toy import build_model

METHOD = tw.presets.diloco(sync_every=2)
TIMEOUT_S = 2


def group_with_me(*groups: tuple[int, ...]):
    """Of `groups`, which every rank makes, that which this rank is in."""
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
        said = "built"
    except tw.ThinwireError as error:
        said = f"{type(error).__name__}: {error}"
    print(said)
    print(time.perf_counter() - started_s)


def right() -> None:
    build(group_with_me((0, 2), (1, 3)), group_with_me((0, 1), (2, 3)))


def workers_group() -> None:
    across = group_with_me((0, 2), (1, 3))
    build(across, across)


def all_ranks() -> None:
    build(group_with_me((0, 2), (1, 3)), dist.group.WORLD)


def crossed() -> None:
    build(group_with_me((0, 3), (1, 2)), group_with_me((0, 1), (2, 3)))


def not_in_group() -> None:
    """The second worker passes what making the first one's group returned to it."""
    build(group_with_me((0, 2), (1, 3)), dist.new_group([0, 1]))


def other_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    build(group_with_me((0, 2), (1, 3)), DeviceMesh("cpu", [0, 1]))


def mesh_of_two_dimensions() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "replica"))
    build(mesh["worker"], mesh)


def alone() -> None:
    """The second rank of each worker believes that its worker is the only one."""
    build(group_with_me((0, 2), (1,), (3,)), group_with_me((0, 1), (2, 3)))


def one_worker_undivided() -> None:
    inside = group_with_me((0, 1), (2, 3))
    build(group_with_me((0, 2), (1, 3)), inside if dist.get_rank() < 2 else None)


def first_ranks_only() -> None:
    inside = group_with_me((0, 1), (2, 3))
    build(group_with_me((0, 2), (1, 3)), None if dist.get_rank() % 2 else inside)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    globals()[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
