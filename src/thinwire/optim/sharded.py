"""Orthogonalisation of matrices that are sharded over the ranks of a device mesh.

A matrix can only be orthogonalised as a whole. Of many matrices cut alike along a mesh dimension of
n ranks, rank r takes every n-th one, starting at the r-th:

    all-to-all:  the shards of matrix i go to rank i mod n, which assembles them
    rank r:      solves the whole matrices it was dealt
    all-to-all:  the shards of matrix i go back to their ranks

If a matrix is cut along several mesh dimensions, "solves" is the same deal along the next one:
nothing is computed twice, and the mesh's own groups are enough. Ranks along which matrices are not
cut at all (HSDP's replicas) do the same work on the same numbers.

The deal follows from global shapes and the order of the parameters, which all ranks of a mesh
share. It uses only groups of a parameter's own mesh, because a worker may be a part of the world.

DTensors are recognised by their attributes, so that torch.distributed.tensor, which is slow to
import, is never imported here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.fragments.sharding import check_placement
from thinwire.live_weights import local_shard

Solve = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Maps whole matrices of one shape to the same number of matrices of that shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How the ranks of one mesh dimension share one dimension of a tensor.

    The dimension is split into `split_factor` parts and each part over the ranks, as torch.chunk
    does; a rank holds its chunk of each part. All but `_StridedShard` have one part.
    """

    mesh: Any
    mesh_dim: int
    dim: int
    """Dimension of the tensor, counted from the end, which unstacking does not change."""
    size: int
    """Size of that dimension before this cut."""
    split_factor: int

    @property
    def ranks(self) -> int:
        """Number of ranks that share the dimension."""
        return self.mesh.size(self.mesh_dim)

    @property
    def rank(self) -> int:
        """This rank's number among those that share the dimension."""
        return self.mesh.get_local_rank(self.mesh_dim)

    def held(self) -> list[tuple[range, ...]]:
        """For each rank, the ranges of the dimension that it holds, in the order it holds them."""
        parts = _chunks(range(self.size), self.split_factor)
        return list(zip(*(_chunks(part, self.ranks) for part in parts), strict=True))

    def size_here(self) -> int:
        """Elements of the dimension that this rank holds."""
        return sum(len(places) for places in self.held()[self.rank])

    def rows(self, device: torch.device) -> list[Tensor]:
        """The ranges of `held` as index tensors, one for each rank."""
        return [
            torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])
            for parts in self.held()
        ]


