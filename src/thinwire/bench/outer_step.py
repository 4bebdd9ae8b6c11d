"""What an outer step costs beside the usual per-tensor code."""

from typing import final

import torch
from torch import Tensor, nn

from thinwire import presets
from thinwire.bench.result import BenchResult, compare_alternating
from thinwire.outer_loop import OuterLoop
from thinwire.transport import in_process

__all__ = ["outer_step"]

_MOMENTUM, _LR = 0.9, 0.7


def outer_step(*, width: int = 512, layers: int = 16, repeats: int = 9) -> BenchResult:
    """One DiLoCo round of one worker against a loop over tensors with torch's SGD on each.

    Args:
        width: of square layers.
        layers: how many; the default has 4.2M parameters in 32 tensors.
        repeats: repetitions of each, in turns.
    """
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    method = presets.diloco(sync_every=1)
    loop = OuterLoop(model, [], method, transport=in_process(1)[0])
    naive = _Naive(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    ours_s, baseline_s = compare_alternating(loop.step, naive.step, repeats=repeats)
    return BenchResult(
        name="outer-step",
        ours="OuterLoop.step of diloco, K=1",
        baseline="per-tensor delta, copy and torch.optim.SGD",
        ours_s=ours_s,
        baseline_s=baseline_s,
    )


@final
class _Naive:
    """The outer step as it is usually written."""

    def __init__(self, model: nn.Module) -> None:
        self._live = list(model.parameters())
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._live]
        self._optimizer = torch.optim.SGD(self._anchors, lr=_LR, momentum=_MOMENTUM, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:
        for anchor, live in zip(self._anchors, self._live, strict=True):
            sent: Tensor = (anchor - live).clone()
            anchor.grad = sent / 1
        self._optimizer.step()
        for anchor, live in zip(self._anchors, self._live, strict=True):
            live.copy_(anchor)
