"""A gloo process group that torch.distributed does not know of."""

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist


def gloo_group(
    store: Any, rank: int, world_size: int, *, host: str | None = None, timeout_s: float
) -> Any:
    """A process group over gloo, apart from the default one and from all that are made of it.

    Args:
        store: through which its ranks find each other; nothing else is in it.
        rank: of this process.
        world_size: the number of ranks.
        host: address of this machine on which it listens; None is that of torch's own groups.
        timeout_s: of its messages.

    Raises:
        RuntimeError: a rank is not there in time.

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


def listening_store(host: str, port: int, *, timeout_s: float) -> Any:
    """The server of a TCPStore that listens on `host` alone; torch's own listens everywhere.

    Args:
        host: an address of this machine.
        port: 0 takes a free one.
        timeout_s: of its requests.

    Raises:
        OSError: the address is not this machine's, or the port is taken.

    >>> listening_store("127.0.0.1", 0, timeout_s=5).port > 0
    True
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        found = listening.getsockname()[1]
        stores: Any = dist
        return stores.TCPStore(
            host,
            found,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )
