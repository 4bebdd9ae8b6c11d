"""How many processor cores there are to share."""

import os

__all__ = ["cores"]


def cores() -> list[int]:
    """Those this process may use: a comparison's jobs, and containers, have a part of the machine.

    >>> len(cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
