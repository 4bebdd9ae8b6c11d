"""Workers that meet at an address of their own, whatever torchrun started around each of them."""

import datetime
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch.distributed as dist

from thinwire.errors import (
    ConfigurationError,
    ExchangeError,
    ExchangeTimeout,
    MismatchError,
    ThinwireError,
)
from thinwire.transport.address import local_address, split_address
from thinwire.transport.base import Posts, Round, RoundTag, Transport, run_alone
from thinwire.transport.distributed import Distributed, reason_of
from thinwire.transport.gloo_group import gloo_group, listening_store
from thinwire.transport.sealed import sealed_by_default

T = TypeVar("T")

_ADDRESS, _WORKER, _WORKERS = "THINWIRE_MEET", "THINWIRE_WORKER", "THINWIRE_WORKERS"
_POLL_S = 0.02


class Rendezvous(Transport):
    """K workers over gloo, apart from torch.distributed's default process group.

    That group belongs to the trainer: a worker may be one process, or what torchrun started on a
    node (DDP, FSDP2, tensor parallelism). Each rank of a worker exchanges with the same rank of the
    others. The first rank of worker 0 listens at the address; all ranks of all workers call this,
    in any order.

    Args:
        address: HOST:PORT of worker 0's first rank; HOST must be an address of its machine.
        worker: this worker's number, from 0.
        workers: K, the same everywhere.
        rank: of this process in its worker; None is that of the default process group, or
            torchrun's, or 0.
        ranks: of this worker; None likewise.
        host: this machine's address, as the other workers reach it; None is the one that packets to
            the address have as their sender.
        timeout_s: for all workers to be there, and of each message.

    Raises:
        ConfigurationError: a number that cannot be, or an address that is not worker 0's.
        MismatchError: another K or another number of ranks than a worker that is there already, or
            a number that another worker has.
        ExchangeTimeout: a worker is missing; says which.

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
        if not 0 <= worker < workers:
            raise ConfigurationError(
                f"be worker {worker} of {workers}",
                because="workers are numbered from 0",
                do=f"pass a worker from 0 to {max(0, workers - 1)} and the number of all workers",
            )
        self._worker, self._workers = worker, workers
        self._store: Any = None
        self._inner: Distributed | None = None
        meeting_host, port = split_address(address)
        if workers == 1:
            return
        mine = _own_rank() if rank is None else rank
        many = _own_ranks() if ranks is None else ranks
        until_s = time.monotonic() + timeout_s
        self._store = _open_store(meeting_host, port, serves=worker == mine == 0, until_s=until_s)
        with _naming_failures():
            _check_in(self._store, worker, workers, mine, many, until_s=until_s)
            stores: Any = dist
            group = gloo_group(
                stores.PrefixStore(f"rank{mine}", self._store),
                worker,
                workers,
                host=local_address(meeting_host) if host is None else host,
                timeout_s=timeout_s,
            )
        self._inner = Distributed(group)

    @classmethod
    def from_environment(cls, *, timeout_s: float = 300.0) -> Self:
        """The rendezvous that THINWIRE_MEET, THINWIRE_WORKER and THINWIRE_WORKERS name.

        Args:
            timeout_s: for all workers to be there, and of each message.

        Raises:
            ConfigurationError: one of them is missing or no number; and what the class raises.
        """
        missing = [name for name in (_ADDRESS, _WORKER, _WORKERS) if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(
                "meet the other workers",
                because=f"{missing[0]} is not set",
                do=f"export {_ADDRESS}=HOST:PORT, {_WORKER}=0 (1, 2, ...) and {_WORKERS}=K",
            )
        return cls(
            os.environ[_ADDRESS],
            worker=_number(_WORKER),
            workers=_number(_WORKERS),
            timeout_s=timeout_s,
        )

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._worker

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._workers

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """In tagged messages between the same ranks of the workers."""
        return run_alone(posts) if self._inner is None else self._inner.run(posts, tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Gather the cards of the same rank of all workers."""
        return {0: card} if self._inner is None else self._inner.announce(card, tag)

    def close(self) -> None:
        """Leave the others; exchanges under way fail."""
        if self._inner is not None:
            self._inner.close()


