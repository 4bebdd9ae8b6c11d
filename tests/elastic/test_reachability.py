"""Which workers are said to be unreachable."""

from thinwire.elastic.quorum import Member
from thinwire.elastic.reachability import Reachability
from thinwire.errors import ExchangeError
from thinwire.membership import Progress

START = Progress(version=0, step=0, digest="")


def others(*names: str) -> list[Member]:
    return [Member(identity=n, nonce="1", address=f"{n}:1", position=START) for n in names]


def test_a_worker_that_is_missed_twice_in_a_row_is_unreachable() -> None:
    silent = {"b:1"}

    def look(address: str) -> None:
        if address in silent:
            raise ExchangeError("ask", because="no route to host", do="look")

    reachability = Reachability(look)
    reachability.not_connected(others("b", "c"))
    assert reachability.unreachable == ()
    reachability.not_connected(others("b", "c"))
    assert reachability.unreachable == ("b:1",)
    silent = {"c:1"}
    reachability.not_connected(others("b", "c"))
    assert reachability.unreachable == ()  # each once
    reachability.connected()
    reachability.not_connected(others("b", "c"))
    assert reachability.unreachable == ()
    reachability.not_connected(others("b", "c"))
    assert reachability.unreachable == ("c:1",)
