"""The ranks of a worker: one that holds all of it, or several that share it by FSDP2."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.fragments.layers import stack_of
from thinwire.transport import naming_failures

__all__ = ["Alone", "Ranks", "Sharded", "gather"]


class Ranks(ABC):
    """The S ranks of one worker, as one of them sees it.

    Args:
        index: of this rank among them, from 0.
        size: S.
    """

    def __init__(self, *, index: int, size: int) -> None:
        self.index, self.size = index, size

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows of the worker's batch [rows, ...], which S divides.

        >>> Alone().share(torch.arange(3))
        tensor([0, 1, 2])
        """
        return batch.chunk(self.size)[self.index]

    @abstractmethod
    def place(self, model: nn.Module, device: torch.device) -> None:
        """Put a model that every rank has built alike where it is trained, in place."""

    @abstractmethod
    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, the same on all of them; whole numbers below 2^53 are exact."""

    @abstractmethod
    def naming_failures(self) -> AbstractContextManager[None]:
        """Turn what the loss of a rank throws inside into an `ExchangeError`."""

    def close(self) -> None:
        """The run is over."""
        return


@final
class Alone(Ranks):
    """A worker of one rank, or one that is simulated.

    >>> Alone().total([2.0])
    [2.0]
    """

    def __init__(self) -> None:
        super().__init__(index=0, size=1)

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move it to `device`."""
        model.to(device)

    def total(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def naming_failures(self) -> AbstractContextManager[None]:
        """Nobody can be lost."""
        return nullcontext()


@final
class Sharded(Ranks):
    """A worker whose weights, gradients and optimizer state are sharded over its ranks.

    Args:
        group: the process group of the worker's ranks.
        device: where this rank's shards live.

    Source: PyTorch FSDP2, `torch.distributed.fsdp.fully_shard`.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        super().__init__(index=dist.get_rank(group), size=dist.get_world_size(group))
        self._device = device
        # From a group, because a mesh that makes its own would not give it the run's timeout.
        self._mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Shard every layer, then what is left; each is moved to `device` on its own."""
        from torch.distributed.fsdp import fully_shard

        del device  # the mesh knows it
        for layer in stack_of(model):
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)

    def total(self, values: Sequence[float]) -> list[float]:
        """All-reduce them."""
        totals = torch.tensor(values, dtype=torch.float64, device=self._device)
        with naming_failures("measurements of a worker's ranks"):
            dist.all_reduce(totals, group=self._mesh.get_group())
        return totals.tolist()

    def naming_failures(self) -> AbstractContextManager[None]:
        """For whatever gathers weights or reduces gradients."""
        return _naming_lost_ranks()

    def close(self) -> None:
        """Let go of the process group."""
        # DTensor's caches keep the mesh for ever, and with it gloo's threads, which now and then
        # abort the process as it exits. Older meshes know their groups by name only.
        getattr(self._mesh, "_pg_registry", {}).clear()


@contextmanager
def _naming_lost_ranks() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        # Arithmetic goes on inside, too, and its failures are nobody's loss.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        with naming_failures("shards of a worker"):
            raise


def gather(tensor: Tensor) -> Tensor:
    """All of `tensor`: what the ranks of a worker hold of it, put together on each of them.

    All ranks take part. A tensor that is not sharded is there already.

    >>> gather(torch.ones(3))
    tensor([1., 1., 1.])
    """
    whole = getattr(tensor, "full_tensor", None)
    return tensor.detach() if whole is None else cast(Tensor, whole()).detach()
