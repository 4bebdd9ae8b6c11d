"""Checks for those transports that exchange while the caller trains."""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire.testing.transports import KINDS, Kind, gathered, scattered
from thinwire.transport import Posts, RoundTag, Transport
from thinwire.transport.metered import Metered

TAG = RoundTag(what="a test payload", round=1)


def reduced(
    payloads: Sequence[Tensor], rank: int, reduce: Callable[[Sequence[Tensor]], Tensor]
) -> Posts[list[Tensor]]:
    """The reduced payload of every worker, in rank order."""
    received = yield from scattered(payloads, rank)
    return (yield from gathered(reduce(received), rank, len(payloads)))


def check_background(transport: Transport, *, within_s: float = 20.0) -> None:
    """Check a transport that exchanges while training continues.

    Exchanges with all their posts must arrive before anyone waits for them, and their time until
    then must count as overlapped.

    Args:
        transport: transport of the worker.
        within_s: time that a few bytes may take.

    Raises:
        AssertionError: an exchange makes progress only in a wait.
    """
    meter, arrived = Metered(transport), list[int]()

    def noted(kind: Kind) -> Posts[threading.Thread]:
        finish = yield from kind(transport.rank, transport.world_size, 1)
        arrived.append(1)
        return finish

    parts = [meter.run(noted(kind), TAG) for kind in KINDS]
    until_s = time.perf_counter() + within_s
    while len(arrived) < len(parts):
        assert time.perf_counter() < until_s, "exchanges arrive only when they are waited for"
        time.sleep(0.001)
    trained_s = 0.2
    time.sleep(trained_s)
    for place in (0, 2, 1, 3):
        assert meter.wait(parts[place]) is threading.current_thread()
    assert meter.counters.wait_s < trained_s
    assert 0 < meter.counters.overlapped_s < len(parts) * within_s
