"""The ranks that torchrun started; each holds a whole worker, or a shard of one by FSDP2."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.fragments.layers import stack_of
from thinwire.fragments.sharding import sharded_like
from thinwire.live_weights import local_shard
from thinwire.transport.distributed import naming_failures


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_lead() -> bool:
    """Whether this process writes what exists once, because it is rank 0 or the only one."""
    return os.environ.get("RANK", "0") == "0"


def count_workers(simulated: int, worker_size: int) -> int:
    """K: the number of workers that torchrun's ranks form, or else `simulated`.

    Args:
        simulated: workers of this process, without torchrun.
        worker_size: ranks per worker.

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
            do=f"start it with torchrun and a multiple of {worker_size} ranks",
        )
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else simulated
    if ranks % worker_size:
        raise ConfigurationError(
            f"make workers of {worker_size} ranks",
            because=f"torchrun started {ranks} ranks, which is not a multiple of that",
            do="change --worker-size, or the number of processes",
        )
    return ranks // worker_size


class Ranks:
    """The S ranks of one worker, as one of them sees it; this class is a worker of one rank.

    Args:
        index: this rank's index among them, from 0.
        size: S.

    >>> Ranks().total([2.0])
    [2.0]
    """

    index, size = 0, 1

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move a model that every rank has built alike to where it is trained, in place."""
        model.to(device)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in their order; whole numbers below 2^53 are exact."""
        gathered, each = self.gather(values), len(values)
        return [sum(gathered[index::each]) for index in range(each)]

    def gather(self, values: Sequence[float]) -> list[float]:
        """The values of all ranks, in rank order; equally many from each."""
        return list(values)

    def naming_failures(self) -> AbstractContextManager[None]:
        """Turn what the loss of a rank raises inside into an `ExchangeError`."""
        return nullcontext()

    def close(self) -> None:
        """Release the process group, at the end of the run."""


class FsdpRanks(Ranks):
    """A worker whose weights, gradients and optimizer state are sharded over its ranks.

    Args:
        group: the process group of the worker's ranks.
        device: where this rank's shards live.

    Source: PyTorch FSDP2, `torch.distributed.fsdp.fully_shard`.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.index, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        # From a group: a mesh that makes its own group would not give it the run's timeout.
        self._mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Shard every layer, then the rest; each moves to the mesh's device on its own."""
        from torch.distributed.fsdp import fully_shard

        for layer in stack_of(model):
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)

    def gather(self, values: Sequence[float]) -> list[float]:
        """All-gather the values."""
        return gather_values(values, self._device, self._mesh.get_group())

    @contextmanager
    def naming_failures(self) -> Generator[None]:
        """Wrap everything that gathers weights or reduces gradients."""
        try:
            yield
        except RuntimeError as error:
            # Arithmetic may fail inside, too, and then no rank was lost.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            with naming_failures("shards of a worker"):
                raise

    def close(self) -> None:
        """Let go of the process group."""
        # DTensor's caches never let go of the mesh, and so of gloo's threads, which sometimes abort
        # the process as it exits. Meshes of older torch know their groups by name only.
        getattr(self._mesh, "_pg_registry", {}).clear()


def gather_values(values: Sequence[float], device: torch.device, group: Any = None) -> list[float]:
    """The values of all ranks of a process group, in rank order; equally many from each.

    Args:
        values: this rank's values.
        device: where the group's backend gathers.
        group: the process group; None is the default one.
    """
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    slots = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with naming_failures("measurements of the workers"):
        dist.all_gather(slots, mine, group=group)
    return torch.cat(slots).tolist()


def plain(state: Any) -> Any:
    """`state` with every DTensor replaced by this rank's shard of it.

    >>> plain({"w": [torch.ones(1)]})
    {'w': [tensor([1.])]}
    """
    if isinstance(state, Mapping):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(plain(value) for value in state)
    return {"shard": local_shard(state)} if hasattr(state, "to_local") else state


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load `plain(model.state_dict())` of a model that was sharded the same way into `model`."""
    into = model.state_dict()
    model.load_state_dict(
        {name: _like(into[name], value) if name in into else value for name, value in state.items()}
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `plain(optimizer.state_dict())` of an optimizer of such a model into `optimizer`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {
        index: {key: _like(parameters[index], value) for key, value in values.items()}
        # Copied, because an optimizer keeps references to what it loads.
        for index, values in deepcopy(state["state"]).items()
    }
    optimizer.load_state_dict({**state, "state": kept})


def _like(tensor: Tensor, saved: Any) -> Any:
    """A shard as a DTensor that is sharded as `tensor` is; anything else unchanged."""
    if not isinstance(saved, Mapping):
        return saved
    shard: Tensor = saved["shard"]
    if not hasattr(tensor, "to_local") or local_shard(tensor).shape != shard.shape:
        raise CheckpointError(
            "load the state of a sharded worker",
            because=f"a shard of it has shape {list(shard.shape)} and here it is "
            f"{list(local_shard(tensor).shape)}",
            do="resume with the --worker-size and the model that wrote it",
        )
    return sharded_like(tensor, shard)
