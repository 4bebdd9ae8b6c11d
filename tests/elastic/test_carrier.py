"""What carries payloads between workers: where it listens, and how long it waits."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinwire.elastic.carrier import GlooCarrier
from thinwire.transport import AllGather
from thinwire.transport.address import split_address


def connect(carrier: GlooCarrier, at: str, rank: int, workers: int, timeout_s: float = 20.0):
    return carrier.connect(
        at, key="k", name=f"w{rank}", rank=rank, workers=workers, timeout_s=timeout_s
    )


def test_the_store_listens_at_the_address_of_its_worker_and_nowhere_else() -> None:
    carrier = GlooCarrier("127.0.0.1")
    host, port = split_address(carrier.address)
    assert host == "127.0.0.1"
    socket.create_connection((host, port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    carrier.close()


def test_workers_that_are_linked_gather_what_each_of_them_sends() -> None:
    carriers = [GlooCarrier("127.0.0.1") for _ in range(3)]
    at = carriers[1].address

    def gathered(rank: int) -> list[int]:
        link = connect(carriers[rank], at, rank, 3)
        assert link.workers == 3
        work = link.backend(1, timeout_s=20.0).start(AllGather(torch.tensor([rank])), 0)
        return [int(row) for row in work.wait()]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gathered, range(3))) == [[0, 1, 2]] * 3
    for carrier in carriers:
        carrier.close()


def test_a_worker_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    carrier = GlooCarrier("127.0.0.1")
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not all 2 workers came .* in 0.5 s"):
        connect(carrier, carrier.address, 0, 2, timeout_s=0.5)
    assert 0.4 <= time.monotonic() - began_s < 2.0
    carrier.close()


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):
        GlooCarrier("203.0.113.1")
