"""What torchrun says of the ranks that it started, by environment variables."""

import os

from thinwire.errors import ConfigurationError


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_lead() -> bool:
    """Whether this process writes what exists once, because it is rank 0 or the only one."""
    return os.environ.get("RANK", "0") == "0"


def count_workers(simulated: int, worker_size: int) -> int:
    """K: what the ranks of torchrun make, or else `simulated`.

    Args:
        simulated: workers of this process, without torchrun.
        worker_size: ranks of a worker.

    Raises:
        ConfigurationError: the ranks do not make whole workers, or simulated workers would be
            sharded.

    >>> count_workers(4, 1)
    4
    """
    if worker_size > 1 and not under_torchrun():
        raise ConfigurationError(
            f"train workers of {worker_size} ranks in one process",
            because="the ranks of a worker are processes that hold a shard of it each",
            do=f"start thinwire train with torchrun and a multiple of {worker_size} ranks, or "
            "leave --worker-size out",
        )
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else simulated
    if ranks % worker_size:
        raise ConfigurationError(
            f"make workers of {worker_size} ranks",
            because=f"torchrun started {ranks} ranks, which is not a multiple of that",
            do="change --worker-size, or the number of processes",
        )
    return ranks // worker_size
