"""Which workers are said to be unreachable."""

from thinwire.elastic.quorum import Member
from thinwire.elastic.rank_session import Reachability
from thinwire.errors import ExchangeError
from thinwire.membership import Progress

START = Progress(version=0, step=0, digest="")


def others(*names: str) -> list[Member]:
    return [Member(identity=n, nonce="1", address=f"{n}:1", position=START) for n in names]


def test_a_worker_that_is_tried_twice_in_a_row_and_does_not_answer_is_unreachable() -> None:
    silent, looked = {"b:1"}, []

    def look(address: str) -> None:
        looked.append(address)
        if address in silent:
            raise ExchangeError("ask", because="no route to host", do="look")

    reachability = Reachability(look)
    reachability.not_connected(others("b", "c"))
    assert (reachability.unreachable, looked) == ((), [])
    reachability.not_connected(others("b", "c", "d"))
    assert (reachability.unreachable, sorted(looked)) == (("b:1",), ["b:1", "c:1"])
    silent = {"c:1", "d:1"}
    reachability.not_connected(others("c"))
    assert reachability.unreachable == ("c:1",)
    reachability.not_connected(others("c", "d"))
    assert reachability.unreachable == ("c:1",)  # d was left out in between
    reachability.connected()
    assert reachability.unreachable == ()
    reachability.not_connected(others("c"))
    assert reachability.unreachable == ()
