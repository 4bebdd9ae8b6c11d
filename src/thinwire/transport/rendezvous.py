"""Workers that meet at an address, outside torchrun's process group."""

import datetime
import os
import socket
import time
from functools import partial
from typing import Any

import torch.distributed as dist

from thinwire.errors import ConfigurationError, ExchangeTimeout, MismatchError, check
from thinwire.transport.address import local_address, split_address
from thinwire.transport.base import WrappedTransport
from thinwire.transport.distributed import Distributed, naming_failures, reason_of
from thinwire.transport.gloo import gloo_group
from thinwire.transport.in_process import in_process

_POLL_S = 0.02
_GONE = "worker 0, at whose address they meet, or another one is gone"


class Rendezvous(WrappedTransport):
    """K workers over gloo, outside torch.distributed's default process group.

    That group belongs to the trainer: a worker is one process, or the ranks that torchrun started
    on a node (DDP, FSDP2, tensor parallelism). Each rank of a worker exchanges with the same rank
    of the others. The first rank of worker 0 listens at the address. All ranks of all workers call
    this, in any order.

    Args:
        address: HOST:PORT of worker 0's first rank; HOST must be an address of its machine.
        worker: this worker's number, from 0.
        workers: K, the same everywhere.
        rank: this process's rank in its worker; default the rank in the default process group, or
            torchrun's, or 0.
        ranks: number of ranks of this worker, with defaults from the same places.
        host: address of this machine for the other workers; default the source address of packets
            to `address`.
        timeout_s: how long to wait for all workers to come, and for each message.

    Raises:
        ConfigurationError: a number is out of range, or the address is not worker 0's.
        MismatchError: another worker has this one's number, another K or another number of ranks.
        ExchangeTimeout: a worker is missing; the message names it.

    >>> Rendezvous("127.0.0.1:29400", worker=0, workers=1).world_size
    1
    """

    def __init__(
        self,
        address: str,
        *,
        worker: int,
        workers: int,
        rank: int | None = None,
        ranks: int | None = None,
        host: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        check(
            0 <= worker < workers,
            f"be worker {worker} of {workers}",
            because="workers are numbered from 0",
            do=f"pass a worker from 0 to {max(0, workers - 1)} and the number of all workers",
        )
        super().__init__(in_process(1)[0])
        meeting_host, port = split_address(address)
        if workers == 1:
            return
        is_joined = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if is_joined else int(os.environ.get("RANK", "0"))
        if ranks is None:
            ranks = dist.get_world_size() if is_joined else int(os.environ.get("WORLD_SIZE", "1"))
        until_s = time.monotonic() + timeout_s
        store = _open_store(meeting_host, port, serves=worker == rank == 0, until_s=until_s)
        self._store = store  # worker 0's store serves the others
        with naming_failures("anything before all have met", hint=_GONE):
            _check_in(store, (worker, rank), workers, ranks, until_s=until_s)
            stores: Any = dist
            own = stores.PrefixStore(f"rank{rank}", store)
            host = local_address(meeting_host) if host is None else host
            group = gloo_group(own, worker, workers, host=host, timeout_s=timeout_s)
        self._inner = Distributed(group)


def _open_store(host: str, port: int, *, serves: bool, until_s: float) -> Any:
    left_s = max(1.0, until_s - time.monotonic())
    stores: Any = dist
    connect = partial(stores.TCPStore, host, port, timeout=datetime.timedelta(seconds=left_s))
    try:
        if not serves:
            _wait_for(host, port, until_s)
            return connect(is_master=False)
        # torch's own server would listen on all addresses.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listening:
            listen_fd = listening.detach()
            return connect(is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    except OSError as error:
        raise ConfigurationError(
            f"listen at {host}:{port} as worker 0",
            because=f"{error.strerror or error}",
            do="pass an address of this machine and a free port, or give this machine another "
            "worker number",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ExchangeTimeout(
            f"reach worker 0 at {host}:{port} within {left_s:.0f} s",
            because=reason_of(error),
            do="start it, and see that this machine reaches that port",
        ) from error


def _wait_for(host: str, port: int, until_s: float) -> None:
    """Wait until something listens there; torch would wait twice as long and print a stack."""
    while True:
        left_s = max(_POLL_S, until_s - time.monotonic())
        try:
            return socket.create_connection((host, port), timeout=left_s).close()
        except OSError as error:
            if time.monotonic() + _POLL_S > until_s:
                raise RuntimeError(f"{error.strerror or error}") from error
            time.sleep(_POLL_S)


def _check_in(
    store: Any, place: tuple[int, int], workers: int, ranks: int, *, until_s: float
) -> None:
    """Register this process in the store, and wait for the same rank of all other workers."""
    worker, rank = place
    numbers = f"of {workers}, with {ranks} ranks"
    wanted = {f"worker {other} {numbers}" for other in range(workers)}
    store.append(f"rank{rank}", f"worker {worker} {numbers}\n")
    while True:
        came = store.get(f"rank{rank}").decode().splitlines()
        if sorted(came) == sorted(wanted):
            return
        is_wrong = len(came) > len(wanted.intersection(came))
        missing = ", ".join(sorted(wanted.difference(came))) or "none"
        check(
            not is_wrong and time.monotonic() < until_s,
            f"meet as worker {worker} {numbers}",
            because=f"these have come: {', '.join(sorted(came))}; missing: {missing}",
            do="start every worker once, with the same numbers; after a failure start all again",
            kind=MismatchError if is_wrong else ExchangeTimeout,
        )
        time.sleep(_POLL_S)
