import pytest

from processes import run_ranks
from series_ranks import LOOPS, NUMBERS, expected


def said(case: str, ranks: int) -> list[list[str]]:
    processes = run_ranks(case, ranks, script="series_ranks.py", timeout_s=60)
    for process in processes:
        assert process.returncode == 0, process.stdout + process.stderr
    return [process.stdout.splitlines() for process in processes]


@pytest.mark.slow_cases("at_once-3", "one_after_another-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["one_after_another", "at_once"])
def test_more_loops_than_ever_on_one_group_reach_the_bits_of_one_process(
    case: str, ranks: int
) -> None:
    assert said(case, ranks) == [expected(LOOPS, ranks)] * ranks


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_later_transport_takes_a_message_that_was_left_under_way(ranks: int) -> None:
    assert said("left_under_way", ranks) == [["done"]] * ranks


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_transport_too_many_is_refused_on_every_rank_until_one_is_gone(ranks: int) -> None:
    first, *others = said("too_many", ranks)
    assert [first] * (ranks - 1) == others
    *refusals, after_close, after_drop = first
    assert len(refusals) == 2
    for refusal in refusals:
        assert refusal.startswith(
            f"cannot exchange over one process group with more than {NUMBERS} transports; because "
            f"its messages have numbers for no more, and rank 0 holds {NUMBERS}, rank 1 holds "
        )
    assert (after_close, after_drop) == (str([5] * ranks), str([6] * ranks))


def test_ranks_that_are_at_different_transports_are_told() -> None:
    first, second = said("other_order", 2)
    assert first == second
    assert "rank 0 does so with its transport number 1 there, and rank 1 with number 2" in first[0]


def test_a_closed_transport_sends_nothing() -> None:
    for lines in said("closed", 2):
        assert "exchange a test payload in round 3; because its transport was closed" in lines[0]
