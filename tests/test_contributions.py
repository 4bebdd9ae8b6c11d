"""What is counted of contributions that were not used, or not used whole."""

import logging

import pytest

from thinwire.rejection import (
    CLIPPED,
    KINDS,
    ContributionLog,
    Rejection,
    RejectReason,
    kinds_of,
)

OUTLIER = Rejection(reason=RejectReason.OUTLIER, detail="9, and the median is 1")
EMPTY = Rejection(reason=RejectReason.EMPTY)


def test_every_reason_but_having_nothing_to_contribute_is_counted() -> None:
    found = kinds_of({r: Rejection(reason=r) for r in RejectReason if r}, [7])
    assert found == {2: "damaged", 3: "drifted", 4: "not finite", 5: "outlier", 7: "clipped"}
    assert tuple(found.values()) == KINDS


def test_a_log_counts_by_rank_and_by_member_and_warns_of_rejections_alone(caplog) -> None:
    log = ContributionLog(["a", "b", "c"].__getitem__)
    with caplog.at_level(logging.WARNING):
        log.note({1: OUTLIER, 2: EMPTY}, [0], "round 3")
        log.note({1: Rejection(reason=RejectReason.DAMAGED)}, [], "round 4")
        log.note({}, [0, 2], "round 5")
    assert log.left_out == {1: 2}
    assert log.counts() == {
        "a": {CLIPPED: 2},
        "b": {"damaged": 1, "outlier": 1},
        "c": {CLIPPED: 1},
    }
    assert [r.getMessage() for r in caplog.records] == [
        f"worker 1 was left out of round 3: {OUTLIER}",
        f"worker 1 was left out of round 4: {Rejection(reason=RejectReason.DAMAGED)}",
    ]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_log_goes_through_a_checkpoint_of_the_same_keys_always(workers: int) -> None:
    log, fresh = (ContributionLog("worker {}".format) for _ in range(2))
    log.note({1: OUTLIER}, [0], "a round")
    state = log.state_dict(workers=workers)
    assert state["left_out"].keys() == set(range(workers))
    assert {tuple(of) for of in state["contributions"].values()} == {KINDS}
    fresh.load_state_dict(state, workers=workers)
    there = {rank: n for rank, n in log.left_out.items() if rank < workers}
    assert fresh.left_out == there
    assert set(fresh.counts()) == {"worker 0", *(f"worker {rank}" for rank in there)}
    # What earlier versions wrote has no reasons.
    fresh.load_state_dict({"left_out": {"1": 3, "9": 2}}, workers=2)
    assert (fresh.left_out, fresh.counts()) == ({1: 3}, {})
