"""A worker's checkpoint in a run that goes on with another number of workers.

Outer parameters and outer optimizers do not depend on K. What was in flight is dropped: the live
weights still hold the work, and the next round sends it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.live_weights import local_shard
from thinwire.outer_loop import OuterLoop

__all__ = ["carry_over"]

_State = Mapping[str, Any]


def carry_over(outer: OuterLoop, model: nn.Module, saved: _State, *, feedback_of: _State) -> None:
    """Go on in `outer`, a fresh loop, from `OuterLoop.state_dict()` of another K.

    Call it once `model` holds the live weights that belong to `saved`.

    Args:
        outer: of this run.
        model: the live weights.
        saved: the state of a worker that is succeeded.
        feedback_of: the state whose feedback is taken, or an empty one.

    Raises:
        CheckpointError: it is the state of another method.
    """
    fresh = outer.state_dict()
    fragments = list(zip(saved["fragments"], fresh["fragments"], strict=True))
    kept = feedback_of.get("fragments", [{}] * len(fragments))
    carried = [
        _fragment(old, new, memory.get("exchange", {}))
        for (old, new), memory in zip(fragments, kept, strict=True)
    ]
    counts = {name: saved[name] for name in ("step", "rounds", "peak_sent_bytes", "traffic")}
    left_out = {worker: saved["left_out"].get(worker, 0) for worker in fresh["left_out"]}
    state = {**fresh, **counts, "left_out": left_out}
    _recall(outer, model, state, carried, [old["outer"] for old, _ in fragments])
    outer.load_state_dict({**state, "fragments": carried})


@torch.no_grad()
def _recall(
    outer: OuterLoop,
    model: nn.Module,
    state: _State,
    carried: Sequence[dict[str, Any]],
    old: Sequence[_State],
) -> None:
    """Put what eager workers had sent, and taken out of their live weights, back into these.

    theta_k' = theta_k + theta - own - sum sent: the next Delta, theta - theta_k', has all of it.
    """
    if not any("own.anchor" in saved for saved in old):
        return
    moved = [
        {**c["outer"], "anchor": _missing(saved)} for c, saved in zip(carried, old, strict=True)
    ]
    # Only the loop knows which element of its vectors is which parameter's.
    fragments = [{**c, "outer": outer} for c, outer in zip(carried, moved, strict=True)]
    outer.load_state_dict({**state, "fragments": fragments})
    by_name = outer.anchor()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            local_shard(parameter).add_(local_shard(by_name[name]))


def _missing(saved: _State) -> Tensor:
    sent = [saved[f"sent.{place}"] for place in range(int(saved["sent.count"]))]
    return saved["anchor"] - saved["own.anchor"] - sum(sent)


def _fragment(old: _State, new: _State, memory: _State) -> dict[str, Any]:
    own = {key: value for key, value in old["outer"].items() if key.startswith("own.")}
    # Outer settings by number of workers may have momentum for one and none for another.
    outer = {key: old["outer"].get(key, value) for key, value in new["outer"].items()}
    for key in own:
        outer[key] = outer[key.removeprefix("own.")]
    if "sent.count" in outer:
        outer["sent.count"] = torch.tensor(0)
    in_flight = any(int(flight["round"]) > 0 for flight in old["in_flight"])
    # What a dropped message lacked is in its feedback and in the live weights: once is enough.
    exchange = new["exchange"] if in_flight else _fitting(memory, new["exchange"])
    counts = {"sent_at_step": old["sent_at_step"], "sends": old["sends"]}
    return {**new, **counts, "outer": outer, "exchange": exchange}


def _fitting(memory: _State, fresh: _State) -> _State:
    """`memory` if it is of the same shapes: shards of a reduction are cut by K."""
    shapes = [{key: value.shape for key, value in state.items()} for state in (memory, fresh)]
    return memory if shapes[0] == shapes[1] else fresh
