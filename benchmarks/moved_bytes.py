"""Bytes of a worker, compared with an all-reduce of 16-bit gradients at every step."""

from typing import Any

from thinwire.transport.metered import all_reduce_nbytes, times_fewer, up_and_down


def moved(sent: int, received: int, *, workers: int, parameters: int, steps: int) -> dict[str, Any]:
    """Bytes of a worker in a run, and how many times fewer they are, up and down together.

    >>> found = moved(100, 300, workers=4, parameters=1000, steps=2)
    >>> found["all_reduce_bytes_each_way"], found["times_fewer_by_store"]
    (6000, 30.0)
    >>> found["times_fewer_point_to_point"]
    20.0
    """
    size = {"workers": workers, "parameters": parameters, "steps": steps}
    store, direct = (up_and_down(sent, received, relayed=relayed) for relayed in (True, False))
    return {
        "sent_bytes_per_worker": sent,
        "received_bytes_per_worker": received,
        "all_reduce_bytes_each_way": all_reduce_nbytes(**size),
        "times_fewer_by_store": times_fewer(*store, **size),
        "times_fewer_point_to_point": times_fewer(*direct, **size),
    }


def megabytes(nbytes: float) -> str:
    """A cell of a table.

    >>> megabytes(7_780_000), megabytes(1_182_412_800), megabytes(0)
    ('7.78 MB', '1,182 MB', 'nothing')
    """
    if not nbytes:
        return "nothing"
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
