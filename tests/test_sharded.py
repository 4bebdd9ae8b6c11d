"""Workers of several ranks: two workers of two, in real processes."""

import pytest

from processes import run_ranks


def run(cases: str) -> list[str]:
    processes = run_ranks(cases, 4, script="sharded_ranks.py", timeout_s=200)
    assert [p.returncode for p in processes] == [0] * 4, processes[0].stderr + processes[-1].stderr
    return processes[0].stdout.splitlines()


def test_two_workers_of_two_ranks_reach_what_two_unsharded_ones_do() -> None:
    """Gradients of halves, added up, differ from those of the whole batch in their last bits.

    A mean of n = 40 rows in another order is off by at most n 2^-24 = 2.4e-6 of the terms' size.
    AdamW divides a gradient by its own size, so a step of lr moves by lr times that, 10 steps by
    5e-7; where terms cancel down to a hundredth, by a hundred times as much: 5e-5. Newton-Schulz
    raises small singular values by up to the product of its a, 493: in 10 steps by 2.4e-4. That is
    in fp64. In bf16 it makes another rounding error of every last bit, and raises that by 493 too;
    there only equal gradients, whose result is compared to the bit, can be compared at all.
    """
    distances = [line.split() for line in run("outer_parameters") if len(line.split()) == 3]
    bounds = {"AdamW": 5e-5, "Muon": 2.4e-4}
    assert len(distances) == 6
    for _, inner, distance in distances:
        assert 0 < float(distance) < bounds[inner]


@pytest.mark.parametrize("cases", ["codecs,replicated,hybrid", "host_memory,checkpoints,refused"])
def test_shards_keep(cases: str) -> None:
    assert len(run(cases)) == len(cases.split(","))
