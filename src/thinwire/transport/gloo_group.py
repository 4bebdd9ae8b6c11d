"""A gloo process group outside torch.distributed's registry."""

import datetime
from typing import Any

import torch
import torch.distributed as dist


def gloo_group(
    store: Any, rank: int, world_size: int, *, host: str | None = None, timeout_s: float
) -> Any:
    """Connect a process group over gloo that is independent of the default one.

    Args:
        store: for the rendezvous of its ranks, with no other keys.
        rank: of this process.
        world_size: number of ranks.
        host: address of this machine to listen on; default that of torch's own groups.
        timeout_s: of its messages.

    Raises:
        RuntimeError: a rank does not connect in time.

    >>> gloo_group(dist.HashStore(), 0, 1, host="127.0.0.1", timeout_s=5).size()
    1
    """
    kinds: Any = dist
    timeout = datetime.timedelta(seconds=timeout_s)
    options = timeout
    if host is not None:
        options = kinds.ProcessGroupGloo._Options()
        options._devices = [kinds.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
    group = kinds.ProcessGroup(store, rank, world_size)
    group._set_default_backend(kinds.ProcessGroup.BackendType.GLOO)
    backend = kinds.ProcessGroupGloo(store, rank, world_size, options)
    group._register_backend(torch.device("cpu"), kinds.ProcessGroup.BackendType.GLOO, backend)
    return group
