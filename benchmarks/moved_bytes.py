"""What a worker sends and receives, beside an all-reduce of 16-bit gradients at every step.

A run counts a payload once when it is handed over, and each that arrives. A store or a hub takes it
once, too: up is what was sent. Point to point, each that arrives somewhere was sent there: up is as
much as down, in the mean over workers.
"""

from typing import Any


def moved(sent: int, received: int, *, workers: int, parameters: int, steps: int) -> dict[str, Any]:
    """Bytes of a worker in a run, and how many times fewer they are, up and down together.

    all-reduce = 2 (K - 1) / K 2 N T each way, in a ring, without headers

    >>> found = moved(100, 300, workers=4, parameters=1000, steps=2)
    >>> found["all_reduce_bytes_each_way"], found["times_fewer_by_store"]
    (6000, 30.0)
    >>> found["times_fewer_point_to_point"]
    20.0
    """
    ring = 4 * (workers - 1) * parameters * steps // workers
    return {
        "sent_bytes_per_worker": sent,
        "received_bytes_per_worker": received,
        "all_reduce_bytes_each_way": ring,
        "times_fewer_by_store": 2 * ring / (sent + received) if sent else None,
        "times_fewer_point_to_point": ring / received if sent else None,
    }


def megabytes(nbytes: float) -> str:
    """A cell of a table.

    >>> megabytes(7_780_000), megabytes(1_182_412_800), megabytes(0)
    ('7.78 MB', '1,182 MB', 'nothing')
    """
    if not nbytes:
        return "nothing"
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def times(fewer: float | None) -> str:
    """A cell of a table.

    >>> times(507.1), times(4.92), times(None)
    ('507', '4.9', '')
    """
    if fewer is None:
        return ""
    return f"{fewer:,.0f}" if fewer >= 9.95 else f"{fewer:.1f}"
