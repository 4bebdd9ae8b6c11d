"""Sharding of a parameter over the ranks of a worker, read off the parameter itself.

Nothing here imports torch.distributed.tensor, which is slow to load: a DTensor is what has a
`device_mesh` and `placements`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from thinwire.errors import check


def sharding_of(tensor: Tensor) -> str:
    """How `tensor` is sharded and which part this rank holds; "" if it is not sharded.

    >>> import torch
    >>> sharding_of(torch.ones(3))
    ''
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ""
    placements = ", ".join(map(repr, getattr(tensor, "placements", ())))
    return (
        f"{list(tensor.shape)} cut as {placements} over a mesh of {list(mesh.shape)}, "
        f"part {list(mesh.get_coordinate())}"
    )


def by_holders(names: Iterable[str], parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """`names` in groups whose parameters are held by the same ranks of this worker.

    Ranks that hold the same parameter must encode it alike, so it cannot share chunks or levels
    with a parameter of which each rank holds a different shard.

    >>> import torch
    >>> by_holders(["a", "b"], {"a": torch.ones(1), "b": torch.ones(2)})
    [['a', 'b']]
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_holders(parameters[name]), []).append(name)
    return list(groups.values())


def check_placement(tensor: Tensor, cannot: str) -> None:
    """Raise `ConfigurationError`, saying what one `cannot` do, if `tensor` is an unreduced sum."""
    check(
        not any(p.is_partial() for p in getattr(tensor, "placements", ())),
        cannot,
        because="its placement is Partial: each rank holds a summand of its values",
        do="redistribute it to Shard or Replicate first",
    )


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, this rank's part, as a tensor sharded like `parameter`; as it is if that is not.

    >>> import torch
    >>> sharded_like(torch.ones(2), torch.zeros(2))
    tensor([0., 0.])
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return local
    kind: Any = type(parameter)
    return kind.from_local(
        local.to(parameter.device),
        mesh,
        getattr(parameter, "placements", ()),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _holders(tensor: Tensor) -> tuple[int, ...]:
    """Ranks of the mesh that hold the same part as this one; () for a plain tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    here = zip(getattr(tensor, "placements", ()), mesh.get_coordinate(), strict=True)
    where = tuple(slice(None) if p.is_replicate() else place for p, place in here)
    return tuple(mesh.mesh[where].flatten().tolist())