def _own_rank() -> int:
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if joined else int(os.environ.get("RANK", "0"))


def _own_ranks() -> int:
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(
            f"take {text!r} for {name}", because="it is no number", do="export one, such as 0"
        )
    return int(text)


def _open_store(host: str, port: int, *, serves: bool, until_s: float) -> Any:
    left_s = max(1.0, until_s - time.monotonic())
    stores: Any = dist
    if not serves:
        try:
            return stores.TCPStore(
                host, port, is_master=False, timeout=datetime.timedelta(seconds=left_s)
            )
        except (RuntimeError, ValueError) as error:
            raise ExchangeTimeout(
                f"reach worker 0 at {host}:{port} within {left_s:.0f} s",
                because=reason_of(error),
                do="start it, and see that this machine reaches that port",
            ) from error
    try:
        return listening_store(host, port, timeout_s=left_s)
    except OSError as error:
        raise ConfigurationError(
            f"listen at {host}:{port} as worker 0",
            because=f"{error.strerror or error}",
            do="pass an address of this machine and a free port, or give this machine another "
            "worker number",
        ) from error


def _check_in(
    store: Any, worker: int, workers: int, rank: int, ranks: int, *, until_s: float
) -> None:
    """Say who is here, and wait for the same rank of all other workers."""
    mine = {"workers": workers, "ranks": ranks}
    if store.add(f"taken/{worker}/{rank}", 1) > 1:
        raise MismatchError(
            f"take part as worker {worker}, rank {rank}",
            because="another process has that place, or one that has ended had it in this run",
            do="give every worker a number of its own; after a failure start all workers again",
        )
    store.set(f"here/{worker}/{rank}", json.dumps(mine))
    for other in range(workers):
        same, first = f"here/{other}/{rank}", f"here/{other}/0"
        # A worker of another size may not have that rank.
        found = _wait_for(store, [same, first], other, until_s)
        theirs = json.loads(store.get(found))
        for field, value in mine.items():
            if theirs[field] != value:
                raise MismatchError(
                    f"work with worker {other}",
                    because=f"it was started with {field}={theirs[field]} and worker {worker} with "
                    f"{field}={value}",
                    do=f"start all workers with the same number of {field}",
                )
        _wait_for(store, [same], other, until_s)


def _wait_for(store: Any, keys: Sequence[str], worker: int, until_s: float) -> str:
    """The first of `keys` that is there."""
    while True:
        for key in keys:
            if store.check([key]):
                return key
        if time.monotonic() > until_s:
            raise ExchangeTimeout(
                f"meet worker {worker}",
                because="it has not come in time",
                do=f"start worker {worker}, with the same address and the same number of workers",
            )
        time.sleep(_POLL_S)


@contextmanager
def _naming_failures() -> Generator[None]:
    """Turn what the store or gloo throw inside into an error that says what was going on."""
    try:
        yield
    except ThinwireError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(
            "connect the workers",
            because=f"worker 0, which they meet at, or another one is gone: {reason_of(error)}",
            do="read what the others said, and start all of them again",
        ) from error


def default_transport() -> Transport:
    """What the environment asks for; else `Distributed()`.

    `Bucket` where THINWIRE_BUCKET is set, `Rendezvous` where THINWIRE_MEET is. Where THINWIRE_TOKEN
    is set, what they carry is sealed.

    Raises:
        ConfigurationError: both are set; and what the classes raise.

    >>> default_transport().world_size
    1
    """
    meets = bool(os.environ.get(_ADDRESS))
    if os.environ.get("THINWIRE_BUCKET"):
        if meets:
            raise ConfigurationError(
                "connect the workers",
                because=f"both THINWIRE_BUCKET and {_ADDRESS} are set",
                do="unset one of them",
            )
        # An object store's client is loaded where there is a store.
        from thinwire.transport.bucket import Bucket

        return Bucket.from_environment()
    return sealed_by_default(Rendezvous.from_environment() if meets else Distributed())
