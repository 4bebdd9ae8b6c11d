"""Requests whose payloads are on their way to the host when they are asked for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from thinwire.transport import AllGather, AllToAll, Swap
from thinwire.transport.gloo_group import gloo_group
from thinwire.transport.gloo_messages import GlooMessages


def payload(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_sent_is_what_lay_there_when_it_was_asked_for(copied: bool, monkeypatch) -> None:
    monkeypatch.setattr("thinwire.transport.gloo_messages.lies_on_gpu", lambda _: copied)
    store = dist.HashStore()

    def run(rank: int) -> list:
        group = gloo_group(store, rank, 2, host="127.0.0.1", timeout_s=20)
        sent = [payload(rank, 7), payload(10 * rank), payload(10 * rank + 1), payload(rank)]
        requests = [AllGather(sent[0]), AllToAll([sent[1], sent[2]]), Swap(sent[3], 1 - rank)]
        works = [GlooMessages(group, 0, n).start(r, 0) for n, r in enumerate(requests, start=1)]
        if copied:  # an encoder's next round
            for each in sent:
                each.fill_(99)
        gathered, scattered, swapped = (work.wait() for work in works)
        return [[g.tolist() for g in gathered], [s.tolist() for s in scattered], swapped.tolist()]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [
        [[[0, 7], [1, 7]], [[0], [10]], [1]],
        [[[0, 7], [1, 7]], [[1], [11]], [0]],
    ]
