"""Posts whose payloads are on their way to the host when they begin."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from thinwire.transport import Post
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
        sent = [payload(rank, 7), payload(10 * rank)]
        posts = [Post({1 - rank: each}, {1 - rank: each.numel()}) for each in sent]
        waits = [GlooMessages(group, n).start(post, 0) for n, post in enumerate(posts, start=1)]
        if copied:  # an encoder's next round
            for each in sent:
                each.fill_(99)
        return [received[1 - rank].tolist() for received in (wait() for wait in waits)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [[[1, 7], [10]], [[0, 7], [0]]]