def _chunks(places: range, count: int) -> list[range]:
    """Cut `places` as torch.chunk does, but with empty ranges for the chunks that it leaves out."""
    size = -(-len(places) // count)
    return [places[start * size : (start + 1) * size] for start in range(count)]


def cuts_of(parameter: Tensor, matrix_dims: int) -> tuple[Cut, ...]:
    """The cuts through the last `matrix_dims` dimensions of a parameter, in reverse order.

    Leaves out cuts that keep matrices whole, such as those of a stack of experts into whole ones.
    Empty for a parameter that is not a DTensor.
    """
    return tuple(cut for cut in reversed(tuple(_all_cuts(parameter))) if cut.dim >= -matrix_dims)


def _all_cuts(parameter: Tensor) -> Iterator[Cut]:
    if not hasattr(parameter, "to_local"):
        return
    mesh, placements = cast("Any", parameter).device_mesh, cast("Any", parameter).placements
    sizes = list(parameter.shape)
    for mesh_dim, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None or mesh.size(mesh_dim) == 1:
            continue
        cut = Cut(
            mesh=mesh,
            mesh_dim=mesh_dim,
            dim=dim - parameter.ndim,
            size=sizes[dim],
            split_factor=getattr(placement, "split_factor", 1),
        )
        yield cut
        sizes[dim] = cut.size_here()


def whole_shape(shard: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of a shard once `cuts` are undone."""
    shape = list(shard)
    for cut in cuts:
        shape[cut.dim] = cut.size
    return tuple(shape)


def deal(shards: Sequence[Tensor], cuts: Sequence[Cut], solve: Solve) -> list[Tensor]:
    """Assemble shards, solve each whole matrix on one rank, and return the shards.

    Every rank of the cuts' mesh must call this with shards of the same matrices in the same order;
    shards may be empty.

    Args:
        shards: one for each of any number of matrices of one shape and dtype, all cut alike.
        cuts: from `cuts_of`; without any, `shards` are whole.
        solve: what to do with whole matrices; not called if there are none.

    Returns:
        For each shard, the same shard of the solved matrix.

    >>> deal([torch.ones(2, 2)], [], lambda matrices: [-m for m in matrices])
    [tensor([[-1., -1.],
            [-1., -1.]])]
    """
    if not cuts or not shards:
        return list(solve(shards)) if shards else []
    cut, stack = cuts[0], torch.stack(list(shards))
    rows = cut.rows(stack.device)
    dealt = [stack[owner :: cut.ranks] for owner in range(cut.ranks)]
    mine = len(dealt[cut.rank])
    whole = dealt[cut.rank].shape
    shapes = [whole_shape(whole, [replace(cut, size=len(places))]) for places in rows]
    wholes = stack.new_empty((mine, *whole_shape(stack.shape[1:], [cut])))
    for places, part in zip(rows, _all_to_all(dealt, shapes, cut), strict=True):
        wholes.index_copy_(cut.dim, places, part)
    solved = deal(wholes.unbind(), cuts[1:], solve)
    wholes = torch.stack(solved) if solved else wholes
    parts = [wholes.index_select(cut.dim, places) for places in rows]
    answers = _all_to_all(parts, [part.shape for part in dealt], cut)
    for place, answer in zip(dealt, answers, strict=True):
        place.copy_(answer)
    return list(stack.unbind())


def _all_to_all(sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], cut: Cut) -> list[Tensor]:
    """Send `sent[r]` to rank r of the cut, and get a tensor of `shapes[r]` from it."""
    flat = torch.cat([tensor.reshape(-1) for tensor in sent])
    sizes = [math.prod(shape) for shape in shapes]
    came = flat.new_empty(sum(sizes))
    group = cut.mesh.get_group(cut.mesh_dim)
    dist.all_to_all_single(came, flat, sizes, [tensor.numel() for tensor in sent], group=group)
    return [part.view(*shape) for part, shape in zip(came.split(sizes), shapes, strict=True)]


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of the gradient, cut as the parameter is."""
    gradient = cast("Any", parameter.grad)
    if not hasattr(gradient, "to_local"):
        return gradient
    placements = cast("Any", parameter).placements
    if tuple(gradient.placements) != tuple(placements):
        # Tensor parallelism leaves some sums over ranks pending, as for a norm on sharded rows.
        gradient = gradient.redistribute(placements=placements)
    return local_shard(gradient)


def check_same_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise on every rank unless all ranks of a mesh have gradients for the same parameters.

    Otherwise ranks would mix shards of different matrices, or wait for each other forever. Ranks
    exchange two flags, of one byte, for each parameter: that it has a gradient, and that it has
    none.
    """
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        for cut in _all_cuts(parameter):
            by_mesh[cut.mesh].append(parameter)
            break
    for mesh, members in by_mesh.items():
        has = [parameter.grad is not None for parameter in members]
        device = local_shard(members[0]).device
        flags = torch.tensor([has, [not h for h in has]], dtype=torch.uint8, device=device)
        for mesh_dim in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(mesh_dim))
        for parameter, (some, others) in zip(members, flags.T.tolist(), strict=True):
            if some and others:
                raise ConfigurationError(
                    f"step a sharded parameter of shape {tuple(parameter.shape)}",
                    because="some ranks of its mesh have a gradient for it and others have none",
                    do="run the same layers on all ranks of a worker, or zero the missing gradient",
                )


def check_sharding(parameter: Tensor) -> None:
    """Raise `ConfigurationError` unless this rank holds a known part of a DTensor's values."""
    check_placement(parameter, f"step a parameter of shape {tuple(parameter.shape)}")
    expected = list(parameter.shape)
    for cut in _all_cuts(parameter):
        expected[cut.dim] = cut.size_here()
    held = tuple(local_shard(parameter).shape)
    if held != tuple(expected):
        raise ConfigurationError(
            f"put a parameter of shape {tuple(parameter.shape)} together",
            because=f"this rank holds {held} of it, and by its placements {tuple(expected)}",
            do="choose a size that the mesh divides evenly",
        )
