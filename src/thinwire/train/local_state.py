"""States of sharded models and optimizers as plain tensors, and back.

A file cannot hold a DTensor, which belongs to a process group. What a rank has of one is written as
`{"shard": tensor}`; a tensor that is not sharded stays as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.fragments.sharding import sharded_like
from thinwire.live_weights import local_shard

__all__ = ["load_model", "load_optimizer", "plain"]


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
    """Put `plain(model.state_dict())` of a model that was sharded alike into `model`."""
    into = model.state_dict()
    model.load_state_dict(
        {name: _like(into[name], value) if name in into else value for name, value in state.items()}
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put `plain(optimizer.state_dict())` of an optimizer of such a model into `optimizer`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {
        index: {key: _like(parameters[index], value) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": kept})


def _like(tensor: Tensor, saved: Any) -> Any:
    """A shard as a DTensor that is sharded as `tensor` is; anything else as it is."""
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
