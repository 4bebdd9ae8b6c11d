"""Which numbers of a row are sent: the k largest, or k at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PER_GROUP = 8


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k numbers of largest magnitude of each row, ascending; ties to the lowest.

    One more than k is selected: where it equals the k-th, values alone do not decide, and those few
    rows are done again with the index as second key. A GPU takes that key for all rows.

    Args:
        x: fp32 [rows, columns].
        k: 1 <= k <= columns.

    Returns:
        int64 [rows, k].

    >>> largest(torch.tensor([[1.0, -3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    rows, columns = x.shape
    if k == columns:
        return torch.arange(k, device=x.device).repeat(rows, 1)
    # Of non-negative floats the bits have the order of the numbers, and comparing them is faster.
    bits = x.abs().view(torch.int32)
    if not x.is_cpu:  # to look for ties would be to wait for the device
        return _largest_with_ties(bits, k).sort(1).values
    values, indices = _top(bits, k + 1)
    least, where = values.min(1, keepdim=True)
    tied = ((values == least).sum(1) > 1).nonzero()[:, 0]
    chosen = indices.scatter(1, where, indices[:, k:])[:, :k]
    if len(tied):
        chosen[tied] = _largest_with_ties(bits[tied], k)
    return chosen.sort(1).values


def largest_reference(x: Tensor, k: int) -> Tensor:
    """What `largest` computes, by sorting every row.

    >>> largest_reference(torch.tensor([[1.0, -3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    order = torch.sort(x.abs(), dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(1).values


def _top(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row with their indices, in any order.

    They lie in the k groups with the largest maxima, so two small selections do for a large one.
    """
    rows, columns = bits.shape
    groups = columns // _PER_GROUP
    if columns % _PER_GROUP or 2 * k > groups:
        return bits.topk(k, sorted=False)
    grouped = bits.view(rows, _PER_GROUP, groups)
    group = grouped.amax(1).topk(k, sorted=False).indices
    candidates = grouped.gather(2, group[:, None, :].expand(rows, _PER_GROUP, k))
    values, place = candidates.view(rows, _PER_GROUP * k).topk(k, sorted=False)
    member = torch.div(place, k, rounding_mode="floor")
    return values, member * groups + group.gather(1, place - member * k)


def _largest_with_ties(bits: Tensor, k: int) -> Tensor:
    columns = bits.shape[1]
    from_the_end = torch.arange(columns - 1, -1, -1, device=bits.device)
    keys = (bits.to(torch.int64) << 32) | from_the_end
    return keys.topk(k, sorted=False).indices


def random_places(*, columns: int, k: int, seed: int, round_number: int) -> Tensor:
    """k places out of `columns`, ascending: those whose hash is smallest, ties to the lowest.

    The hash of place i is the output of SplitMix64 for the state s + (i + 1) g, where
    g = 0x9E3779B97F4A7C15 and s is its output for the state seed + (round + 1) g; all mod 2^64.

    Returns:
        int64 [k], the same on every machine.

    Source: G. Steele, D. Lea, C. Flood (2014), Fast splittable pseudorandom number generators.

    >>> random_places(columns=10, k=3, seed=0, round_number=1).tolist()
    [1, 3, 9]
    """
    import numpy as np  # slow to import, and only random places need it

    state = _splitmix(np.uint64(seed % 2**64), np.uint64(round_number + 1))[0]
    hashes = _splitmix(state, np.arange(1, columns + 1, dtype=np.uint64))
    order = np.argsort(hashes, kind="stable")[:k]
    return torch.from_numpy(np.sort(order))


def _splitmix(state: Any, steps: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):
        z = state + np.atleast_1d(steps) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
