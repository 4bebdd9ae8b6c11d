import pytest

from one_group_ranks import LOOPS, expected
from processes import run_ranks


def said(case: str, ranks: int) -> list[list[str]]:
    processes = run_ranks(case, ranks, script="one_group_ranks.py", timeout_s=60)
    for process in processes:
        assert process.returncode == 0, process.stdout + process.stderr
    return [process.stdout.splitlines() for process in processes]


@pytest.mark.slow_cases("at_once-3", "one_after_another-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["one_after_another", "at_once"])
def test_many_loops_on_one_group_reach_the_bits_of_one_process(case: str, ranks: int) -> None:
    assert said(case, ranks) == [expected(LOOPS, ranks)] * ranks


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_later_transport_takes_a_message_that_was_left_under_way(ranks: int) -> None:
    assert said("left_under_way", ranks) == [["done"]] * ranks


def test_a_closed_transport_sends_nothing() -> None:
    for lines in said("closed", 2):
        assert "exchange a test payload in round 3; because its transport was closed" in lines[0]
