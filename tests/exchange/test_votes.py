"""How workers agree on whose payloads they use."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.exchange.votes import ballot, tally
from thinwire.rejection import Rejection, RejectReason


@settings(max_examples=100)
@given(st.data(), st.integers(1, 5))
def test_all_agree_on_the_worst_that_any_worker_found(data, workers: int) -> None:
    codes = st.lists(st.integers(0, 5), min_size=workers, max_size=workers)
    found = [data.draw(codes) for _ in range(workers)]
    mine = [{s: Rejection(reason=RejectReason(c)) for s, c in enumerate(row) if c} for row in found]
    ballots = [ballot(found_here, workers) for found_here in mine]
    agreed = [tally(ballots, found_here) for found_here in mine]
    worst = {s: RejectReason(max(row[s] for row in found)) for s in range(workers)}
    for one in agreed:
        assert {s: rejection.reason for s, rejection in one.items()} == {
            s: f for s, f in worst.items() if f
        }


def test_a_rejection_says_what_was_found_or_which_worker_found_it() -> None:
    mine = {1: Rejection(reason=RejectReason.DAMAGED, detail="its checksum")}
    ballots = [ballot(mine, 3), ballot({}, 3), ballot(mine, 3)]
    assert "its checksum" in str(tally(ballots, mine)[1])
    assert str(tally(ballots, {})[1]).endswith("(worker 0, 2 found)")
    assert (
        tally([torch.tensor([0, 77], dtype=torch.uint8)] * 2, {})[1].reason is RejectReason.DAMAGED
    )
    assert tally([ballot({}, 2)] * 2, {}) == {}
    newcomer = tally([ballot({0: Rejection(reason=RejectReason.EMPTY)}, 1)], {})[0]
    assert str(newcomer) == "it has just joined and has nothing to contribute"
